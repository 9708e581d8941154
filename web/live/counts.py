"""Counts for all clients of a web process: the bytes of the log, the readers of each request, and when
requests end.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, Protocol
from weakref import WeakValueDictionary

import structlog

from pipeline.errors import LogError
from pipeline.log.redis import AsyncRedisLog

logger = structlog.get_logger()

MOST_KEPT_BYTES: Final = 64 << 20
READ_EVERY_S = 1.0
NEARLY_FULL = 0.9
"""Above this share of the limit, the journals of the engines are dropped to make room for requests."""


class UsedBytes(Protocol):
    """The part of the log that `Budget` uses."""

    async def used_bytes(self) -> int: ...

    async def drop_journals(self) -> None: ...


class Budget:
    """How much memory the log may take before new requests are refused: `--max-log-bytes`.

    Redis says once a second how much it uses. What this process has submitted since then is added. So a request that
    was refused, or whose submit failed, is forgotten with the next reading, and nothing has to be subtracted.
    """

    def __init__(self, log: UsedBytes, most_bytes: int) -> None:
        """*most_bytes*: 0 is no limit."""
        self.most_bytes = most_bytes
        self._log = log
        self._used_bytes = 0
        """Bytes of the last reading."""
        self._since_bytes = 0
        """Bytes submitted since then. A submit that was under way then counts, too: the reading may have missed it."""
        self._under_way_bytes = 0
        self._kept_bytes = 0

    def keep(self, num_bytes: int) -> bool:
        """Count bytes of bodies that this process keeps, to submit them again; return False if they are too many."""
        if self._kept_bytes + num_bytes > MOST_KEPT_BYTES:
            return False
        self._kept_bytes += num_bytes
        return True

    def let_go(self, num_bytes: int) -> None:
        """Undo `keep`."""
        self._kept_bytes -= num_bytes

    @contextmanager
    def submitting(self, *, again: bool = False) -> Iterator[Callable[[int], bool]]:
        """Give a function that returns whether the log has room for more bytes, for the time of a submit. If it
        has, they count as submitted. There is always room for a request that the log had accepted and lost: *again*.
        """
        counted = 0

        def has_room(num_bytes: int) -> bool:
            nonlocal counted
            if not again and 0 < self.most_bytes < self._used_bytes + self._since_bytes + num_bytes:
                return False
            counted += num_bytes
            self._since_bytes += num_bytes
            self._under_way_bytes += num_bytes
            return True

        try:
            yield has_room
        finally:
            self._under_way_bytes -= counted

    async def run(self) -> NoReturn:
        """Ask Redis once a second; never ends."""
        while True:
            before, under_way = self._since_bytes, self._under_way_bytes
            try:
                self._used_bytes = await self._log.used_bytes()
                self._since_bytes += under_way - before
                if 0 < NEARLY_FULL * self.most_bytes < self._used_bytes:
                    await self._log.drop_journals()
            except LogError:  # the poll of the stages logs this; the last reading counts until the next one
                pass
            await asyncio.sleep(READ_EVERY_S)


REFRESH_S: Final = 20.0
"""How often the readers are written to the log, which forgets them after 60 s."""
TOLD_AT_ONCE: Final = 100
"""Requests in one commit."""


class Readers:
    """The clients of this process that read requests of others. The log is told, so that no one cancels those.

    Call `tell` after `add` and `remove`.
    """

    def __init__(self, log: AsyncRedisLog, process: str) -> None:
        self._log = log
        self._who = f"{process}:{secrets.token_hex(4)}"
        self._counts: Counter[str] = Counter()
        self._telling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def add(self, uid: str) -> None:
        """Count one more reader."""
        self._counts[uid] += 1

    def remove(self, uid: str) -> None:
        """Count one reader fewer."""
        self._counts[uid] -= 1
        if self._counts[uid] <= 0:
            del self._counts[uid]

    def count(self, uid: str) -> int:
        """Return how many there are of *uid* in this process."""
        return self._counts.get(uid, 0)

    async def tell(self, uid: str) -> None:
        """Tell the log whether *uid* has a reader now; the last write wins. Raises as the log does."""
        async with self._telling.setdefault(uid, asyncio.Lock()):
            if uid in self._counts:
                await self._log.reading([uid], self._who)
            else:
                await self._log.stop_reading(uid, self._who)

    async def run(self) -> NoReturn:
        """Write all readers to the log, every REFRESH_S; never ends."""
        while True:
            await asyncio.sleep(REFRESH_S)
            uids = list(self._counts)
            try:
                for first in range(0, len(uids), TOLD_AT_ONCE):
                    await self._log.reading(uids[first : first + TOLD_AT_ONCE], self._who)
                for uid in uids:
                    if uid not in self._counts:  # it left meanwhile, and may have been written after that
                        await self.tell(uid)
            except LogError as error:
                logger.warning("readers_not_told", requests=len(uids), error=str(error))


LATELY_S: Final = 60.0
MOST_ENDS: Final = 64
"""With more ends in a minute, the estimate is a second in any case."""
LONGEST_S: Final = 30


class RetryAfter:
    """The `Retry-After` header: when there may be room for one more request, estimated from the last ends of requests.

    The estimate is the mean time between two ends in the last minute, or since this process was last idle. It is at
    least the time since the last end. It is too short when many clients wait for the same room: this process does not
    know them.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._running: set[Hashable] = set()
        self._busy_since_s = 0.0
        self._ends_s: deque[float] = deque(maxlen=MOST_ENDS)

    def begun(self, request: Hashable) -> None:
        """Note that the log has accepted *request*."""
        if not self._running:
            self._busy_since_s = self._clock_s()
            self._ends_s.clear()
        self._running.add(request)

    def ended(self, request: Hashable) -> None:
        """Note that *request*, if it had begun, is over."""
        if request in self._running:
            self._running.remove(request)
            self._ends_s.append(self._clock_s())

    def estimate_s(self) -> int:
        """Return when to try again, in whole seconds: 1 to 30, and 1 when nothing runs here."""
        if not self._running:
            return 1
        now_s = self._clock_s()
        since_s = max(self._busy_since_s, now_s - LATELY_S)
        num_ended = sum(end_s > since_s for end_s in self._ends_s)
        mean_s = (now_s - since_s) / max(num_ended, 1)
        quiet_s = now_s - (self._ends_s[-1] if self._ends_s else self._busy_since_s)
        return min(max(math.ceil(max(mean_s, quiet_s)), 1), LONGEST_S)
