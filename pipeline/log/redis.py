"""StreamLog in Redis Streams, on the commands of Redis 6.2: RedisLog for the synchronous stages, AsyncRedisLog for web.

Each method names an operation; `pipeline.log.operations` has what it sends, `pipeline.log.drivers` how it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.events import End, StepCompleted, Submitted, Tokenized
from pipeline.log.drivers import AsyncDriver, Driver
from pipeline.log.operations import frontends, requests, workers
from pipeline.log.protocol import (
    DEFAULT_LIMITS,
    DeadLetter,
    Entry,
    Inbox,
    Lease,
    Occupancy,
    Once,
    Owner,
    Produced,
    Quota,
    Reply,
    RequestLimits,
    StepCommitted,
    SubmitResult,
    Taken,
)
from pipeline.log.snapshot import HistoryEnds, HistoryQuery, LogSnapshot
from pipeline.names import Names


class RedisLog:
    """StreamLog over synchronous connections. One instance per thread."""

    def __init__(self, url: str, names: Names, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.url = url
        self.names = names
        self.limits = limits
        self._driver = Driver(url)
        self._run = self._driver.run

    def close(self) -> None:
        self._driver.close()

    def another(self) -> RedisLog:
        """Return a log on connections of its own, for another thread."""
        return RedisLog(self.url, self.names, self.limits)

    # requests

    def submit(
        self, uid: str, events: Sequence[Submitted], once: Once | None = None, *, quota: Quota | None = None
    ) -> SubmitResult:
        return self._run(requests.submit(self.names, self.limits, uid, events, once, quota))

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        return self._run(requests.tokenized(self.names, entry, event))

    def end(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        consume: Entry | None = None,
        dead: DeadLetter | None = None,
    ) -> bool:
        return self._run(requests.end(self.names, self.limits, uid, event, frontend, consume, dead))

    def abandon(self, uid: str, event: End, *, frontend: str, once: Once | None = None, attached: bool = False) -> bool:
        return self._run(requests.abandon(self.names, self.limits, uid, event, frontend, once, attached))

    def reading(self, uids: Sequence[str], who: str) -> None:
        self._run(requests.reading(self.names, uids, who))

    def stop_reading(self, uid: str, who: str) -> None:
        self._run(requests.stop_reading(self.names, uid, who))

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        return self._run(requests.histories(self.names, uids, after))

    def alive(self, uids: Sequence[str]) -> set[str]:
        return self._run(requests.alive(self.names, uids))

    # the janitor

    def overdue(self, max_uids: int) -> list[str]:
        return self._run(requests.overdue(self.names, max_uids))

    def living(self) -> list[str]:
        return self._run(requests.living(self.names))

    def frontends_of(self, uids: Sequence[str]) -> dict[str, str]:
        return self._run(requests.frontends_of(self.names, uids))

    def read_by_others(self, uids: Sequence[str]) -> set[str]:
        return self._run(requests.read_by_others(self.names, uids))

    # dead letters

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        return self._run(requests.dead_letters(self.names, max_entries, before))

    def drop_dead(self, entry_id: str) -> bool:
        return self._run(requests.drop_dead(self.names, entry_id))

    # after a time in which the log could not be reached

    def incarnation(self) -> str:
        return self._run(requests.incarnation())

    # engines

    def take(self, owner: Owner, max_entries: int, *, control_cursor: str) -> Taken:
        return self._run(workers.take(self.names, owner, max_entries, control_cursor))

    def wait(self, cursor: str, control_cursor: str, *, block_ms: int) -> None:
        self._run(workers.wait(self.names, cursor, control_cursor, block_ms))

    def step(
        self,
        owner: Owner,
        number: int,
        event: StepCompleted,
        *,
        ended: Sequence[str],
        control_cursor: str,
        lease_ms: int,
    ) -> StepCommitted:
        return self._run(workers.step(self.names, owner, number, event, ended, control_cursor, lease_ms))

    def flush(self, by: str) -> str:
        return self._run(workers.flush(self.names, by))

    # detokenizers

    def produced(self, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced]) -> bool:
        return self._run(workers.produced(self.names, self.limits, owner, entry, engine, events))

    # consumer groups

    def backlog(self, inbox: Inbox) -> int:
        return self._run(workers.backlog(inbox))

    def prepare(self, inbox: Inbox) -> None:
        self._run(workers.prepare(inbox))

    def read(self, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        return self._run(workers.read(inbox, consumer, max_entries, block_ms))

    def pending(self, inbox: Inbox, consumer: str) -> list[Entry]:
        return self._run(workers.pending(inbox, consumer))

    def claim(self, inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        return self._run(workers.claim(self.names, inbox, owner, max_entries))

    def claim_from(self, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
        return self._run(workers.claim_from(self.names, inbox, owner, guest.slot, max_entries, guest))

    def retry(self, inbox: Inbox, owner: Owner, entry: Entry) -> int:
        return self._run(workers.retry(self.names, inbox, owner, entry))

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        return self._run(workers.holdings(inbox)).get(consumer, 0)

    def forsaken(self, inbox: Inbox) -> list[str]:
        return self._run(workers.forsaken(self.names, inbox))

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int) -> Owner | None:
        return self._run(workers.acquire(self.names, slot, nonce, lease_ms))

    def announce(self, slot: str, status: str) -> bool:
        return self._run(workers.announce(self.names, slot, status))

    def unattended(self) -> list[str]:
        return self._run(workers.unattended(self.names))

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        return self._run(workers.renew(self.names, owner, lease_ms, status))

    def release(self, owner: Owner) -> bool:
        return self._run(workers.release(self.names, owner))

    def lease(self, slot: str) -> Lease:
        return self._run(workers.lease(self.names, slot))

    def statuses(self, stage: str) -> dict[str, str]:
        return self._run(workers.statuses(self.names, stage))

    # frontends

    def open_replies(self, frontend: str) -> str:
        return self._run(frontends.open_replies(self.names, frontend))

    def read_replies(self, frontend: str, after: str, *, block_ms: int) -> tuple[str, list[Reply]]:
        return self._run(frontends.read_replies(self.names, frontend, after, block_ms))

    # who shows the log

    def snapshot(self) -> LogSnapshot:
        """Return how the whole log stands now; the work does not grow with what it holds, but with the workers."""
        return self._run(frontends.snapshot(self.names))

    def peek(self, queries: Mapping[str, HistoryQuery]) -> dict[str, HistoryEnds]:
        """Return the ends of the histories uid -> query."""
        return self._run(frontends.peek(self.names, queries))

    def requests(self, cursor: str, max_keys: int) -> tuple[str, list[str]]:
        """Return the uids whose histories are among the next *max_keys* or so keys of the server, and the cursor to go
        on from. From `0` until `0` comes back is all of them."""
        return self._run(frontends.scan_requests(self.names, cursor, max_keys))


class AsyncRedisLog:
    """The part of the log that a frontend needs, for asyncio. Methods of StreamLog's names do what those do."""

    def __init__(self, url: str, names: Names, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.names = names
        self.limits = limits
        self._driver = AsyncDriver(url)
        self._run = self._driver.run

    async def close(self) -> None:
        await self._driver.close()

    async def submit(
        self, uid: str, events: Sequence[Submitted], once: Once | None = None, *, quota: Quota | None = None
    ) -> SubmitResult:
        return await self._run(requests.submit(self.names, self.limits, uid, events, once, quota))

    async def end(self, uid: str, event: End, *, frontend: str, dead: DeadLetter | None = None) -> bool:
        return await self._run(requests.end(self.names, self.limits, uid, event, frontend, dead=dead))

    async def abandon(
        self, uid: str, event: End, *, frontend: str, once: Once | None = None, attached: bool = False
    ) -> bool:
        return await self._run(requests.abandon(self.names, self.limits, uid, event, frontend, once, attached))

    async def reading(self, uids: Sequence[str], who: str) -> None:
        await self._run(requests.reading(self.names, uids, who))

    async def stop_reading(self, uid: str, who: str) -> None:
        await self._run(requests.stop_reading(self.names, uid, who))

    async def living(self) -> list[str]:
        return await self._run(requests.living(self.names))

    async def flush(self, by: str) -> str:
        return await self._run(workers.flush(self.names, by))

    async def entries(self, uid: str, ids: Sequence[str]) -> dict[str, Entry]:
        """Return those of the entries *ids* that the history of *uid* has."""
        return await self._run(requests.entries(self.names, uid, ids))

    async def histories(self, cursors: Mapping[str, str], *, max_entries: int = 0) -> dict[str, list[Entry] | None]:
        """Return what each history uid -> id has after the id, the first *max_entries* unless that is 0; None where
        there is no history any more.
        """
        return await self._run(requests.histories_there(self.names, cursors, max_entries))

    async def read_histories(self, cursors: Mapping[str, str], *, block_ms: int) -> dict[str, list[Entry]]:
        """Wait up to *block_ms* until one of the histories uid -> id has something after the id; return what they have.
        A history that is gone is waited for like one to come.
        """
        return await self._run(requests.read_histories(self.names, cursors, block_ms))

    async def statuses(self, stage: str) -> dict[str, str]:
        return await self._run(workers.statuses(self.names, stage))

    async def server(self) -> tuple[str, str]:
        """Return name and version of the server."""
        return await self._run(frontends.server())

    async def occupancy(self) -> Occupancy:
        """Return how much the log holds."""
        return await self._run(frontends.occupancy(self.names))

    async def open_replies(self, frontend: str) -> str:
        return await self._run(frontends.open_replies(self.names, frontend))

    async def read_replies(self, frontend: str, after: str, *, block_ms: int) -> tuple[str, list[Reply]]:
        return await self._run(frontends.read_replies(self.names, frontend, after, block_ms))
