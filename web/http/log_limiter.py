"""Limits equal log lines that clients can cause in any number."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 10.0
MOST_KINDS: Final = 1000


class LogLimiter:
    """Counts events by kind, and allows each kind one line in 10 s."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._kinds: dict[str, tuple[float, int]] = {}
        """Kind -> when its last line was written, and how often it happened since."""

    def times(self, kind: str) -> int:
        """Count *kind*. Return 0 if no line is to be written, else how often it happened since the last line."""
        now_s = self._clock_s()
        written_s, since = self._kinds.get(kind, (float("-inf"), 0))
        if now_s - written_s < EVERY_S:
            self._kinds[kind] = (written_s, since + 1)
            return 0
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (now_s, 0)
        return since + 1
