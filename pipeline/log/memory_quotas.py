"""What API keys have used up of their quotas, in this process: the part of `submit` that counts.

The caller holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pipeline.log.entries import MINUTE_MS
from pipeline.log.protocol import Quota, Submission, SubmitResult


class Quotas:
    """The counts of all API keys."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self.running: dict[str, set[str]] = {}
        """Requests of each API key; those that have ended do not count."""
        self._now_ms = clock_ms
        self._minute = 0
        self._accepted: dict[str, int] = {}  # of each API key, in that minute

    def used_up(self, quota: Quota, uid: str, live: Collection[str]) -> SubmitResult | None:
        """Say what of the quota is used up for now."""
        minute, ms = divmod(self._now_ms(), MINUTE_MS)
        if minute != self._minute:
            self._minute = minute
            self._accepted.clear()
        if 0 < quota.requests_per_minute <= self._accepted.get(quota.key, 0):
            return SubmitResult(Submission.TOO_FAST, uid, MINUTE_MS - ms)
        running = self.running[quota.key] = {other for other in self.running.get(quota.key, ()) if other in live}
        if 0 < quota.concurrent_requests <= len(running):
            return SubmitResult(Submission.TOO_MANY, uid)
        return None

    def count(self, quota: Quota, uids: Sequence[str]) -> None:
        """Count an accepted submit."""
        self._accepted[quota.key] = self._accepted.get(quota.key, 0) + 1
        self.running.setdefault(quota.key, set()).update(uids)
