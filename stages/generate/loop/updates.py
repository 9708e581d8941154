"""What the engine's loop and the log tell each other: steps and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.events import StepCompleted
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


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine may take from the log."""

    count: int = 0
    """Number of new requests."""
    but: tuple[str, ...] = ()
    """Owners of whom none is taken."""
    spare: int = 0
    """Number of requests that could run, however many of them are taken at once."""


class EngineLink(Protocol):
    """What the engine's loop knows of the log: a `LogThread`, or a log in this process."""

    def commit(
        self, number: int, event: StepCompleted, ended: Sequence[str], room: Room, *, settled: bool = False
    ) -> None:
        """Queue step *number* for commit, which consumes the entries of the uids in *ended*.

        Wait while too many steps are queued. With *settled*, also wait until this step is committed. *room*: what the
        engine could take after it.
        """

    def close(self) -> None:
        """Let all queued steps be committed now: the next one takes long."""

    def idle(self, room: Room) -> None:
        """Report that there is nothing to compute: the engine waits for an update."""

    def look(self, room: Room) -> None:
        """Report that there is nothing to compute yet, so that the log is looked at once for an update."""

    def next_update(self, timeout_s: float = 0.0) -> Update | None:
        """Return the next update, waiting up to *timeout_s* for it; None when there is none."""
