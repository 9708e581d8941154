"""Reads a running server's log, again and again, into one `Observed`: a bounded piece of work each time."""

from __future__ import annotations

from typing import Final

from pipeline.log.redis import RedisLog
from pipeline.log.snapshot import HistoryEnds
from pipeline.views.pipeline import Observed, observe, queries_for

SCANNED_AT_START: Final = 10_000
"""Keys of the server among which requests are looked for that ended before."""
SCANNED_LATER: Final = 1000
"""The same each time after that, to find those that come and end between two looks."""
PEEKED_AT_ONCE: Final = 10
"""Histories whose ends are read in one piece; a prompt may be long, and is read once."""


class Reader:
    """Looks at one log. For one thread."""

    def __init__(self, log: RedisLog) -> None:
        self._log = log
        self._reading: Observed | None = None
        self._cursor = "0"

    def read(self) -> Observed:
        """Look once more.

        Raises:
            LogError: The log cannot be read; the next look goes on from what was known.
        """
        found = self._search(SCANNED_LATER if self._reading is not None else SCANNED_AT_START)
        snapshot = self._log.snapshot()
        asks = list(queries_for(self._reading, snapshot, found).items())
        peeks: dict[str, HistoryEnds] = {}
        for first in range(0, len(asks), PEEKED_AT_ONCE):
            peeks |= self._log.peek(dict(asks[first : first + PEEKED_AT_ONCE]))
        self._reading = observe(self._reading, snapshot, peeks)
        return self._reading

    def _search(self, max_keys: int) -> list[str]:
        """Return whose histories are among the next keys, going round."""
        found: list[str] = []
        for _ in range(0, max_keys, SCANNED_LATER):
            self._cursor, uids = self._log.requests(self._cursor, SCANNED_LATER)
            found += uids
            if self._cursor == "0":
                break
        return found
