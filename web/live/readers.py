"""Counts the clients of this process that read requests of others. The log is told, so that no one cancels those."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Final, NoReturn
from weakref import WeakValueDictionary

import structlog

from pipeline.errors import LogError
from pipeline.log.redis import AsyncRedisLog

logger = structlog.get_logger()

REFRESH_S: Final = 20.0
"""How often the log is told again; it forgets after 60 s."""
TOLD_AT_ONCE: Final = 100
"""Requests in one commit."""


class Readers:
    """The number of readers of each request. Call `tell` after `add` and `remove`."""

    def __init__(self, log: AsyncRedisLog, process: str) -> None:
        self._log = log
        self._who = f"{process}:{secrets.token_hex(4)}"
        self._counts: Counter[str] = Counter()
        self._telling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def add(self, uid: str) -> None:
        """Count one more."""
        self._counts[uid] += 1

    def remove(self, uid: str) -> None:
        """Count one less."""
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
        """Tell the log again and again; never ends."""
        while True:
            await asyncio.sleep(REFRESH_S)
            uids = list(self._counts)
            try:
                for first in range(0, len(uids), TOLD_AT_ONCE):
                    await self._log.reading(uids[first : first + TOLD_AT_ONCE], self._who)
            except LogError as error:
                logger.warning("readers_not_told", requests=len(uids), error=str(error))
