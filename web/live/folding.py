"""Long histories and journals, for those who look into requests: read page by page and folded in a thread, one client
at a time, so that the streams of others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from pipeline.log.journal import JournalReader
from pipeline.log.protocol import Entry
from pipeline.log.redis import AsyncRedisLog
from pipeline.views.company import Company, spans_of
from pipeline.views.recorded import History
from pipeline.walk import UNTOLD

PAGE: Final = 256
"""Entries of a history that are read at a time; an entry with log-probabilities has kilobytes."""
LONG: Final = 200
"""A history of this many entries is folded in a thread. For a shorter one, a thread costs more than the fold."""

T = TypeVar("T")


class Folding:
    """Gives the clients of one process their turns."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn of a client, so that only one client at a time holds what it reads."""
        async with self._one:
            yield


async def folded(num_entries: int, fold: Callable[[], T]) -> T:
    """Return the result of *fold*, which folds so many entries."""
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


READ_AT_ONCE: Final = 64
"""Steps; one takes up to 10 KB."""
MOST_READ: Final = 20_000
"""Steps of one engine."""
MOST_BEFORE: Final = 2_000
"""Steps that are read before the first one of the request: it waited in them, or they say which rows follow."""


async def company_of(log: AsyncRedisLog, history: History) -> Company:
    """Return in whose company a request was computed. Raises as the log does."""
    company = Company(history)
    since_ms = history.submitted.ms if history.submitted is not None else 0
    for engine, (first, last) in spans_of(history).items():
        start = await _start(log, engine, first, since_ms)
        async for reader, entries in _pages(log, engine, start, last):
            await asyncio.to_thread(_take, company, engine, reader, entries)
    return company


async def _start(log: AsyncRedisLog, engine: str, first: str, since_ms: int) -> str:
    """Return the step to begin with: from it on, the rows of *first* can be told, and all since a moment are there."""
    start, edge = first, first
    for _ in range(0, MOST_BEFORE, READ_AT_ONCE):
        entries = await log.journal(engine, last=edge, max_entries=READ_AT_ONCE, newest=True)
        for entry in reversed(entries):
            start = entry.id
            if "rows" in entry.fields and _ms(entry) <= since_ms:
                return start
        if not entries:
            break
        edge = f"({start}"
    return start


def _take(company: Company, engine: str, reader: JournalReader, entries: Sequence[Entry]) -> None:
    for step in reader.steps(entries):
        company.take(engine, step)


async def _pages(
    log: AsyncRedisLog, engine: str, first: str, last: str
) -> AsyncIterator[tuple[JournalReader, list[Entry]]]:
    reader, edge = JournalReader(), first
    for _ in range(0, MOST_READ, READ_AT_ONCE):
        entries = await log.journal(engine, first=edge, last=last, max_entries=READ_AT_ONCE)
        yield reader, entries
        if len(entries) < READ_AT_ONCE:
            return
        edge = f"({entries[-1].id}"


def _ms(entry: Entry) -> int:
    text = entry.fields.get("ms", "")
    return int(text) if text.isdecimal() else 0
