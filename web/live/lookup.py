"""Which requests of the log a client means by a name, and how those that are meant are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.events import Cancelled, Submitted, decode
from pipeline.log.redis import AsyncRedisLog
from pipeline.names import SUBMITTED_ID, sibling_uids
from web.live.ready import PROBE

AT_ONCE: Final = 16
"""Requests that are looked up, or cancelled, at a time: each cancellation has a connection of its own."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What there is under a uid."""

    uids: tuple[str, ...]
    """Its own, or those of the siblings that have it in common."""
    submitted: Submitted
    """How it begins, or the first of them; the others have the same frontend and endpoint."""


async def find(log: AsyncRedisLog, uid: str) -> Lookup | None:
    """Return the request *uid*, or the siblings that have it in common. Raises as the log does."""
    for first in (uid,) if "." in uid else (uid, sibling_uids(uid, 2)[0]):
        there = await log.entries(first, (SUBMITTED_ID,))
        if there:
            event = decode(there[SUBMITTED_ID].fields)
            assert isinstance(event, Submitted)
            return Lookup((uid,) if first == uid else sibling_uids(uid, event.siblings), event)
    return None


async def living(log: AsyncRedisLog) -> dict[str, str]:
    """Return uid -> frontend of all requests of clients that have not ended. Raises as the log does."""
    uids, found = await log.living(), {}
    for first in range(0, len(uids), AT_ONCE):
        histories = await log.histories(dict.fromkeys(uids[first : first + AT_ONCE], ""), max_entries=1)
        for uid, entries in histories.items():
            fields = entries[0].fields if entries else {}
            if fields.get("endpoint", PROBE) != PROBE:
                found[uid] = fields["frontend"]
    return found


async def cancel(log: AsyncRedisLog, frontends: Mapping[str, str]) -> list[str]:
    """Cancel requests, uid -> frontend; return those that had not ended before. Raises as the log does."""
    event, uids, cancelled = Cancelled(by="client"), list(frontends), []
    for first in range(0, len(uids), AT_ONCE):
        some = uids[first : first + AT_ONCE]
        ends = (log.end(uid, event, frontend=frontends[uid]) for uid in some)
        cancelled += [uid for uid, done in zip(some, await asyncio.gather(*ends), strict=True) if done]
    return cancelled
