"""Use of the quotas of API keys in this process: the part of `submit` that counts.

The caller holds the lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Final

from pipeline.log.protocol import Quota, Submission, SubmitResult

PERIODS_MS: Final = {"requests_per_minute": 60_000, "requests_per_day": 86_400_000}


def rates(quota: Quota) -> list[tuple[str, int]]:
    """Return the limits a minute and a day of *quota*, but for those on tokens."""
    return [(name, most) for name in PERIODS_MS if (most := getattr(quota, name))]


class Quotas:
    """The counts of all API keys."""

    def __init__(self, clock_ms: Callable[[], int], retention_ms: Callable[[], int]) -> None:
        self.running: dict[str, set[str]] = {}
        """Requests of each API key; ended ones do not count."""
        self._now_ms = clock_ms
        self._retention_ms = retention_ms
        self._behind: dict[str, set[str]] = {}
        self._buckets: dict[tuple[str, str], tuple[int, float]] = {}
        """Owner and limit -> time of the last submit, and what was left then."""
        self._bytes: dict[str, dict[int, int]] = {}
        """API key -> begin -> bytes, for each sixteenth of the retention."""

    def used_up(self, quota: Quota, uid: str, live: Collection[str]) -> SubmitResult | None:
        """Return the refusal of a submit if the quota is used up; None: it is not."""
        now_ms = self._now_ms()
        waits = {name: (1 - self._level(quota, name, now_ms)) * PERIODS_MS[name] / most for name, most in rates(quota)}
        if waits and max(waits.values()) > 0:
            slowest = max(waits, key=lambda name: waits[name])
            return SubmitResult(Submission.TOO_FAST, uid, math.ceil(waits[slowest]), limit=slowest)
        running = self.running[quota.key] = {other for other in self.running.get(quota.key, ()) if other in live}
        if 0 < quota.concurrent_requests <= len(running):
            return SubmitResult(Submission.TOO_MANY, uid)
        parts = self._parts(quota.key, now_ms)
        used = left = sum(parts.values())
        if 0 < quota.log_bytes <= used:
            for begin_ms, num_bytes in parts.items():
                left -= num_bytes
                if left < quota.log_bytes:
                    again_ms = begin_ms + self._kept_ms - now_ms
                    return SubmitResult(Submission.TOO_MUCH, uid, again_ms, used)
        return None

    def behind(self, owner: str, live: Collection[str]) -> set[str]:
        """Return the requests of an owner that run in the background; a caller adds to them."""
        self._behind[owner] = {uid for uid in self._behind.get(owner, ()) if uid in live}
        return self._behind[owner]

    def count(self, quota: Quota, uids: Sequence[str], num_bytes: int) -> None:
        """Count an accepted submit of *num_bytes*."""
        if quota.log_bytes:
            now_ms = self._now_ms()
            begin_ms = now_ms // self._part_ms * self._part_ms
            parts = self._bytes[quota.key] = self._parts(quota.key, now_ms)
            parts[begin_ms] = parts.get(begin_ms, 0) + num_bytes
        now_ms = self._now_ms()
        for name, _ in rates(quota):
            self._buckets[quota.key, name] = now_ms, self._level(quota, name, now_ms) - 1
        self.running.setdefault(quota.key, set()).update(uids)

    def _level(self, quota: Quota, name: str, now_ms: int) -> float:
        """Return what is in a token bucket of requests."""
        most = getattr(quota, name)
        at_ms, level = self._buckets.get((quota.key, name), (now_ms, most))
        return float(min(level + (now_ms - at_ms) * most / PERIODS_MS[name], most))

    def _parts(self, key: str, now_ms: int) -> dict[int, int]:
        """Return the bytes that an API key has submitted within the retention, the oldest part first."""
        oldest_ms = now_ms - self._kept_ms
        return {begin_ms: num for begin_ms, num in self._bytes.get(key, {}).items() if begin_ms > oldest_ms}

    @property
    def _part_ms(self) -> int:
        return max(math.ceil(self._retention_ms() / 16), 1)

    @property
    def _kept_ms(self) -> int:
        """Time after its begin at which a whole part is older than the retention."""
        return self._retention_ms() + self._part_ms
