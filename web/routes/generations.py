"""POST /v1/chat/completions, /v1/completions and /generate. A stream's headers go out with the first token, a refusal,
or after 10 s of waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import structlog
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, Finished, Submitted, TokensProduced
from pipeline.log.protocol import Once, Submission
from pipeline.process.failpoints import failpoint
from pipeline.scored import MOST_SCORES, TOO_MANY
from web.http.keys import Caller
from web.http.turns import Turns
from web.live.frontend import Frontend, reaching
from web.live.lookup import Lookup, find
from web.live.open_request import OpenRequest, open_request, read_found, submit_without_client
from web.routes.access import caller, place
from web.routes.answers import error_response, json_pieces, json_response, name_unknown, stream_response
from web.routes.openapi import EVENTS, JSON, operation
from web.routes.stored import prepare, response_of
from web.wire import copies
from web.wire.anthropic.schemas import MessagesRequest, message_events, parse_messages
from web.wire.endpoints import (
    CHAT_ENDPOINT,
    COMPLETIONS_ENDPOINT,
    COUNT_ENDPOINT,
    GENERATE_ENDPOINT,
    MESSAGES_ENDPOINT,
    RESPONSES_ENDPOINT,
    body_of,
    frames_for,
)
from web.wire.frames import EVENT_IDS, EVENT_IDS_SCHEMA, wants_ids
from web.wire.idempotency import HEADER, SCHEMA, once_of
from web.wire.openai.answers import choices_for
from web.wire.openai.errors import CLIENT_CLOSED, error_of
from web.wire.openai.schemas import ChatRequest, CompletionRequest, parse_chat, parse_completion
from web.wire.responses import answers as responses
from web.wire.responses.schemas import ResponsesRequest, parse_response, response_events
from web.wire.sglang.schemas import SGLangRequest, TextRequest, parse_generate
from web.wire.submit import (
    LONGEST_PLACE,
    WARNINGS,
    Defaults,
    chat_events,
    completion_events,
    generate_events,
    warnings_of,
)

logger = structlog.get_logger()

BOTH: Final[Mapping[str, Any]] = {
    "answers": (JSON, EVENTS),
    "headers": {HEADER: SCHEMA, copies.HEADER: copies.SCHEMA, EVENT_IDS: EVENT_IDS_SCHEMA},
}
"""Entry in /openapi.json of routes that answer with one body or a stream."""


class Asked(Protocol):
    """A body, parsed."""

    @property
    def model(self) -> str | None: ...

    @property
    def unknown(self) -> tuple[str, ...]: ...

    @property
    def ignored(self) -> tuple[str, ...]: ...

    @property
    def left_out(self) -> tuple[str, ...]: ...


TOO_MANY_HELD: Final = Failed(
    status=400,
    code=TOO_MANY,
    message=f"logprobs: the answer has more than {MOST_SCORES} log-probabilities of tokens and their alternatives; "
    "stream it, or ask for fewer tokens, alternatives or answers.",
    param="logprobs",
)
"""The end of an answer that would take too much memory in this process."""

IGNORED: Final = "x-minisgl-ignored"
"""The header with what the model does not get."""
ANY_NAME: Final = (MESSAGES_ENDPOINT, COUNT_ENDPOINT, RESPONSES_ENDPOINT)
"""Endpoints that serve any model name: their clients ask for the models of one vendor."""

STORED: Final = (CHAT_ENDPOINT, RESPONSES_ENDPOINT)
"""Endpoints whose answers can be read under their ids."""

R = TypeVar("R", bound=Asked)
R_contra = TypeVar("R_contra", bound=Asked, contravariant=True)


class ToEvents(Protocol[R_contra]):
    """Turns a request into the events that are submitted."""

    def __call__(self, request: R_contra, *, frontend: str, model: str, defaults: Defaults) -> Sequence[Submitted]: ...


Respond = Callable[[OpenRequest], Awaitable[Response]]
"""Waits for the events of a request, and answers with them."""


def generation_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("generations", __name__)

    @routes.post("/chat/completions")
    @routes.post(CHAT_ENDPOINT)
    @operation("Answer a conversation", ChatRequest, **BOTH)
    async def chat() -> Response:
        return await answer(frontend, CHAT_ENDPOINT, parse_chat, chat_events)

    @routes.post("/completions")
    @routes.post(COMPLETIONS_ENDPOINT)
    @operation("Continue a text, or several", CompletionRequest, **BOTH)
    async def complete() -> Response:
        return await answer(frontend, COMPLETIONS_ENDPOINT, parse_completion, completion_events)

    @routes.post(MESSAGES_ENDPOINT)
    @operation("Answer a conversation, in Anthropic's form", MessagesRequest, **BOTH)
    async def message() -> Response:
        return await answer(frontend, MESSAGES_ENDPOINT, parse_messages, message_events)

    @routes.post(RESPONSES_ENDPOINT)
    @operation("Create a response, in the form of OpenAI's Responses API", ResponsesRequest, **BOTH)
    async def respond() -> Response:
        look_up = functools.partial(prepare, frontend, who=caller())
        return await answer(frontend, RESPONSES_ENDPOINT, parse_response, response_events, prepare=look_up)

    @routes.post(GENERATE_ENDPOINT)
    @operation("Continue a text, in SGLang's form or in Mini-SGLang's", SGLangRequest, TextRequest, **BOTH)
    async def generate() -> Response:
        return await answer(frontend, GENERATE_ENDPOINT, parse_generate, generate_events)

    return routes


async def answer(
    frontend: Frontend,
    endpoint: str,
    parse: Callable[[bytes], R],
    to_events: ToEvents[R],
    respond: Respond | None = None,
    prepare: Callable[[R], Awaitable[int]] | None = None,
) -> Response:
    """Answer the current HTTP request: *parse* reads its body, *prepare* looks up what it refers to and returns how
    long that is, *to_events* turns it into requests of the log, and *respond* makes the answer, if that is not text.

    Raises:
        RequestError: The request is wrong, or the log does not take it now.
    """
    who = caller()
    body = await request.get_data(False, False, False)
    try:
        async with frontend.turns.turn(len(body)):
            asked = parse(body)
        more = await prepare(asked) if prepare is not None else 0
        async with frontend.turns.turn(len(body) + more):
            once = once_of(request.headers.get(HEADER), endpoint, body, scope=who.scope)
            copied = copies.labels_of(request.headers.get(copies.HEADER))
            ids = wants_ids(request.headers.get(EVENT_IDS))
            frontend.admit()
            is_strict = frontend.strict_model_names and endpoint not in ANY_NAME
            model = frontend.readiness.resolve(asked.model, strict=is_strict)
            defaults = frontend.readiness.sampling_defaults
            events = to_events(asked, frontend=frontend.name, model=model, defaults=defaults)
            warnings = warnings_of(events, frontend.readiness.bos, asked.ignored)
        if copied:
            events = [event.model_copy(update={"labels": {**event.labels, **copied}}) for event in events]
        if events[0].labels.get("store") is True and endpoint in STORED:
            events = [event.model_copy(update={"stored": True}) for event in events]
        if who.owner:
            of_key = {"owner": who.owner, "weight": who.weight, "overtakes": who.overtakes}
            events = [event.model_copy(update=of_key) for event in events]
    except RequestError as error:  # it has no history, but it has a log line
        logger.info("request", status=error.status, error=error.code, param=error.param)
        raise
    del body  # do not keep it: it may be large, and the answer may take long
    place().has_read()
    if events[0].background:
        uid, response = await _in_background(frontend, events[0], who, once, ids=ids)
        return _named(response, uid, events[0], asked, warnings)
    opened = await open_request(frontend, events, once=once, quota=who.quota)
    if any(frontend.readers.count(uid) > 1 for uid in opened.reads[:1]):  # as in `requests.events`
        try:
            place().views()
        except RequestError as error:
            raise opened.refuse(error) from None
    try:
        response = await (respond(opened) if respond else _generated(opened, frontend.turns, ids=ids))
    except Exception:
        raise opened.break_off() from None
    return _named(response, opened.uid, opened.event, asked, warnings)


def _named(response: Response, uid: str, event: Submitted, asked: Asked, warnings: Sequence[str]) -> Response:
    """Return *response* with the headers that say which request it answers, and what is strange about that."""
    response.headers["x-minisgl-uid"] = uid
    response.headers["x-minisgl-model"] = quote(event.model, safe="/:@")
    name_unknown(response, asked.unknown)
    if asked.left_out:
        response.headers[IGNORED] = ", ".join(quote(name, safe="")[:LONGEST_PLACE] for name in asked.left_out)
    if warnings:
        response.headers[WARNINGS] = ", ".join(warnings)
    return response


async def _in_background(
    frontend: Frontend, event: Submitted, who: Caller, once: Once | None, *, ids: bool
) -> tuple[str, Response]:
    """Submit a request that no client has to wait for; return its uid, and the answer: its response as it stands.
    Another client may have sent it before, under the same idempotency key."""
    event = event.model_copy(update={"frontend": ""})
    while True:
        submitted = await submit_without_client(frontend, event, who.quota, once=once)
        uid = submitted.uid
        with reaching("response_not_read", uid=uid):
            found = await find(frontend.log, frontend.archived, uid)
            if found and found.submitted.owner not in ("", event.owner):  # keys do not share what they send
                found = None
            told = await response_of(frontend, uid, found) if found else responses.Response(uid, event)
        is_in_vain = not found or (told.ended is not None and error_of(told.ended).status >= CLIENT_CLOSED)
        if once is None or submitted.submission is not Submission.ATTACH or not is_in_vain:
            break
        once = replace(once, instead_of=uid)
    logger.info("request", uid=uid, model=event.model, background=True, status=200)
    if event.presentation.stream:
        client = await read_found(frontend, uid, found or Lookup((uid,), event), whole=False)
        frames = responses.ResponseFrames(uid, told.event, ids=ids, posted=True)
        return uid, stream_response(client, frames, frontend.turns, begun=frames.begun())
    return uid, json_response(told.plain())


async def _generated(opened: OpenRequest, turns: Turns, *, ids: bool) -> Response:
    if opened.event.presentation.stream:
        return await _streamed(opened, turns, ids=ids)
    return await _whole(opened, turns)


async def _whole(opened: OpenRequest, turns: Turns) -> Response:
    choices, has_begun, is_too_long = choices_for(opened.uid, opened.events), False, False
    has_scores = opened.event.sampling.logprobs is not None
    while True:
        events = await opened.next()
        if events and not has_begun:
            failpoint("web.before_first_byte")
            has_begun = True
        for event in events:
            match event.event:
                case TokensProduced() as tokens:
                    choices[event.index].apply(tokens)
                case Finished() as finished:
                    choices[event.index].finish(finished)
                case Failed() | Cancelled() as ended:
                    return error_response(error_of(ended))
        if has_scores and not is_too_long and sum(choice.scores.num_pairs for choice in choices) > MOST_SCORES:
            is_too_long = True
            await opened.end(TOO_MANY_HELD)
        elif opened.done:
            return json_pieces(body_of(opened.uid, opened.events, choices), turns)


async def _streamed(opened: OpenRequest, turns: Turns, *, ids: bool) -> Response:
    first = await opened.next()
    if first:
        failpoint("web.before_first_byte")
    match [event.event for event in first if isinstance(event.event, Failed | Cancelled)]:
        case [ended, *_] if not isinstance(first[0].event, TokensProduced):
            return error_response(error_of(ended))
    frames = frames_for(opened.uid, opened.events, ids=ids, posted=True)
    assert frames is not None
    return stream_response(opened, frames, turns, first)
