"""How much memory the log may take before new requests are refused: `--max-log-bytes`.

Redis says once a second how much it uses. What this process has submitted since then is added. So a request that was
refused, or whose submit failed, is forgotten with the next reading, and nothing has to be subtracted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from pipeline.errors import LogError

READ_EVERY_S = 1.0
NEARLY_FULL = 0.9
"""From this share on, the journals of the engines make room for requests."""


class UsedBytes(Protocol):
    """The part of the log that is asked here."""

    async def used_bytes(self) -> int: ...

    async def drop_journals(self) -> None: ...


class Budget:
    """The bytes of the log, as this process knows them."""

    def __init__(self, log: UsedBytes, most_bytes: int) -> None:
        """*most_bytes*: 0 is no limit."""
        self.most_bytes = most_bytes
        self._log = log
        self._used_bytes = 0
        """By the last reading."""
        self._since_bytes = 0
        """Submitted since then. A submit that was on its way then counts, too: the reading may have missed it."""
        self._under_way_bytes = 0

    @contextmanager
    def submitting(self, *, again: bool = False) -> Iterator[Callable[[int], bool]]:
        """Give a function for the time of a submit that says whether the log has room for so many bytes more. If it
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
            except LogError:  # the poll of the stages says so; until the next reading the last one counts
                pass
            await asyncio.sleep(READ_EVERY_S)
