"""Submits a request that no client of this process listens to: a replay, or a dead letter that is sent again."""

from __future__ import annotations

import structlog

from pipeline.errors import LogError, LogFull
from pipeline.events import Cancelled, Submitted, new_uid
from pipeline.log.protocol import Quota
from web.live.frontend import Frontend
from web.live.refusals import REFUSALS, refusal

logger = structlog.get_logger()


async def submit_without_client(
    frontend: Frontend, event: Submitted, quota: Quota | None = None, *, letter: str = ""
) -> str:
    """Submit *event* and return its uid. With *quota*, it counts as sent by that API key.

    Where it sends the dead letter *letter* again, that is dropped.

    Raises:
        RequestError: The log does not take it.
    """
    uid = new_uid()
    try:
        with frontend.budget.submitting() as has_room:
            submitted = await frontend.ask(
                frontend.log.submit(uid, [event], quota=quota, letter=letter, has_room=has_room)
            )
    except LogFull:
        raise refusal(frontend, LogFull, quota) from None
    except LogError as error:
        logger.warning("not_submitted", uid=uid, error=str(error))
        if not letter:  # it may have got through, and then the request that runs is all that is left of the letter
            frontend.spawn(_take_back(frontend, uid))
        raise refusal(frontend, LogError, quota) from None
    if submitted.submission in REFUSALS:
        raise refusal(frontend, submitted, quota)
    return uid


async def _take_back(frontend: Frontend, uid: str) -> None:
    """End a request that may have got through all the same."""
    try:
        await frontend.log.end(uid, Cancelled(by="web"), frontend="")
    except LogError as error:
        logger.warning("request_not_ended", uid=uid, event_kind="cancelled", error=str(error))
