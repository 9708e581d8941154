"""The `Retry-After` header: when there may be room for one more request, estimated from the last ends of requests.

The estimate is the mean time between two ends in the last minute, or since this process was last idle. It is at least
the time since the last end. It is too short when many clients wait for the same room: this process does not know them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

LATELY_S: Final = 60.0
MOST_ENDS: Final = 64
"""With more ends in a minute, the estimate is a second in any case."""
LONGEST_S: Final = 30


class RetryAfter:
    """The requests that run here, and when the last ones ended."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._running: set[Hashable] = set()
        self._busy_since_s = 0.0
        self._ends_s: deque[float] = deque(maxlen=MOST_ENDS)

    def begun(self, request: Hashable) -> None:
        """Note that the log has accepted *request*."""
        if not self._running:
            self._busy_since_s = self._clock_s()
            self._ends_s.clear()
        self._running.add(request)

    def ended(self, request: Hashable) -> None:
        """Note that *request*, if it had begun, is over."""
        if request in self._running:
            self._running.remove(request)
            self._ends_s.append(self._clock_s())

    def estimate_s(self) -> int:
        """Return when to try again, in whole seconds: 1 to 30, and 1 when nothing runs here."""
        if not self._running:
            return 1
        now_s = self._clock_s()
        since_s = max(self._busy_since_s, now_s - LATELY_S)
        num_ended = sum(end_s > since_s for end_s in self._ends_s)
        mean_s = (now_s - since_s) / max(num_ended, 1)
        quiet_s = now_s - (self._ends_s[-1] if self._ends_s else self._busy_since_s)
        return min(max(math.ceil(max(mean_s, quiet_s)), 1), LONGEST_S)
