"""Long histories and journals, for those who look into requests: read page by page and folded in a thread, one client
at a time, so that the streams of others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from pipeline.log.protocol import Entry
from pipeline.log.redis import AsyncRedisLog
from pipeline.walk import UNTOLD

PAGE: Final = 256
"""Entries of a history that are read at a time; one with log-probabilities has kilobytes."""
LONG: Final = 200
"""What has so many entries is folded in a thread. A thread takes longer than a short fold."""

T = TypeVar("T")


class Folding:
    """Gives the clients of one process their turns."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn of a client. What it reads is held by one of them at a time."""
        async with self._one:
            yield


async def folded(num_entries: int, fold: Callable[[], T]) -> T:
    """Return what *fold* makes of so many entries."""
    return fold() if num_entries < LONG else await asyncio.to_thread(fold)


async def untold_histories(log: AsyncRedisLog, uids: Sequence[str]) -> dict[str, list[Entry]]:
    """Return the histories of *uids* without the fields that no story tells; empty where there is none. Raises as the
    log does."""
    found: dict[str, list[Entry]] = {uid: [] for uid in uids}
    cursors = dict.fromkeys(uids, "")
    while cursors:
        pages = await log.histories(cursors, max_entries=PAGE)
        cursors = {}
        for uid, page in pages.items():
            found[uid] += untold(page or ())
            if page and len(page) == PAGE:
                cursors[uid] = page[-1].id
        await asyncio.sleep(0)
    return found


def untold(entries: Sequence[Entry]) -> list[Entry]:
    """Return *entries* without the fields that no story tells: prompts, and the log-probabilities of tokens."""
    return [
        Entry(entry.id, {name: text for name, text in entry.fields.items() if name not in UNTOLD}) for entry in entries
    ]
