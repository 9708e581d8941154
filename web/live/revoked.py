"""Ends the requests of API keys that were removed."""

from __future__ import annotations

import structlog

from pipeline.events import Cancelled
from web.http.keys import shown
from web.live.frontend import Frontend
from web.live.lookup import cancel, living
from web.wire.openai.errors import REVOKED

logger = structlog.get_logger()


async def end_revoked(frontend: Frontend, owners: frozenset[str]) -> None:
    """Cancel the running requests of *owners*. Other web processes do so, too: the first one ends a request. Raises as
    the log does."""
    ended = await cancel(frontend.log, await living(frontend.log, owners), by=REVOKED)
    for _ in ended:
        frontend.count_end(Cancelled(by=REVOKED))
    if ended:
        logger.info("owners_revoked", owners=[shown(owner) for owner in sorted(owners)], requests=len(ended))
