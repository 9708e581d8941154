"""The check of an engine's books: which pages requests hold, which are shared, and which are free."""

from __future__ import annotations

from typing import Final

import structlog

from pipeline.stage.slots import SlotLease
from stages.generate.schedule.schedule import Schedule

logger = structlog.get_logger()

FEWEST_STEPS_BETWEEN_CHECKS: Final = 100
"""An idle engine checks its books of pages after so many steps, or after as many as it has pages if those are more: the
cost of a check grows with them.
"""


class PageAudit:
    """The books of one engine. What is wrong is in the log and in the status, and the engine goes on.

    A lost page costs memory. An engine that ended because of it would cost every request.
    """

    def __init__(self, schedule: Schedule, slot_lease: SlotLease) -> None:
        self._schedule = schedule
        self._slot_lease = slot_lease
        self._next_check = 0
        """Number of the step from which on they are checked again."""

    def check(self) -> None:
        """Check them, if it is time. The engine is idle."""
        if self._schedule.next_step < self._next_check:
            return
        self._next_check = self._schedule.next_step + max(FEWEST_STEPS_BETWEEN_CHECKS, self._schedule.num_pages)
        try:
            problems = self._schedule.problems()
        except Exception as error:  # books so wrong that they cannot be read
            problems = [f"the check failed: {error!r}"]
        if problems:
            times = self._slot_lease.status.books_wrong + 1
            logger.error("books_wrong", problems=problems, times=times)
            self._slot_lease.say(books_wrong=times)
