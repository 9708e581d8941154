"""Has recorded requests computed again by the workers of a log: those of a server, or of this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pipeline.events import Cancelled, Failed, Finished, Submitted, new_uid
from pipeline.log.protocol import HistoryLog, RequestLog, Submission
from pipeline.names import GENERATE
from pipeline.process.config import ModelConfig
from pipeline.recording import Recording
from pipeline.replaying import NotComputed
from pipeline.stage.slots import read_statuses
from pipeline.views.recorded import History
from stages.generate.setup.config import EngineConfig

OF_ENGINES: Final = (ModelConfig, EngineConfig)
"""The flags of an engine that computes in a process of a tool."""
POLL_S: Final = 0.02
MORE_S: Final = 10.0
"""After its deadline, a request of a server that works has ended by now."""


class Computes(Protocol):
    """Something that has requests computed."""

    def compute(self, events: Sequence[Submitted]) -> list[History]:
        """Return the histories of *events*, once all have ended. Raises NotComputed if that cannot be."""
        ...


class Serves(Computes, Protocol):
    """A server that computes."""

    def models(self) -> list[str]:
        """Return the names of the models that it serves; none if it does not tell them."""
        ...


class Computer:
    """Has requests computed by the workers of *log*."""

    def __init__(self, log: RequestLog, *, at_once: int, check: Callable[[], None] = lambda: None) -> None:
        """At most *at_once* are in the log at a time. *check* raises when no worker is left that could compute."""
        self.log = log
        self._at_once = at_once
        self.check = check

    def compute(self, events: Sequence[Submitted]) -> list[History]:
        """Return the histories of *events*, once all have ended. What runs is cancelled if this is interrupted.

        Raises:
            NotComputed: A request did not end in time: no worker takes it.
        """
        waiting, running = deque(enumerate(events)), dict[str, int]()
        found: dict[int, History] = {}
        progress_s = time.monotonic()
        try:
            while waiting or running:
                self.check()
                while waiting and len(running) < self._at_once and (uid := self._submit(waiting[0][1])):
                    running[uid] = waiting.popleft()[0]
                    progress_s = time.monotonic()
                alive = self.log.alive(list(running))
                ended = [uid for uid in running if uid not in alive]
                for uid, entries in zip(ended, self.log.histories(ended), strict=True):
                    found[running.pop(uid)] = History(Recording(uid, tuple(entries)))
                    progress_s = time.monotonic()
                if not ended:
                    self._give_up_after(progress_s)
                    time.sleep(POLL_S)
        finally:
            for uid in running:
                self.log.end(uid, Cancelled(by="replay"), frontend="")
        return [found[index] for index in range(len(events))]

    def models(self) -> list[str]:
        """Return the names under which the engines serve their model."""
        return list(dict.fromkeys(name for status in read_statuses(self.log, GENERATE) for name in status.models))

    def _submit(self, event: Submitted) -> str:
        """Return the uid of the submitted request; empty if no more may wait now."""
        uid = new_uid()
        accepted = self.log.submit(uid, [event]).submission is Submission.ACCEPTED
        return uid if accepted else ""

    def _give_up_after(self, progress_s: float) -> None:
        waited_s = time.monotonic() - progress_s
        if waited_s > self.log.limits.timeout_s + MORE_S:
            raise NotComputed(f"no request ended for {waited_s:.0f} s; minisgl top shows whether the workers are there")


def refuse_without_engine(log: HistoryLog) -> None:
    """Raise NotComputed where no engine lives that could compute."""
    if not read_statuses(log, GENERATE):
        raise NotComputed("no engine of this server lives now; start one, or pass --model to compute in this process")


def why_failed(history: History) -> str:
    """Return why a replay came to no end of its own; empty if it did."""
    match history.end:
        case Finished():
            return ""
        case Failed() as end:
            return f"{end.code}: {end.message}"
        case end:
            return f"it was {end.kind if end is not None else 'lost'}"
