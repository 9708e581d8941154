"""How long until there is room for one more request: an estimate, from how fast requests ended in this process lately.

It is the mean time between two ends within the last minute, or since there was nothing to do, and at least the time in
which none has ended. How many others wait for the same room is not known here: when many do, it is too short.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

LATELY_S: Final = 60.0
MOST_ENDS: Final = 64
"""More within a minute all say the same: that it is less than a second."""
LONGEST_S: Final = 30


class RetryAfter:
    """What has begun and ended here."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._running: set[Hashable] = set()
        self._busy_since_s = 0.0
        self._ends_s: deque[float] = deque(maxlen=MOST_ENDS)

    def begun(self, request: Hashable) -> None:
        """Say that the log has accepted *request*."""
        if not self._running:
            self._busy_since_s = self._clock_s()
            self._ends_s.clear()
        self._running.add(request)

    def ended(self, request: Hashable) -> None:
        """Say that *request*, if it had begun, is over."""
        if request in self._running:
            self._running.remove(request)
            self._ends_s.append(self._clock_s())

    def estimate_s(self) -> int:
        """Return when to come again, in whole seconds: 1 to 30, and 1 when nothing runs here."""
        if not self._running:
            return 1
        now_s = self._clock_s()
        since_s = max(self._busy_since_s, now_s - LATELY_S)
        num_ended = sum(end_s > since_s for end_s in self._ends_s)
        mean_s = (now_s - since_s) / max(num_ended, 1)
        quiet_s = now_s - (self._ends_s[-1] if self._ends_s else self._busy_since_s)
        return min(max(math.ceil(max(mean_s, quiet_s)), 1), LONGEST_S)
