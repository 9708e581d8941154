"""When a large body is read: one after the other, so that all together hold small requests up no longer than one does.

Reading 4 MiB takes the event loop 20 ms, and a small request needs several turns of the loop. Knows no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

LARGE_BODY: Final = 64 << 10
"""Others have a turn between the steps with a larger body."""


class Turns:
    """Lets large bodies in one at a time. Before the next one, others have the loop for as long as it took."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._next_s = 0.0

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a body of *num_bytes* may be read; a small one never waits."""
        if num_bytes <= LARGE_BODY:
            yield
            return
        async with self._one:
            await asyncio.sleep(self._next_s - time.monotonic())  # if that is over: one turn of the loop
            began_s = time.monotonic()
            try:
                yield
            finally:
                ended_s = time.monotonic()
                self._next_s = ended_s + (ended_s - began_s)
