"""POST /v1/chat/completions. A stream's headers go out with the first token, a refusal, or after 10 s of waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

import structlog
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, Finished, TokensProduced
from pipeline.log import Reply
from web import sse
from web.answers import error_response, json_response
from web.frontend import Frontend, OpenRequest
from web.openai.errors import error_body, error_of
from web.openai.responses import ChatFrames, completion
from web.openai.schemas import parse_chat
from web.submit import CHAT_ENDPOINT, to_submitted

logger = structlog.get_logger()

UNKNOWN_SHOWN = 32
"""Unknown fields that the header names, each with so many characters at most."""


def chat_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("chat", __name__)

    @routes.post(CHAT_ENDPOINT)
    async def chat() -> Response:
        body = await request.get_data(False, False, False)
        try:
            asked = parse_chat(body)
            frontend.admit()
            model = frontend.readiness.resolve(asked.model)
        except RequestError as error:  # the canonical line of a request that has no history
            logger.info("request", status=error.status, error=error.code, param=error.param)
            raise
        stream = bool(asked.stream)
        opened = await frontend.open(to_submitted(asked, frontend=frontend.name, model=model), stream=stream)
        try:
            response = await (_streamed(opened, asked.include_usage) if stream else _whole(opened))
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
        for reply in await opened.next():
            match reply.event:
                case TokensProduced(text=text):
                    texts.append(text)
                case Finished() as finished:
                    body = completion(opened.uid, opened.created_s, opened.event.model, "".join(texts), finished)
                    return json_response(body)
                case Failed() | Cancelled() as ended:
                    return error_response(error_of(ended))


async def _streamed(opened: OpenRequest, include_usage: bool) -> Response:
    first = await opened.next()
    match first:
        case [Reply(event=Failed() | Cancelled() as ended), *_]:
            return error_response(error_of(ended))
    frames = ChatFrames(opened.uid, opened.created_s, opened.event.model, include_usage=include_usage)
    response = Response(_written(opened, frames, first), content_type=sse.CONTENT_TYPE)
    response.headers["cache-control"] = "no-cache"
    response.headers["x-accel-buffering"] = "no"
    return response


async def _written(opened: OpenRequest, frames: ChatFrames, replies: Sequence[Reply]) -> AsyncIterator[bytes]:
    """Yield what goes to the socket: all frames that there are at a time in one piece."""
    started = False
    try:
        while True:
            piece = b"".join(map(frames.of, replies)) if replies else sse.WAITING
            if replies and not started:
                started = True
                piece = frames.role() + piece
            if piece:
                yield piece
            if opened.ended:
                return
            replies = await opened.next()
    except Exception:  # the status is long sent: a cut connection would be worse than a frame that says so
        yield sse.frame(error_body(opened.break_off())) + sse.DONE
