"""One event as a listener is told of it: all that the folds of answers and frames need to know of the log."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.events import AnyEvent


@dataclass(frozen=True, slots=True)
class ClientEvent:
    """One event of a request, as its listener is told."""

    entry_id: str
    """In the history; empty for what this process alone says, from which nobody can go on."""
    n: int
    event: AnyEvent
    index: int = 0
    """Which of several that were submitted together it is of."""
