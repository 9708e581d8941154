"""POST /flush_cache, as in SGLang: every engine forgets the prefixes that no running request uses.

Not GET, which any page can make a browser send. If there are keys, it needs the admin key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

import structlog
from quart import Blueprint, Response

from pipeline.errors import RequestError
from pipeline.log.redis import AsyncRedisLog
from pipeline.names import GENERATE, parse_id
from pipeline.stage.slots import Status, known_statuses
from web.live.frontend import Frontend, reaching
from web.routes.access import check_admin
from web.routes.answers import json_response
from web.routes.openapi import operation

logger = structlog.get_logger()

PATH: Final = "/flush_cache"
PATIENCE_S = 5.0
"""How long the engines may take: an engine reads the request after its current step."""
ASK_AGAIN_S = 1.0
"""When to write the request to `control` again, because `control` may lose an entry."""
POLL_S = 0.02


def cache_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("cache", __name__)

    @routes.post(PATH)
    @operation("Forget the prefixes that no running request uses")
    async def flush_cache() -> Response:
        try:
            check_admin()
            with reaching("not_flushed"):
                body = await _flush(frontend.log, frontend.name)
        except RequestError as error:
            logger.info("request", status=error.status, error=error.code, path=PATH)
            raise
        logger.info("request", status=200, path=PATH, **body)
        return json_response(body)

    return routes


async def _flush(log: AsyncRedisLog, by: str) -> dict[str, object]:
    """Ask the engines to flush, and wait until all that are ready have done it; return what they did.

    Raises:
        RequestError: No engine is ready, or one of them has not done it in time.
        LogError: The log cannot be reached.
    """
    before = await _engines(log)
    if not before:
        raise RequestError("No engine is ready; send it again later.", code="loading", status=503)
    began_s = asked_s = time.monotonic()
    flush_id = await log.flush(by)
    while True:
        engines = await _engines(log)
        waiting_for = [slot for slot, status in engines.items() if not _has_done(status, flush_id)]
        if engines and not waiting_for:
            freed = sum(status.flushed_pages - _freed_before(status, before) for status in engines.values())
            return {"flushed_pages": freed, "engines": list(engines)}
        now_s = time.monotonic()
        if now_s - began_s > PATIENCE_S:
            raise RequestError(
                f"Not flushed within {PATIENCE_S:g} s: {', '.join(waiting_for) or 'no engine is ready any more'}; "
                "send it again.",
                code="flush_incomplete",
                status=503,
            )
        if now_s - asked_s > ASK_AGAIN_S:
            asked_s = now_s
            await log.flush(by)  # a later flush counts as well
        await asyncio.sleep(POLL_S)


async def _engines(log: AsyncRedisLog) -> dict[str, Status]:
    """Return slot -> status of the engines that are ready."""
    statuses = known_statuses(await log.statuses(GENERATE))
    return {status.slot: status for status in statuses if status.phase == "ready"}


def _has_done(status: Status, flush_id: str) -> bool:
    return bool(status.flushed) and parse_id(status.flushed) >= parse_id(flush_id)


def _freed_before(status: Status, before: Mapping[str, Status]) -> int:
    """Return how many pages an engine had freed before; 0 if it was started since."""
    earlier = before.get(status.slot)
    return earlier.flushed_pages if earlier is not None and earlier.owner == status.owner else 0
