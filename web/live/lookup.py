"""Finds the requests that a client names, in the log or the archive, and cancels them.

Files of the archive are read in threads, so that only the client who asks waits for a disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from pipeline.archive.reader import NOTHING_KNOWN, Archive, Where
from pipeline.errors import LogUnavailable
from pipeline.events import Cancelled, Submitted, decode
from pipeline.log.protocol import Entry
from pipeline.log.redis import AsyncRedisLog
from pipeline.names import PROBE, SEAL, SUBMITTED_ID, sibling_uids
from pipeline.recording import Recording
from web.live.listener import Listener, Wake

P = ParamSpec("P")
T = TypeVar("T")

LOOKED_UP_AT_ONCE: Final = 2
"""Most clients whose requests are looked up at a time; each lookup can read every index."""


class Archived:
    """The archive in *folder*; none if that is empty."""

    def __init__(self, folder: str = "") -> None:
        self._archive = Archive(Path(folder)) if folder else None
        self._turns = asyncio.Semaphore(LOOKED_UP_AT_ONCE)

    async def read(self, uids: Sequence[str], known: Mapping[str, Where] = NOTHING_KNOWN) -> dict[str, Recording]:
        """Return the requests of *uids* that the archive has. Those in *known* need no search.

        Raises:
            LogUnavailable: It cannot be read.
            ArchiveDamaged: One of them cannot.
        """
        if self._archive is None or not uids:
            return {}
        return await self._asked(self._archive.read, uids, known)

    async def newest(self, before: str, most: int) -> tuple[dict[str, Where], str]:
        """As Archive.newest. Raises LogUnavailable if it cannot be read."""
        if self._archive is None:
            return {}, ""
        return await self._asked(self._archive.newest, before, most)

    async def _asked(self, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._turns:
            try:
                return await asyncio.to_thread(question, *args, **kwargs)
            except OSError as error:
                raise LogUnavailable(f"the archive cannot be read: {error}") from error


def told(uid: str, history: Sequence[Entry], *, whole: bool, index: int, wake: Wake) -> Listener:
    """Return a listener that has all events of a *history* that is over. As `Tail.follow`."""
    listener = Listener(uid, _Nobody(), room=len(history) + 1, follows=True, whole=whole, index=index, wake=wake)
    listener.begin_read(time.monotonic())
    listener.apply_history(history)
    return listener


class _Nobody:
    """A Feed for listeners that never ask for anything."""

    def look(self) -> None: ...

    def drop(self, listener: Listener) -> None: ...

    def touch(self, wake: Wake) -> None:
        wake.push()

    def count_gap_fill(self, reason: str) -> None: ...


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


async def living(log: AsyncRedisLog, owners: Collection[str] = ()) -> dict[str, str]:
    """Return uid -> frontend of the requests of clients that are still running: all, or those of *owners*. Raises as
    the log does."""
    uids, found = await (log.living_of(owners) if owners else log.living()), {}
    for first in range(0, len(uids), AT_ONCE):
        histories = await log.histories(dict.fromkeys(uids[first : first + AT_ONCE], ""), max_entries=1)
        for uid, entries in histories.items():
            fields = entries[0].fields if entries else {}
            if fields.get("endpoint", PROBE) != PROBE:
                found[uid] = fields.get("frontend", "")
    return found


async def cancel(log: AsyncRedisLog, frontends: Mapping[str, str], by: str = "client") -> list[str]:
    """Cancel requests, given as uid -> frontend; return those that were still running. Raises as the log does."""
    event, uids, cancelled = Cancelled(by=by), list(frontends), []
    for first in range(0, len(uids), AT_ONCE):
        some = uids[first : first + AT_ONCE]
        ends = (log.end(uid, event, frontend=frontends[uid]) for uid in some)
        cancelled += [uid for uid, done in zip(some, await asyncio.gather(*ends), strict=True) if done]
    return cancelled
