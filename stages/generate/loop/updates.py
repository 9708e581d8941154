"""Updates that the log thread sends to the engine's loop."""

from __future__ import annotations

from dataclasses import dataclass

from stages.generate.schedule.request import NewRequest


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request for the schedule."""

    request: NewRequest
    resumed: bool
    """Whether another engine, or a former owner of the slot, had it before."""
    suspect: bool = False
    """Whether an engine took it over and died without progress: it must run alone."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended elsewhere, or could never begin."""

    uid: str


@dataclass(frozen=True, slots=True)
class Flush:
    """A client asks to empty the prefix cache."""

    id: str
    """Id of its entry in `control`. The status names it when it is done."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The thread has ended: the slot has another owner, or another try would not help."""

    error: Exception


Update = Arrived | Ended | Flush | Lost
