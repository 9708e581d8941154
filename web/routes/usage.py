"""GET /v1/usage: what the owners of keys have used, by day and model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from quart import Blueprint, Response, request

from pipeline.log.operations.usage import DAY_MS, KEPT_DAYS, today
from pipeline.log.redis import AsyncRedisLog
from web.live.frontend import Frontend, reaching
from web.routes.access import known_caller
from web.routes.answers import json_response
from web.routes.listing import number_asked
from web.routes.openapi import operation

DAYS: Final = 7
MOST_OWNERS: Final = 1000
"""Most owners in an answer, and most keys that are read at once."""
QUERY: Final = {
    "days": {"description": f"How many days, with today (UTC): 1 to {KEPT_DAYS}.", "pattern": "^[1-9][0-9]?$"},
    "owner": {"description": "Only this owner; empty: requests without an owner."},
}


def usage_routes(frontend: Frontend) -> Blueprint:
    routes, log = Blueprint("usage", __name__), frontend.log

    @routes.get("/v1/usage")
    @operation("What this key has used, by day and model; the admin key sees all owners", query=QUERY)
    async def usage() -> Response:
        who, owner = known_caller(), request.args.get("owner")
        days, last = number_asked("days", DAYS, KEPT_DAYS), today()
        with reaching("usage_not_read"):
            if who.is_admin:
                owners = await log.users(last - days + 1) if owner is None else [owner]
            else:
                owners = [own for own in {who.owner, who.hashed} if owner in (None, own)]
            used = await _used(log, owners[-MOST_OWNERS:], range(last, last - days, -1))
        return json_response({"object": "list", "data": used, "has_more": len(owners) > MOST_OWNERS})

    return routes


async def _used(log: AsyncRedisLog, owners: Sequence[str], days: Sequence[int]) -> list[dict[str, Any]]:
    """Return what *owners* have used on *days*, the newest first, then by owner and model."""
    found: list[dict[str, Any]] = []
    at_once = MOST_OWNERS // max(len(owners), 1)
    for first in range(0, len(days), at_once):
        used = await log.usage(owners, days[first : first + at_once])
        for (owner, day, model), one in sorted(used.items(), key=lambda item: (-item[0][1], item[0])):
            date = datetime.fromtimestamp(day * DAY_MS / 1000, UTC).date()
            found.append({"object": "usage", "date": date, "owner": owner, "model": model, **one._asdict()})
    return found
