"""Finds the requests of the log that a client names, and cancels them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.events import Cancelled, Submitted, decode
from pipeline.log.protocol import Entry
from pipeline.log.redis import AsyncRedisLog
from pipeline.names import PROBE, SEAL, SUBMITTED_ID, sibling_uids
from pipeline.recording import Recording
from web.live.archived import Archived

AT_ONCE: Final = 16
"""Requests that are looked up, or cancelled, at a time: each cancellation takes a connection of its own."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The requests that a uid stands for."""

    uids: tuple[str, ...]
    """The uid itself, or those of the siblings that share it."""
    submitted: Submitted
    """How the first of them begins; all have the same frontend, endpoint and owner."""
    archived: Recording | None = None
    """The first of them, where the log does not have it any more."""


async def find(log: AsyncRedisLog, archived: Archived, uid: str) -> Lookup | None:
    """Return the request *uid*, or the siblings that share it. Raises as the log does."""
    firsts = (uid,) if "." in uid else (uid, sibling_uids(uid, 2)[0])
    for first in firsts:
        entries = await log.entries(first, (SUBMITTED_ID, SEAL))
        if SUBMITTED_ID in entries:
            return _lookup(uid, first, entries[SUBMITTED_ID])
        if entries:  # a tombstone: an archiver may not have removed it yet
            return None
    recordings = await archived.read(firsts)
    for first in firsts:
        if first in recordings:
            return _lookup(uid, first, recordings[first].entries[0], recordings[first])
    return None


def _lookup(uid: str, first: str, entry: Entry, archived: Recording | None = None) -> Lookup:
    event = decode(entry.fields)
    assert isinstance(event, Submitted)
    return Lookup((uid,) if first == uid else sibling_uids(uid, event.siblings), event, archived)


async def living(log: AsyncRedisLog) -> dict[str, str]:
    """Return uid -> frontend of all requests of clients that are still running. Raises as the log does."""
    uids, found = await log.living(), {}
    for first in range(0, len(uids), AT_ONCE):
        histories = await log.histories(dict.fromkeys(uids[first : first + AT_ONCE], ""), max_entries=1)
        for uid, entries in histories.items():
            fields = entries[0].fields if entries else {}
            if fields.get("endpoint", PROBE) != PROBE:
                found[uid] = fields.get("frontend", "")
    return found


async def cancel(log: AsyncRedisLog, frontends: Mapping[str, str]) -> list[str]:
    """Cancel requests, given as uid -> frontend; return those that were still running. Raises as the log does."""
    event, uids, cancelled = Cancelled(by="client"), list(frontends), []
    for first in range(0, len(uids), AT_ONCE):
        some = uids[first : first + AT_ONCE]
        ends = (log.end(uid, event, frontend=frontends[uid]) for uid in some)
        cancelled += [uid for uid, done in zip(some, await asyncio.gather(*ends), strict=True) if done]
    return cancelled
