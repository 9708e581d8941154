"""Which requests there are, the newest first: those of the log, found by scans of its keys, and those of the archive.

A call does bounded work: it scans a part of the keys, and looks into some histories. What it learns of requests that
have ended is kept, so that their prompts are read once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from typing import Final

from pipeline.archive.reader import NOTHING_KNOWN, Where
from pipeline.log.redis import AsyncRedisLog
from pipeline.log.snapshot import HistoryEnds, HistoryQuery
from pipeline.names import base_uid
from pipeline.views.requests import ENDED, RequestFacts, ends_of, heard
from web.live.lookup import Archived
from web.wire.uids import uid_of

SCANNED_AT_ONCE: Final = 1000
MOST_SCANNED: Final = 50_000
"""Keys in one call. Of a larger log, the next call scans on."""
MANY: Final = 5_000
SHARE: Final = 0.1
"""Largest share of the time that scans take, once they find MANY requests. A client that asks soon after a scan gets
its result, and the newer requests that have not ended."""
MOST_KNOWN: Final = 50_000
"""Most requests that are known, the newest ones; older ones are not listed."""
MOST_KEPT: Final = 10_000
"""Requests whose figures are kept."""
TRIED_AT_ONCE: Final = 64
MOST_TRIED: Final = 10_000
"""Requests in one call."""
PEEKED_AT_ONCE: Final = 8
"""Histories in one read: each may begin with a prompt of megabytes."""
MOST_PEEKED: Final = 256
"""Most histories in one call, or a few more."""
HIDDEN_DIGITS: Final = 24
"""Of the uid of a request that somebody may not see, a place in the list has so many: nobody can name the request."""
NEWEST: Final = "~"
"""A place in the list before all uids."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Some requests, the newest first."""

    requests: tuple[RequestFacts, ...]
    archived: frozenset[str]
    """The requests that only the archive has."""
    next: str
    """The place where older requests go on; empty if there are none."""
    is_complete: bool
    """Whether all keys have been scanned."""


class Catalogue:
    """The requests of one log and its archive."""

    def __init__(self, log: AsyncRedisLog, archived: Archived) -> None:
        self._log = log
        self._archived = archived
        self._facts: dict[str, RequestFacts] = {}
        self._known: list[str] = []
        """The newest first."""
        self._found: set[str] = set()
        """Requests that the current scan has found."""
        self._cursor = "0"
        self._is_complete = False
        self._scanning = asyncio.Lock()
        self._scan_began_s = 0.0
        self._rested_s = 0.0
        """The time before which no scan is needed."""

    async def newest(self, before: str, limit: int, fits: Callable[[RequestFacts], bool]) -> Listed:
        """Return up to *limit* requests that fit and have smaller uids than *before*. Raises as the log does."""
        await self._scan()
        there = {uid for uid in self._known if uid < before}
        in_archive, floor = await self._archived.newest(before, limit)
        in_log = (uid for uid in self._known if uid in there)
        merged = merge(in_log, (uid for uid in in_archive if uid not in there), reverse=True)
        uids = (uid for uid in merged if uid >= floor)
        found: list[RequestFacts] = []
        archived: set[str] = set()
        num_tried = num_peeked = 0

        def listed(following: str) -> Listed:
            return Listed(tuple(found), frozenset(archived), following, self._is_complete)

        for some in _together(uids, TRIED_AT_ONCE):
            looked = await self._look(some, in_archive)
            num_tried, num_peeked = num_tried + len(some), num_peeked + looked.num_peeked
            for uid in some:
                if uid in looked.facts and fits(looked.facts[uid]):
                    found.append(looked.facts[uid])
                    archived |= {uid} & looked.archived
                    if len(found) == limit:
                        return listed(uid)
            if num_peeked >= MOST_PEEKED or num_tried >= MOST_TRIED:
                return listed(_place(some[-1], found))
        return listed(_place(floor, found))

    async def owners(self, uids: Sequence[str]) -> dict[str, str]:
        """Return uid -> owner of the requests that the log still has. Raises as the log does."""
        owners: dict[str, str] = {}
        for first in range(0, len(uids), TRIED_AT_ONCE):
            looked = await self._look(uids[first : first + TRIED_AT_ONCE])
            owners |= {uid: facts.owner for uid, facts in looked.facts.items()}
        return owners

    async def _scan(self) -> None:
        """Find the requests of the log. Clients that come while one scans share the next scan."""
        came_s = time.monotonic()
        async with self._scanning:
            if self._scan_began_s > came_s:
                return
            began_s = time.monotonic()
            there = {uid for uid in await self._log.living() if uid_of(uid)}
            if time.monotonic() < self._rested_s:
                there.update(self._known)
            else:
                there |= await self._scanned()
            new = there.difference(self._known)
            known = [uid for uid in self._known if uid in there]  # almost in order, so the sort takes little
            self._known = sorted([*new, *known], reverse=True)[:MOST_KNOWN]
            self._scan_began_s = began_s

    async def _scanned(self) -> set[str]:
        """Scan on. Return the requests that are, or may be, in the log."""
        began_s = time.monotonic()
        for _ in range(0, MOST_SCANNED, SCANNED_AT_ONCE):
            self._cursor, uids = await self._log.requests(self._cursor, SCANNED_AT_ONCE)
            self._found.update(filter(uid_of, uids))
            if self._cursor == "0":
                found, self._found, self._is_complete = self._found, set(), True
                if len(found) > MANY:
                    self._rested_s = began_s + (time.monotonic() - began_s) / SHARE
                return found
        return self._found.union(self._known)  # the rest of the log may still have them

    async def _look(self, uids: Sequence[str], in_archive: Mapping[str, Where] = NOTHING_KNOWN) -> _Told:
        """Return the facts about *uids*, after a look at those that may have changed."""
        lengths = await self._log.lengths(uids)
        erased = {uid for uid, length in lengths.items() if length == 1 and self._has_ended(uid)}
        for uid in erased:
            del self._facts[uid]
        changing = [uid for uid in uids if lengths[uid] and uid not in erased and not self._has_ended(uid)]
        gone = [uid for uid in uids if not lengths[uid] and uid in in_archive]
        unread = [uid for uid in gone if not self._has_ended(uid)]
        for first in range(0, len(changing), PEEKED_AT_ONCE):
            some = changing[first : first + PEEKED_AT_ONCE]
            asks = {uid: HistoryQuery(self._facts.get(uid, RequestFacts(uid)).known_to, last=True) for uid in some}
            for uid, ends in (await self._log.peek(asks)).items():
                self._hear(uid, ends)
                await asyncio.sleep(0)  # a prompt may be long
        for first in range(0, len(unread), PEEKED_AT_ONCE):
            some = unread[first : first + PEEKED_AT_ONCE]
            for uid, recording in (await self._archived.read(some, in_archive)).items():
                self._hear(uid, ends_of(recording.entries))
                await asyncio.sleep(0)
        there = [uid for uid in uids if (lengths[uid] and uid not in erased) or uid in gone]
        facts = {uid: self._facts[uid] for uid in there if uid in self._facts}
        shown = {uid: each for uid, each in facts.items() if each.submitted_ms or each.state == "unreadable"}
        return _Told(shown, frozenset(gone), len(changing) + len(unread))

    def _has_ended(self, uid: str) -> bool:
        facts = self._facts.get(uid)
        return facts is not None and facts.state in ENDED

    def _hear(self, uid: str, ends: HistoryEnds) -> None:
        facts = self._facts.pop(uid, RequestFacts(uid))
        if ends.exists:
            self._facts[uid] = heard(facts, ends, int(time.time() * 1000))
            while len(self._facts) > MOST_KEPT:
                del self._facts[next(iter(self._facts))]


def _together(uids: Iterable[str], most: int) -> Iterator[list[str]]:
    """Give *uids* in order, *most* at once or a few more: siblings stay together, since a place in the list may leave
    out what tells them apart."""
    some: list[str] = []
    for _, siblings in groupby(uids, base_uid):
        some += siblings
        if len(some) >= most:
            yield some
            some = []
    if some:
        yield some


def _place(uid: str, found: Sequence[RequestFacts]) -> str:
    """Return *uid* as a place in the list, without its last digits unless it is the last one that was *found*."""
    return uid if found and found[-1].uid == uid else uid[:HIDDEN_DIGITS]


@dataclass(frozen=True, slots=True)
class _Told:
    """The result of a look."""

    facts: Mapping[str, RequestFacts]
    """Facts about the requests that are there. An erased request has only its end."""
    archived: frozenset[str]
    num_peeked: int
