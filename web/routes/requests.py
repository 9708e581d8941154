"""/v1/requests/<uid>: any request of the log or the archive, running or finished, whichever client sent it to whichever
process. With keys, one of another owner does not exist.

GET tells its story, DELETE cancels it, GET .../events sends the frames of its endpoint, from the start, after an event,
or after the characters that the client has. POST .../replay computes it again on this server, as `minisgl replay run`
has it done. The uid that siblings share stands for all of them. POST /abort_request cancels, as in SGLang.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import orjson
import structlog
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, Submitted
from pipeline.log.protocol import Entry
from pipeline.names import GENERATE, SEAL
from pipeline.replaying import NotComputed, again
from pipeline.views.history import story
from pipeline.views.recorded import History
from web.http.keys import Caller
from web.live.folding import folded, untold_histories
from web.live.frontend import Frontend, reaching
from web.live.lookup import AT_ONCE, Lookup, cancel, find, living
from web.live.open_request import read_found, submit_without_client
from web.routes.access import caller, check_admin, known_caller, place
from web.routes.answers import checked_response, json_response, name_unknown, stream_response
from web.routes.named import absent, find_of, history_of, is_id, several, uid_in
from web.routes.openapi import EVENTS, operation
from web.wire import fields
from web.wire.endpoints import frames_for
from web.wire.frames import EventFrames, Frames
from web.wire.known import AFTER_CHARACTERS, CHARACTERS, Known, check_countable, num_known
from web.wire.openai.strict import Strict, parsed
from web.wire.sglang.schemas import AbortRequest, parse_abort
from web.wire.story import StoryFrames
from web.wire.uids import uid_of

logger = structlog.get_logger()

PATH: Final = "/v1/requests/<name>"
LAST_EVENT_ID: Final = "Last-Event-ID"
CURSOR: Final = {"description": "The id of an event.", "pattern": "^[0-9]+-[0-9]+$"}
FORMATS: Final[Mapping[str, Callable[[], Frames]]] = {
    "events": functools.partial(EventFrames, ids=True),
    "story": StoryFrames,
}
"""Formats whose streams have all of a history."""
COMES_AGAIN_S: Final = 10.0
"""For so long a client that resumes after an event waits for it, if the request runs and has none as late as that."""
LOOK_AGAIN_S: Final = 0.2
MOST_STORIES_BYTES: Final = 16 << 20
"""Longest answer with the stories of several siblings."""


def request_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("requests", __name__)

    @routes.get(PATH)
    @operation("The story of a request, running or finished")
    async def tell(name: str) -> Response:
        who = known_caller()
        uid = uid_in(name)
        with reaching("request_not_read", uid=uid):
            found = await find_of(frontend, uid, who)
            async with frontend.folding.turn():
                stories = await _stories(frontend, found.uids)
        if found.uids != (uid,):
            documents = [orjson.Fragment(each) for each in stories]
            return json_response({"uid": uid, "siblings": found.uids, "requests": documents})
        if not stories:
            raise absent(uid, frontend.limits.retention_s)
        return json_response(bytes(stories[0]))

    @routes.delete(PATH)
    @operation("Cancel a request")
    async def cancel(name: str) -> Response:
        who = known_caller()
        uid = uid_in(name)
        with reaching("request_not_read", uid=uid):
            found = await find_of(frontend, uid, who)
            cancelled = await _cancel(frontend, dict.fromkeys(found.uids, found.submitted.frontend))
        logger.info("request_cancelled", uid=uid, cancelled=bool(cancelled))
        body: dict[str, object] = {"id": uid, "object": "request", "cancelled": bool(cancelled)}
        if found.uids != (uid,):
            body["siblings"] = {each: each in cancelled for each in found.uids}
        return json_response(body)

    @routes.post("/abort_request")
    @operation("Cancel a request, or all requests, as in SGLang", AbortRequest)
    async def abort() -> Response:
        who = known_caller()
        try:
            content = await request.get_data(False, False, False)
            async with frontend.turns.turn(len(content)):
                asked = parse_abort(content)
            del content
            place().has_read()
            if asked.abort_all:
                check_admin()
            body = await _abort(frontend, asked, who)
        except RequestError as error:
            logger.info("request", status=error.status, error=error.code, param=error.param)
            raise
        logger.info("requests_aborted", all=bool(asked.abort_all), **{name: len(uids) for name, uids in body.items()})
        response = json_response(body)
        name_unknown(response, asked.unknown)
        return response

    @routes.get(f"{PATH}/events")
    @operation(
        "The stream of a request, from the start, after an event or after some characters",
        answers=(EVENTS,),
        query={
            "format": {
                "description": "`events`: every event of the history; `story`: what each changes in its story",
                "enum": [*FORMATS],
            },
            "starting_after": CURSOR,
            AFTER_CHARACTERS: CHARACTERS,
        },
        headers={LAST_EVENT_ID: CURSOR},
    )
    async def events(name: str) -> Response:
        who = known_caller()
        uid = uid_in(name)
        frontend.admit()
        form = _form(request.args.get("format"))
        after, where = cursor()
        has = _known(form, after=after)
        with reaching("request_not_read", uid=uid):
            found = await frontend.ask(find_of(frontend, uid, who))
            if has is not None:
                check_countable(found.submitted, len(found.uids))
            if found.uids != (uid,):
                raise several(found.uids)
            if after and not await frontend.ask(has_event(frontend, found, uid, after)):
                instead = f"resume with ?{AFTER_CHARACTERS}=, or read it from its start"
                message = f"{where}: the request has no event {after}; {instead}"
                raise RequestError(message, param=where, code="invalid_value")
        return await _stream(frontend, uid, found, form, after=after, has=has)

    return routes


async def _stream(frontend: Frontend, uid: str, found: Lookup, form: str, *, after: str, has: Known | None) -> Response:
    """Return the stream of a request that was *found*: its frames or, in a *form* of FORMATS, all of its history.

    Raises:
        RequestError: It has no frames, or too many clients view such streams, or the client cannot resume so.
    """
    submitted, whole = found.submitted, form in FORMATS
    frames = FORMATS[form]() if whole else frames_for(uid, [submitted], ids=True, known=has)
    if frames is None:
        message = f"format: a request of {submitted.endpoint} has no frames; send `events`"
        raise RequestError(message, param="format", code="invalid_value")
    return await stream_of(frontend, uid, found, frames, after=after, whole=whole, checked=has is not None)


async def stream_of(
    frontend: Frontend,
    uid: str,
    found: Lookup,
    frames: Frames,
    *,
    after: str,
    whole: bool = False,
    checked: bool = False,
) -> Response:
    """Return the *frames* of a request after the id *after*; *whole*: of all its events. *checked*: the frames may
    refuse the request. Raises as the log does.

    Raises:
        RequestError: Too many clients view such streams, or the frames refused it.
    """
    if frontend.readers.count(uid):  # a further one of the same request: else running requests bound their number
        place().views()
    client = await read_found(frontend, uid, found, whole=whole)
    if checked:
        response = await checked_response(client, frames, frontend.turns)
    else:
        response = stream_response(client, frames, frontend.turns, after=after)
    response.headers["x-minisgl-uid"] = uid
    return response


async def has_event(frontend: Frontend, found: Lookup, uid: str, entry_id: str) -> bool:
    """Return whether a request has an event. After a failover that lost it, a batch-invariant engine may be about to
    make it again: wait for it a while, if no later one is there. Raises as the log does.
    """
    if found.archived is not None:
        return any(entry.id == entry_id for entry in found.archived.entries)
    until_s = time.monotonic() + (COMES_AGAIN_S if frontend.readiness.batch_invariant else 0)
    while True:
        later = (await frontend.log.histories({uid: entry_id}, max_entries=1))[uid]
        if await frontend.log.entries(uid, (entry_id,)):  # it came before a later one
            return True
        if later or later is None or entry_id == SEAL or time.monotonic() > until_s:
            return False
        await asyncio.sleep(LOOK_AGAIN_S)


async def _stories(frontend: Frontend, uids: Sequence[str]) -> list[bytes]:
    """Return the stories, in JSON, of those of *uids* that the log has. Raises as the log does.

    Raises:
        RequestError: Those of several siblings are too long together, since each repeats its parameters.
    """
    stories = list[bytes]()
    for first in range(0, len(uids), AT_ONCE):
        histories = await untold_histories(frontend.log, uids[first : first + AT_ONCE])
        archived = await frontend.archived.read([uid for uid, history in histories.items() if not history])
        for uid, history in histories.items():
            history = list(archived[uid].entries) if uid in archived else history
            if history:
                stories.append(await folded(len(history), functools.partial(_story, uid, history)))
                if len(stories) > 1 and sum(map(len, stories)) > MOST_STORIES_BYTES:
                    raise several(uids, "story")
                await asyncio.sleep(0)
    return stories


def _story(uid: str, history: Sequence[Entry]) -> bytes:
    return orjson.dumps(story(uid, history))


async def _cancel(frontend: Frontend, frontends: Mapping[str, str]) -> list[str]:
    cancelled = await cancel(frontend.log, frontends)
    for _ in cancelled:
        frontend.count_end(Cancelled(by="client"))
    return cancelled


async def _abort(frontend: Frontend, asked: AbortRequest, who: Caller) -> dict[str, list[str]]:
    """Cancel the requests that are *asked* for; return which of them ended now, which before, and which are unknown to
    *who*.

    Raises:
        RequestError: The log cannot be reached.
    """
    name = asked.rid or ""
    with reaching("request_not_read", uid=name):
        if asked.abort_all:
            frontends = await living(frontend.log)
        else:
            uid = uid_of(name)
            found = await find(frontend.log, frontend.archived, uid) if uid else None
            if found is None or not who.may_see(found.submitted.owner):
                return {"aborted": [], "ended": [], "unknown": [name]}
            frontends = dict.fromkeys(found.uids, found.submitted.frontend)
        aborted = await _cancel(frontend, frontends)
    return {"aborted": aborted, "ended": sorted(frontends.keys() - set(aborted)), "unknown": []}


def _form(given: str | None) -> str:
    """Return the form of the stream that a client has *given*; "" for the frames of the endpoint. Raises RequestError
    for anything else."""
    if given not in (None, *FORMATS):
        raise RequestError("format: should be `events` or `story`, or left out", param="format", code="invalid_value")
    return given or ""


def cursor(*, only_header: bool = False) -> tuple[str, str]:
    """Return the id after which the client wants to resume, or "", and the name of the header or parameter.

    A browser that reconnects sends the header beside the original address, so the header wins. Raises RequestError if
    it is not an id.
    """
    told = [(LAST_EVENT_ID, request.headers.get(LAST_EVENT_ID)), _asked("starting_after")]
    for where, given in told[: 1 if only_header else 2]:
        if given:
            if not is_id(given):
                raise RequestError(f"{where}: should be the id of an event", param=where, code="invalid_value")
            return given, where
    return "", ""


def _known(form: str, *, after: str) -> Known | None:
    """Return the characters after which the client wants to resume; None if it does not say that.

    Raises RequestError if it says several places, or wants the history, which are not divided into characters.
    """
    given = request.args.get(AFTER_CHARACTERS)
    if given is None:
        return None
    num = num_known(given)
    if form or request.args.get("starting_after"):
        other = f"format={form}" if form else "starting_after"
        message = f"{AFTER_CHARACTERS}: cannot be combined with {other}; leave one of them out"
        raise RequestError(message, param=AFTER_CHARACTERS, code="invalid_value")
    return None if after else Known(num)  # a browser that reconnects sends the id after which it resumes


def _asked(name: str) -> tuple[str, str | None]:
    return name, request.args.get(name)


class ReplayRequest(Strict):
    """The body of POST /v1/requests/{name}/replay; it may be empty."""

    cached: bool = False
    """It may read pages of the prefix cache. Without, all of its prompt is computed."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted."""
        return fields.first_of(self.extra)


def parse_replay(body: bytes) -> ReplayRequest:
    """Return what *body* asks for. Raises RequestError: the first thing that is wrong."""
    return parsed(ReplayRequest, body) if body else ReplayRequest()


DEADLY: Final = "poisonous"
"""The code of a request that killed its workers."""


def replay_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("replays", __name__)

    @routes.post("/v1/requests/<name>/replay")
    @operation("Compute a request again", ReplayRequest, body_is_optional=True)
    async def replay(name: str) -> Response:
        who = known_caller()
        try:
            asked = parse_replay(await request.get_data(False, False, False))
            place().has_read()
            uid = uid_in(name)
            frontend.admit()
            with reaching("request_not_read", uid=uid):
                async with frontend.folding.turn():
                    history = await history_of(frontend, uid, who, "replay")
                await _check_engine(frontend)
            new_uid = (await submit_without_client(frontend, _again(history, asked), caller().quota)).uid
        except RequestError as error:
            logger.info("request", status=error.status, error=error.code, param=error.param)
            raise
        logger.info("request_replayed", uid=new_uid, of=uid)
        response = json_response({"uid": new_uid, "of": uid})
        response.headers["x-minisgl-uid"] = new_uid
        name_unknown(response, asked.unknown)
        return response

    return routes


def _again(history: History, asked: ReplayRequest) -> Submitted:
    """Return the request that computes *history* again. Raises RequestError if none can."""
    if isinstance(history.end, Failed) and history.end.code == DEADLY:
        message = (
            "This request killed its engine, so the server does not compute it again; `minisgl replay run` does, in a "
            "process of its own, if you pass --model."
        )
        raise RequestError(message, code="not_replayable")
    try:
        return again(history, cached=asked.cached)
    except NotComputed as error:
        raise RequestError(f"It cannot be computed again: {error}", code="not_replayable") from None


async def _check_engine(frontend: Frontend) -> None:
    """Raise RequestError if no engine is there to compute it. Raises as the log does."""
    if not await frontend.log.statuses(GENERATE):
        raise RequestError("No engine lives now; send it again later.", code="loading", status=503)
