"""GET /v1/pipeline/events: the pipeline live, as `minisgl top` shows it. GET /v1/caller: what a key may do."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Final

import structlog
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from web.http.asgi import PICTURES
from web.http.keys import Caller, Keys
from web.live.frontend import Frontend
from web.live.pictures import Viewer
from web.routes.access import caller, known_caller
from web.routes.answers import event_stream, json_response
from web.routes.openapi import EVENTS, operation
from web.wire import sse

logger = structlog.get_logger()

_COUNT: Final = re.compile(r"[1-9][0-9]{0,8}")
COUNT: Final = {"description": "Ends the stream after so many pictures.", "pattern": f"^{_COUNT.pattern}$"}


def pipeline_routes(frontend: Frontend, keys: Keys) -> Blueprint:
    routes = Blueprint("pipeline", __name__)

    @routes.get(PICTURES)
    @operation("Pictures of the pipeline, at most two a second", answers=(EVENTS,), query={"pictures": COUNT})
    async def events() -> Response:
        who = known_caller()
        frontend.admit()
        most = _most()
        if request.method == "HEAD":  # else a client that asks for the headers alone would hold the stream for ever
            return Response(content_type=sse.CONTENT_TYPE)
        return event_stream(_pictures(frontend, keys, who, most))

    @routes.get("/v1/caller")
    @operation("What the key of this request may do")
    async def about_caller() -> Response:
        who = caller()
        return json_response({"owner": who.owner, "admin": who.is_admin, "keys": keys.exist})

    return routes


def _most() -> int:
    """Return how many pictures the client wants; 0: all. Raises RequestError for anything but a number."""
    given = request.args.get("pictures", "")
    if given and not _COUNT.fullmatch(given):
        message = "pictures: should be a whole number from 1 on, or left out"
        raise RequestError(message, param="pictures", code="invalid_value")
    return int(given or 0)


async def _pictures(frontend: Frontend, keys: Keys, who: Caller, most: int) -> AsyncGenerator[bytes, None]:
    viewer = Viewer("admin" if who.is_admin else f"{who.owner} {who.hashed}", who.may_see, who.is_admin)
    num_sent, pictures = 0, frontend.pictures.watch(viewer)
    try:
        async for text in pictures:
            if not keys.has(who):
                return
            yield sse.frame(text)
            num_sent += 1
            if num_sent == most:
                return
    finally:
        await pictures.aclose()
        logger.info("request", status=200, path=PICTURES, pictures=num_sent)
