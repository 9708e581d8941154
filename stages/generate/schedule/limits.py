"""What bounds the plans of a schedule, and the engine whose plans they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What bounds a plan; lengths are in tokens."""

    context: int
    """The served context: prompt + output of one request. At most what the cache holds."""
    max_prefill_length: int
    mixed_prefill_length: int
    max_running_requests: int
    vocab_size: int
    mixed_prefill_per_request: int = 0
    """Raises `mixed_prefill_length` to this much for each request in hand: with many running a step is long anyway, and
    with many waiting more gain from it."""

    def prefill_budget(self, num_streams: int, num_requests: int) -> int:
        """Return the most prompt tokens of a step in which *num_streams* of *num_requests* decode."""
        if not num_streams:
            return self.max_prefill_length
        for_all = min(self.mixed_prefill_per_request * num_requests, self.max_prefill_length)
        return max(self.mixed_prefill_length, for_all)


@dataclass(frozen=True, slots=True)
class Identity:
    """The engine that computes, as the marks in the histories name it."""

    engine: str
    epoch: int
    fingerprint: str
    """Of the weights."""
    numerics: str = ""
    version: str = ""
    """Of MiniSGL."""
