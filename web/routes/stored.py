"""Stored responses: /v1/responses/<id>, and what a new response refers to. A response is a request of the log or of the
archive, whose owner is the caller; it needs no other store.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import Any, Final

from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.events import AnyEvent, Cancelled, Submitted, decode
from pipeline.log.entries import is_tombstone
from pipeline.log.protocol import Entry
from pipeline.names import SUBMITTED_ID, TOKENIZED_ID
from pipeline.recording import Recording
from web.http.keys import Caller
from web.live.folding import PAGE, folded
from web.live.frontend import Frontend, reaching
from web.live.lookup import Lookup, cancel, find
from web.routes.access import known_caller
from web.routes.answers import json_response
from web.routes.named import absent
from web.routes.openapi import EVENTS, JSON, operation
from web.routes.requests import CURSOR, LAST_EVENT_ID, cursor, has_event, stream_of
from web.wire.endpoints import RESPONSES_ENDPOINT
from web.wire.responses import answers
from web.wire.responses.answers import ResponseFrames
from web.wire.responses.items import Conversation, Item, Message, items_of, response_uid
from web.wire.responses.schemas import ResponsesRequest
from web.wire.uids import RESPONSE_PREFIX, uid_of

PATH: Final = f"{RESPONSES_ENDPOINT}/<name>"
MOST_REFERENCED: Final = 1024
"""Most responses to whose items one body may refer: each is read whole."""
LISTED: Final = 20
MOST_LISTED: Final = 100
QUERY: Final = {
    "stream": {"description": "`true`: its events, from the first one on.", "enum": ["true", "false"]},
    "starting_after": {"description": "Only events after this `sequence_number`.", "pattern": "^[0-9]+$"},
}
PAGES: Final = {
    "limit": {"description": f"Most items in the answer, 1 to {MOST_LISTED}.", "pattern": "^[1-9][0-9]{0,2}$"},
    "order": {"description": "`asc`: the oldest first; `desc`: the newest first.", "enum": ["asc", "desc"]},
    "after": {"description": "Only items after the one with this id."},
}


def stored_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("stored", __name__)

    @routes.get(PATH)
    @operation(
        "A stored response, or its events",
        answers=(JSON, EVENTS),
        query=QUERY,
        headers={LAST_EVENT_ID: CURSOR},
    )
    async def read(name: str) -> Response:
        who = known_caller()
        with reaching("response_not_read", uid=name):
            uid, found = await _find(frontend, name, who)
            if _streams():
                return await _stream(frontend, uid, found)
            response = await response_of(frontend, uid, found)
            is_over = response.status not in ("queued", "in_progress")
            return _told(response, await frontend.ask(frontend.log.expires_ms(uid)) if is_over else 0)

    @routes.post(f"{PATH}/cancel")
    @operation("Cancel a response that runs in the background")
    async def stop(name: str) -> Response:
        who = known_caller()
        with reaching("response_not_read", uid=name):
            uid, found = await _find(frontend, name, who)
            if not found.submitted.background:
                message = "Only a response that was created with `background: true` can be cancelled; this one was not."
                raise RequestError(message, code="invalid_value")
            await _cancel(frontend, found)
            return _told(await response_of(frontend, uid, found))

    @routes.delete(PATH)
    @operation("Delete a stored response")
    async def delete(name: str) -> Response:
        who = known_caller()
        with reaching("response_not_read", uid=name):
            _, found = await _find(frontend, name, who)
            await delete_all(frontend, found)
        return json_response({"id": name, "object": "response", "deleted": True})

    @routes.get(f"{PATH}/input_items")
    @operation("What a response was made from", query=PAGES)
    async def inputs(name: str) -> Response:
        who = known_caller()
        with reaching("response_not_read", uid=name):
            uid, found = await _find(frontend, name, who)
        return json_response(page_of([*_input_items(uid, found.submitted)], "desc"))

    return routes


async def prepare(frontend: Frontend, asked: ResponsesRequest, *, who: Caller) -> int:
    """Look up the responses and items that a request refers to; return their size in characters. Raises as the log
    does.

    Raises:
        RequestError: One of them does not exist for *who*.
    """
    before, named = asked.previous_response_id, asked.references
    if before is None and not named:
        return 0
    past: Sequence[Message] = ()
    with reaching("response_not_read", uid=before or ""):
        if before is not None:
            uid, found = await _find(frontend, before, who, param="previous_response_id")
            response = await _done(frontend, uid, found, "previous_response_id")
            past = _conversation(found.submitted) + _said(response)
        items = await _items(frontend, named, who)
    asked.goes_on(past, items)
    return sum(len(str(message)) for message in (*past, *items.values()))


async def _items(frontend: Frontend, named: Sequence[str], who: Caller) -> Mapping[str, Item]:
    """Return the items with the ids *named*. Raises RequestError for the first that does not exist for *who*."""
    wanted: dict[str, list[str]] = defaultdict(list)
    for item_id in named:
        wanted[response_uid(item_id)].append(item_id)
    if len(wanted) > MOST_REFERENCED:
        message = (
            f"input: refers to items of {len(wanted)} responses; at most {MOST_REFERENCED}. Send the items instead."
        )
        raise RequestError(message, code="invalid_value", param="input")
    items: dict[str, Item] = {}
    for uid, ids in wanted.items():
        found = await find_own(frontend, uid, who) if uid else None
        if found is not None:
            response = await _done(frontend, uid, found, "input")
            items |= {item["id"]: item for item in (*response.output(), *_input_items(uid, found.submitted))}
        for item_id in ids:
            if item_id not in items:
                message = f"Item with id '{item_id}' not found."
                raise RequestError(message, code="item_not_found", param="input", status=404)
    return {item_id: items[item_id] for item_id in named}


async def _done(frontend: Frontend, uid: str, found: Lookup, param: str) -> answers.Response:
    """Return a response that is over. Raises RequestError: It is not."""
    response = await response_of(frontend, uid, found)
    if response.status in ("queued", "in_progress"):
        message = f"{param}: {RESPONSE_PREFIX}{uid} is not done; wait for it, or cancel it"
        raise RequestError(message, code="invalid_value", param=param)
    return response


async def _find(frontend: Frontend, name: str, who: Caller, *, param: str | None = None) -> tuple[str, Lookup]:
    """Return the uid and the request of the stored response *name* of *who*. Raises as the log does.

    Raises:
        RequestError: There is none.
    """
    uid = uid_of(name) if name.startswith(RESPONSE_PREFIX) else ""
    found = await find_own(frontend, uid, who) if uid else None
    if found is None:
        code, what = (
            ("previous_response_not_found", "Previous response") if param else ("response_not_found", "Response")
        )
        raise RequestError(f"{what} with id '{name}' not found.", code=code, param=param, status=404)
    return uid, found


async def find_own(frontend: Frontend, uid: str, who: Caller, endpoint: str = RESPONSES_ENDPOINT) -> Lookup | None:
    """Return what *who* has stored at an *endpoint* under *uid*; None if there is nothing. Raises as the log does."""
    found = await find(frontend.log, frontend.archived, uid)
    if found is None or not who.may_see(found.submitted.owner):
        return None
    return found if found.submitted.endpoint == endpoint and found.submitted.stored else None


def _conversation(event: Submitted) -> list[Message]:
    """Return the messages of a request without its instructions, which the next one does not inherit."""
    return list(event.messages[1 if event.presentation.echoes.get("instructions") else 0 :])


def _input_items(uid: str, event: Submitted) -> Iterator[Item]:
    return items_of(_conversation(event), uid, event.presentation.echoes.get("special", {}))


def _said(response: answers.Response) -> list[Message]:
    """Return what a response said, as a message."""
    said = Conversation()
    for number, item in enumerate(response.output()):
        said.add(item, f"output.{number}")
    return said.messages


async def response_of(frontend: Frontend, uid: str, found: Lookup) -> answers.Response:
    """Return a response as it stands. Raises as the log does."""
    response = answers.Response(uid, found.submitted)
    await fold(frontend, uid, found.archived, response.apply)
    return response


async def fold(frontend: Frontend, uid: str, archived: Recording | None, apply: Callable[[AnyEvent], object]) -> None:
    """Call *apply* with the events of a history but the first two: of that in the archive, or in the log. Raises as the
    log does.

    Raises:
        RequestError: It is gone.
    """
    log, after = frontend.log, SUBMITTED_ID
    async with frontend.folding.turn():
        while archived is None:
            page = (await log.histories({uid: after}, max_entries=PAGE))[uid]
            if page is None:  # it has left the log since it was found
                archived = (await frontend.archived.read((uid,))).get(uid)
                if archived is None:
                    raise absent(uid, frontend.limits.retention_s)
                break
            if not page:
                return
            if is_tombstone(page) and not await log.entries(uid, (SUBMITTED_ID,)):  # it was erased
                raise absent(uid, frontend.limits.retention_s)
            await folded(len(page), functools.partial(_apply, apply, page))
            after = page[-1].id
        rest = [*dropwhile(lambda entry: entry.id != after, archived.entries)][1:]
        await folded(len(rest), functools.partial(_apply, apply, rest))


def _apply(apply: Callable[[AnyEvent], object], entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.id not in (SUBMITTED_ID, TOKENIZED_ID):
            apply(decode(entry.fields))


def _told(response: answers.Response, expires_ms: int = 0) -> Response:
    """Return a response as JSON. *expires_ms*: until when the log has it; 0: it is not known."""
    told = response.plain()
    if expires_ms:
        told["expires_at"] = expires_ms // 1000
    return json_response(told)


async def _cancel(frontend: Frontend, found: Lookup) -> None:
    uids = dict.fromkeys(found.uids, found.submitted.frontend)
    for _ in await cancel(frontend.log, uids) if found.archived is None else ():
        frontend.count_end(Cancelled(by="client"))


async def delete_all(frontend: Frontend, found: Lookup) -> None:
    """Cancel what was found, if it runs, and erase it, also from the archive. Raises as the log does."""
    await _cancel(frontend, found)
    for uid in found.uids:
        await frontend.ask(frontend.log.erase(uid))


async def _stream(frontend: Frontend, uid: str, found: Lookup) -> Response:
    after, where = cursor(only_header=True)
    if after and not await frontend.ask(has_event(frontend, found, uid, after)):
        raise RequestError(f"{where}: the request has no event {after}", param=where, code="invalid_value")
    frames = ResponseFrames(uid, found.submitted, ids=True, posted=True, after=_number("starting_after"))
    return await stream_of(frontend, uid, found, frames, after=after)


def _streams() -> bool:
    given = request.args.get("stream", "false").lower()
    if given not in ("true", "false"):
        raise RequestError("stream: should be `true` or `false`", param="stream", code="invalid_value")
    return given == "true"


def _number(name: str) -> int:
    given = request.args.get(name, "-1")
    if given != "-1" and not (given.isdecimal() and len(given) < 16):
        raise RequestError(f"{name}: should be the sequence number of an event", param=name, code="invalid_value")
    return int(given)


def page_of(items: Sequence[Item], usual: str) -> dict[str, Any]:
    """Return the page of *items*, the oldest first, that the query asks for; the *usual* order is `asc` or `desc`.

    Raises:
        RequestError: The query is wrong.
    """
    asked = request.args
    order, limit, after = asked.get("order", usual), asked.get("limit", str(LISTED)), asked.get("after")
    if order not in ("asc", "desc"):
        raise RequestError("order: should be `asc` or `desc`", param="order", code="invalid_value")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MOST_LISTED):
        message = f"limit: should be a whole number from 1 to {MOST_LISTED}"
        raise RequestError(message, param="limit", code="invalid_value")
    found = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(found) if item["id"] == after]
        if not places:
            raise RequestError("after: there is no item with this id", param="after", code="invalid_value")
        found = found[places[0] + 1 :]
    shown = found[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(found) > len(shown)}
