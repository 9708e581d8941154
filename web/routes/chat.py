"""POST /v1/chat/completions. A stream's headers go out with the first token, a refusal, or after 10 s of waiting."""

from __future__ import annotations

from urllib.parse import quote

import structlog
from quart import Blueprint, Response, g, request

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, Finished, TokensProduced
from pipeline.failpoints import failpoint
from pipeline.log import Quota
from web.answers import error_response, json_response, stream_response
from web.frontend import Frontend, OpenRequest
from web.idempotency import HEADER, once_of
from web.openai.errors import error_of
from web.openai.responses import completion
from web.openai.schemas import parse_chat
from web.streams import frames_for, written
from web.submit import CHAT_ENDPOINT, to_submitted
from web.tail import Heard

logger = structlog.get_logger()

UNKNOWN_SHOWN = 32
"""Unknown fields that the header names, each with so many characters at most."""


def chat_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("chat", __name__)

    @routes.post(CHAT_ENDPOINT)
    async def chat() -> Response:
        quota: Quota | None = g.quota
        body = await request.get_data(False, False, False)
        try:
            asked = parse_chat(body)
            once = once_of(request.headers.get(HEADER), CHAT_ENDPOINT, body, scope=quota.key if quota else "")
            frontend.admit()
            model = frontend.readiness.resolve(asked.model)
        except RequestError as error:  # the canonical line of a request that has no history
            logger.info("request", status=error.status, error=error.code, param=error.param)
            raise
        stream = bool(asked.stream)
        event = to_submitted(asked, frontend=frontend.name, model=model)
        opened = await frontend.open(event, stream=stream, once=once, quota=quota)
        try:
            response = await (_streamed(opened) if stream else _whole(opened))
        except Exception:
            raise opened.break_off() from None
        response.headers["x-minisgl-uid"] = opened.uid
        if asked.unknown:
            names = (quote(name, safe="$[]")[:UNKNOWN_SHOWN] for name in asked.unknown[:UNKNOWN_SHOWN])
            response.headers["x-minisgl-unknown-fields"] = ", ".join(names)
        return response

    return routes


async def _whole(opened: OpenRequest) -> Response:
    texts: list[str] = []
    while True:
        batch = await opened.next()
        if batch and not texts:
            failpoint("web.before_first_byte")
        for heard in batch:
            match heard.event:
                case TokensProduced(text=text):
                    texts.append(text)
                case Finished() as finished:
                    body = completion(opened.uid, opened.created_s, opened.event.model, "".join(texts), finished)
                    return json_response(body)
                case Failed() | Cancelled() as ended:
                    return error_response(error_of(ended))


async def _streamed(opened: OpenRequest) -> Response:
    first = await opened.next()
    if first:
        failpoint("web.before_first_byte")
    match first:
        case [Heard(event=Failed() | Cancelled() as ended), *_]:
            return error_response(error_of(ended))
    frames = frames_for(opened.uid, opened.event)
    assert frames is not None
    return stream_response(written(opened, frames, first))
