"""Reads a server's log repeatedly into one `Observed`, for `top` and the live page. Each read is bounded work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import orjson

from pipeline.errors import LogError
from pipeline.log.redis import RedisLog
from pipeline.log.snapshot import HistoryEnds, HistoryQuery
from pipeline.names import GENERATE, slot_index, slot_stage
from pipeline.views.pipeline import Observed, PipelineView, StepsView, last_steps, observe, queries_for, view_of

SCANNED_AT_START: Final = 10_000
"""Keys scanned at the start for requests that ended before."""
SCANNED_LATER: Final = 1000
"""Keys scanned at each later read, for requests that come and end between two reads."""
PEEKED_AT_ONCE: Final = 10
"""Histories per call that are read from their start; a prompt may be long, and is read once."""

LAST_STEPS: Final = 32
"""Steps of each engine per read; one takes up to 10 KB."""


class Reader:
    """Reads one log. For use by one thread."""

    def __init__(self, log: RedisLog) -> None:
        self._log = log
        self._reading: Observed | None = None
        self._cursor = "0"

    def read(self) -> Observed:
        """Read once more.

        Raises:
            LogError: The log cannot be read; the next read continues from the last one.
        """
        found = self._search(SCANNED_LATER if self._reading is not None else SCANNED_AT_START)
        snapshot = self._log.snapshot()
        asks = queries_for(self._reading, snapshot, found)
        peeks = self._peeked(asks)
        engines = sorted((slot for slot in snapshot.slots if slot_stage(slot) == GENERATE), key=slot_index)
        steps = tuple(filter(None, map(self._last_steps, engines)))
        self._reading = replace(observe(self._reading, snapshot, peeks), steps=steps)
        return self._reading

    def view_after(self, last: PipelineView) -> PipelineView:
        """Return the view of one more read; while the log cannot be read, *last* with the reason."""
        try:
            return view_of(self.read())
        except LogError as error:
            return replace(last, error=str(error) or type(error).__name__)

    def _peeked(self, asks: Mapping[str, HistoryQuery]) -> dict[str, HistoryEnds]:
        """Return the ends of histories in the order of *asks*. Prompts are read piece by piece, all else at once."""
        peeks = self._log.peek({uid: query for uid, query in asks.items() if query.after})
        unread = [uid for uid, query in asks.items() if not query.after]
        for first in range(0, len(unread), PEEKED_AT_ONCE):
            peeks |= self._log.peek({uid: asks[uid] for uid in unread[first : first + PEEKED_AT_ONCE]})
        return {uid: peeks[uid] for uid in asks}

    def _last_steps(self, engine: str) -> StepsView | None:
        return last_steps(engine, self._log.journal(engine, max_entries=LAST_STEPS, newest=True))

    def _search(self, max_keys: int) -> list[str]:
        """Return the requests among the next keys of an endless scan."""
        found: list[str] = []
        for _ in range(0, max_keys, SCANNED_LATER):
            self._cursor, uids = self._log.requests(self._cursor, SCANNED_LATER)
            found += uids
            if self._cursor == "0":
                break
        return found


def as_json(view: PipelineView) -> bytes:
    """Return *view* as one line."""
    return orjson.dumps(view, option=orjson.OPT_APPEND_NEWLINE)
