"""Large bodies are parsed one after the other, so that several of them do not add up to a long wait for the others.

Parsing 4 MiB takes the event loop 20 ms, and a small request needs several turns of the loop. Knows no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

LARGE_BODY: Final = 64 << 10
"""Larger bodies take turns."""


class Turns:
    """Gives large bodies one turn at a time. After each, others have the loop for as long as it took."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._next_s = 0.0

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for the turn of a body of *num_bytes*; a small one never waits."""
        if num_bytes <= LARGE_BODY:
            yield
            return
        async with self._one:
            await asyncio.sleep(self._next_s - time.monotonic())  # at least one turn of the loop
            began_s = time.monotonic()
            try:
                yield
            finally:
                ended_s = time.monotonic()
                self._next_s = ended_s + (ended_s - began_s)
