"""Work that is done one piece at a time, so that much of it does not make others wait for long. Knows no request.

Parsing 4 MiB takes the event loop 20 ms, and a small request needs several turns of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Final

LARGE_BODY: Final = 64 << 10
"""Larger bodies take turns."""
HOLDERS_AT_ONCE: Final = 8
"""Most holders that may go on in one turn of the loop."""


class Turns:
    """Gives large bodies, and pieces of large answers, one turn at a time. After each, others have the loop for as long
    as it took."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._next_s = 0.0

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for the turn of a body of *num_bytes*; a small one never waits."""
        if num_bytes <= LARGE_BODY:
            yield
            return
        async with self._turn():
            yield

    async def each(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield *pieces*; each is made in a turn of its own."""
        while True:
            async with self._turn():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._one:
            await asyncio.sleep(self._next_s - time.monotonic())  # at least one turn of the loop
            began_s = time.monotonic()
            try:
                yield
            finally:
                ended_s = time.monotonic()
                self._next_s = ended_s + (ended_s - began_s)


class RoundRobin:
    """Whose turn it is: in each turn of the event loop one of each holder goes on, of a few holders. So everybody else
    has a turn between two, and who asks for little never stands behind hundreds of another one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Holder -> those that wait; the holder whose turn is next comes first."""
        self._went_on: set[str] = set()
        """Holders that had this turn of the loop."""
        self._goes_on = False
        """`_next` is called in the next turn."""

    def ask(self, holder: str) -> asyncio.Future[None] | None:
        """Return what is done in a turn that no other one of *holder* has, or None if this one is free. Who does not
        want it any more sets its result."""
        if holder not in self._went_on and len(self._went_on) < HOLDERS_AT_ONCE:
            self._went_on.add(holder)
            if not self._goes_on:
                self._goes_on = True
                self._loop.call_soon(self._next)
            return None
        future = self._loop.create_future()
        self._waiting.setdefault(holder, deque()).append(future)
        return future

    def _next(self) -> None:
        self._went_on.clear()
        for holder in list(islice(self._waiting, HOLDERS_AT_ONCE)):
            futures = self._waiting.pop(holder)
            while futures and (future := futures.popleft()).done():
                pass
            if futures:
                self._waiting[holder] = futures  # behind the others
            if not future.done():
                future.set_result(None)
                self._went_on.add(holder)
        self._goes_on = bool(self._went_on or self._waiting)
        if self._goes_on:
            self._loop.call_soon(self._next)
