"""The queue from an engine's loop to its log thread: steps, in groups that are committed together, and "idle".

One commit wakes Redis, the detokenizer and the web process, which share their cores with the forward pass. So where
steps are short, one commit has the steps of a short interval. Decides which steps wait, and does not know the log.

    a step                                                                   its group
    has more than the next tokens of streams: a first token, an end, a mark  is closed: it is committed at once
    would wait for the next one, and that comes after the interval           is closed
    is the last of MOST_TOGETHER                                             is closed
    anything else                                                            waits for the next step, or for its time

Groups that wait while Redis is slow are committed together, too. So commits become fewer there. Without an interval
each step is a commit of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.events import EventRow, StepCompleted, TokenRow
from stages.generate.loop.updates import Room

MOST_TOGETHER: Final = 8
"""Largest number of steps in a group."""
MOST_HANDED_OVER: Final = 32
"""An engine waits when a request has so many tokens in queued steps. `past.TOKENS_IN_DOUBT` depends on it."""
FEWEST_HANDED_OVER: Final = 2
"""Where each step is committed at once: number of such steps."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A computed step, and what its commit ends."""

    number: int
    event: StepCompleted
    ended: tuple[str, ...]
    """Uids whose entries the commit consumes."""
    made_s: float = 0.0
    """Time when the step was computed, by the engine's clock."""
    places: int = 1
    """Number of places that the engine has reserved for it."""

    @property
    def may_wait(self) -> bool:
        """Whether the step has nothing but the next tokens of streams."""
        event = self.event
        if self.ended or event.released or event.schedule or event.figures.prefill_rows:
            return False
        return not any(type(row) is EventRow for row in event.rows)


@dataclass(frozen=True, slots=True)
class Idle:
    """The engine has nothing to compute."""

    room: Room
    num_read: int
    """Number of updates that the engine has read. If the thread has sent more, the engine is no longer idle."""
    brief: bool
    """The engine has something else to wait for, so one look is enough."""


class Group:
    """Steps that are committed together. The engine adds steps, and the log thread takes them all."""

    def __init__(self, step: PendingStep, until_s: float) -> None:
        """*until_s*: when the group is taken at the latest."""
        self.until_s = until_s
        self.committed = threading.Event()
        self.is_open = True
        """Whether the engine may add steps, unless the group was taken."""
        self._steps = [step]
        self._is_taken = False
        self._lock = threading.Lock()
        self._closed = threading.Lock()  # held until the group is closed: an Event is slow Python code
        self._closed.acquire()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def places(self) -> int:
        """Number of places that its steps take."""
        return sum(step.places for step in self._steps)

    def add(self, step: PendingStep) -> bool:
        """Add a step; return False if the group was taken because its time was over."""
        with self._lock:
            if not self._is_taken:
                self._steps.append(step)
            return not self._is_taken

    def close(self) -> None:
        """Let the log thread take the group now. Nothing can be added."""
        if self.is_open:
            self.is_open = False
            self._closed.release()

    def take(self, wait_s: float) -> Sequence[PendingStep]:
        """Wait until the group is closed, for *wait_s* at most, and return its steps."""
        self._closed.acquire(timeout=max(wait_s, 0.0))
        with self._lock:
            self._is_taken = True
        return self._steps


class Outbox:
    """The queue from an engine's loop to its log thread."""

    def __init__(self, interval_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """*interval_s*: longest time that a step waits for the next one; 0: each step is a commit of its own."""
        self._interval_s = interval_s
        self._clock = clock
        self._jobs: queue.SimpleQueue[Group | Idle] = queue.SimpleQueue()
        self._next: Group | Idle | None = None
        """Job that the log thread has read and not begun."""
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()  # a Semaphore is slow Python code
        for _ in range(MOST_HANDED_OVER if interval_s else FEWEST_HANDED_OVER):
            self._places.put(None)
        self._place_to_idle = threading.Lock()  # held while an Idle waits
        self._open: Group | None = None
        """Group to which the next step is added."""
        self._last_s = -1.0
        """Time when the last step was queued."""

    # for the engine's loop

    def places_for(self, event: StepCompleted) -> int:
        """Return how many places a step takes: the most tokens that a request may have in it."""
        drafted = (
            [row.drafted for row in event.rows if type(row) is TokenRow and row.drafted] if event.figures.drafts else ()
        )
        return 1 + max(drafted, default=0) if self._interval_s else 1

    def has_place(self, timeout_s: float) -> bool:
        """Reserve one more place for a step, waiting at most *timeout_s*; True: the caller must queue the step."""
        if self._open is not None and self._places.empty():
            self.close()  # its steps must not wait for a step that waits for a place
        try:
            self._places.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def put(self, step: PendingStep, *, at_once: bool = False) -> Group:
        """Queue a step, after `has_place`; return its group. *at_once*: the step waits for no other step."""
        now_s = self._clock()
        next_s, self._last_s = now_s + (now_s - self._last_s), now_s  # the next one is expected to take as long
        group, is_new = self._open, False
        if group is None or not group.add(step):
            group, is_new = Group(step, now_s + self._interval_s), True
        if at_once or len(group) >= MOST_TOGETHER or next_s > group.until_s or not step.may_wait:
            group.close()
        self._open = group if group.is_open else None
        if is_new:
            self._jobs.put(group)
        return group

    def close(self) -> None:
        """Let the log thread commit all queued steps now."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def idle(self, idle: Idle, timeout_s: float) -> bool:
        """Queue "idle"; return False if the last one still waits after *timeout_s*."""
        self.close()
        if not self._place_to_idle.acquire(timeout=timeout_s):
            return False
        self._jobs.put(idle)
        return True

    # for the log thread

    def take(self, timeout_s: float) -> tuple[Sequence[Group], Sequence[PendingStep]] | Idle | None:
        """Wait for the next job; None: nothing came for *timeout_s*.

        Several groups are committed together. Then the caller calls `committed` with them.
        """
        job, self._next = self._next, None
        try:
            job = self._jobs.get(timeout=timeout_s) if job is None else job
            if isinstance(job, Idle):
                self._place_to_idle.release()
                return job
            groups, steps = [job], list(job.take(job.until_s - self._clock()))
            while self._interval_s and self._next is None and not self._jobs.empty():
                self._next = self._jobs.get_nowait()
                if isinstance(self._next, Group) and not self._next.is_open:
                    groups.append(self._next)
                    steps += self._next.take(0.0)
                    self._next = None
        except queue.Empty:
            return None
        return groups, steps

    def committed(self, groups: Sequence[Group]) -> None:
        """Free the places of *groups*, which are in the log now."""
        for group in groups:
            for _ in range(group.places):
                self._places.put(None)
            group.committed.set()
