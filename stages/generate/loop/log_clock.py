"""The clock of the log, as an engine reckons it: no call asks Redis for the time.

Each commit says when Redis did it. That was between its sending and its answer, which bounds how far Redis' clock is
ahead of the engine's. The bounds of many commits together are narrow, also where single commits take long.
"""

from __future__ import annotations


class LogClock:
    """Knows Redis' clock from the first commit on."""

    def __init__(self) -> None:
        self._ahead_ms: float | None = None

    def hear(self, sent_s: float, came_s: float, ms: int) -> None:
        """Take in that Redis did a commit at *ms*, which was sent and answered at these times of the engine's clock."""
        least, most = ms - came_s * 1000, ms + 1 - sent_s * 1000
        ahead = most if self._ahead_ms is None else self._ahead_ms
        self._ahead_ms = min(max(ahead, least), most)

    def at(self, s: float) -> int:
        """Return what Redis' clock says at *s* of the engine's, in ms; 0: unknown."""
        return 0 if self._ahead_ms is None else int(s * 1000 + self._ahead_ms)
