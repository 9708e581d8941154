"""POST /v1/requests/<uid>/replay: the request is computed again on this server, as `minisgl replay run` has it done."""

from __future__ import annotations

from typing import Final

import structlog
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.events import Failed, Submitted
from pipeline.names import GENERATE
from pipeline.replaying import NotComputed, again
from pipeline.views.recorded import History
from web.live.frontend import Frontend, reaching
from web.live.without_client import submit_without_client
from web.routes.access import caller, known_caller, place
from web.routes.answers import json_response, name_unknown
from web.routes.named import history_of, uid_in
from web.routes.operations import operation
from web.wire.replays import ReplayRequest, parse_replay

logger = structlog.get_logger()

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
            new_uid = await submit_without_client(frontend, _again(history, asked), caller().quota)
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
    """Return the request that computes *history* again. Raises RequestError if it cannot be."""
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
    """Raise RequestError where no engine lives that could compute. Raises as the log does."""
    if not await frontend.log.statuses(GENERATE):
        raise RequestError("No engine lives now; send it again later.", code="loading", status=503)
