"""How the histories of those who look into requests are read: in pages, without what no story tells, in turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest

import web.live.folding
from pipeline.log.protocol import Entry
from pipeline.log.redis import AsyncRedisLog
from pipeline.names import parse_id
from web.live.folding import LONG, Folding, folded, untold_histories


class PagedLog:
    """Histories of some lengths; remembers how many entries each read brought."""

    def __init__(self, **lengths: int) -> None:
        self.lengths = lengths
        self.brought: list[dict[str, int]] = []

    async def histories(self, cursors: Mapping[str, str], *, max_entries: int = 0) -> dict[str, list[Entry] | None]:
        pages: dict[str, list[Entry] | None] = {}
        for uid, after in cursors.items():
            start = parse_id(after)[0] if after else 0
            numbers = range(start + 1, min(start + max_entries, self.lengths.get(uid, 0)) + 1)
            pages[uid] = [Entry(f"{n}-0", {"text": "x", "scores": "[]", "prompt": "{}"}) for n in numbers]
        pages |= {uid: None for uid in pages if uid not in self.lengths}
        self.brought.append({uid: len(page or ()) for uid, page in pages.items()})
        return pages


async def test_a_long_history_is_read_in_pages_and_its_scores_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.live.folding, "PAGE", 10)
    log = PagedLog(short=3, whole=10, long=25)
    found = await untold_histories(cast(AsyncRedisLog, log), ["short", "gone", "whole", "long"])
    assert log.brought[0] == {"short": 3, "gone": 0, "whole": 10, "long": 10}
    assert log.brought[1:] == [{"whole": 0, "long": 10}, {"long": 5}]
    assert {uid: len(entries) for uid, entries in found.items()} == {"short": 3, "gone": 0, "whole": 10, "long": 25}
    assert [entry.id for entry in found["long"]] == [f"{n}-0" for n in range(1, 26)]
    assert {name for entries in found.values() for entry in entries for name in entry.fields} == {"text"}


async def test_what_is_long_is_folded_in_a_thread_and_one_client_after_the_other() -> None:
    assert await folded(LONG - 1, threading.get_ident) == threading.get_ident()
    assert await folded(LONG, threading.get_ident) != threading.get_ident()
    folding, inside, most = Folding(), list[Any](), 0

    async def look() -> None:
        nonlocal most
        async with folding.turn():
            inside.append(1)
            await folded(LONG, lambda: None)
            most = max(most, len(inside))
            inside.pop()

    await asyncio.gather(*(look() for _ in range(12)))
    assert most == 1
