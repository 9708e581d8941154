"""What one more decode row costs in a step, learned from the time that steps take. No clock: the worker measures.

A line is fitted to the times of steps without prompts, by least squares in which older steps count less.
"""

from __future__ import annotations

from typing import Final

from stages.generate.schedule.plan import BatchPlan

FIRST_SHARE: Final = 0.06
"""Cost of a row, as a part of a step with one row, before it is known."""
WEIGHT: Final = 8.0
"""Weight of this guess beside the measured steps: it counts as much as their sum of squared distances from the mean."""
DECAY: Final = 0.97
"""Weight of a step beside the one after it."""
SURPRISE: Final = 2.0
"""A step that took so many times as long as expected counts as no longer than that: another program delayed it."""
SHARES: Final = (0.005, 1.0)
"""Bounds of the cost of a row as a part of a step with one row."""


class RowCost:
    """The line: seconds of a step = first + row * rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0
        """Sum of weights, and means of both numbers."""
        self._squares = self._products = 0.0
        """Sums of squared distances of rows from their mean, and of their products with those of seconds."""

    def measured(self, plan: BatchPlan, seconds: float) -> None:
        """Learn from a step."""
        rows = plan.num_decode_rows
        if rows < len(plan.rows):
            return
        if self._weight:
            slope = self._slope
            seconds = min(seconds, SURPRISE * max(self._seconds + slope * (rows - self._rows), slope * rows))
        self._weight = DECAY * self._weight + 1
        far, late = rows - self._rows, seconds - self._seconds
        self._rows += far / self._weight
        self._seconds += late / self._weight
        self._squares = DECAY * self._squares + far * (rows - self._rows)
        self._products = DECAY * self._products + far * (seconds - self._seconds)

    def thousandths(self, streams: int) -> int:
        """Return the time of one more row, in thousandths of a step of so many rows; at least 1."""
        if not self._seconds:
            return round(1000 * FIRST_SHARE)
        slope, seconds = self._slope, self._seconds
        return max(1, round(1000 * slope / max(seconds + slope * (streams - self._rows), slope * streams)))

    @property
    def _slope(self) -> float:
        """Seconds of a row."""
        fewest, most = (self._seconds / (1 / share + self._rows - 1) for share in SHARES)
        guess = self._seconds / (1 / FIRST_SHARE + self._rows - 1)
        slope = (self._products + WEIGHT * guess) / (self._squares + WEIGHT)
        return min(max(slope, fewest), most)
