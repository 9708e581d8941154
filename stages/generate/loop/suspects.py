"""Requests that may have killed engines, and which of them runs alone now. Pure: the worker acts on it.

An engine that dies may have had many requests in hand, and computed some tokens more than the log has. So each of these
requests runs alone until it has come further than on any engine before.

    state       event                                                                       next
    nobody      `begin`: no suspect waits                                                   nobody
                `begin`: some wait                                                          trial of the first
    trial       it has made fewer than TOKENS_IN_DOUBT tokens since it began                trial
                it has made as many, it has left the engine, or it does not fit it: `end`   nobody
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stages.generate.loop.past import TOKENS_IN_DOUBT
from stages.generate.schedule.request import NewRequest


@dataclass(frozen=True, slots=True)
class Trial:
    """A request that runs alone."""

    uid: str
    began_n: int
    """Number of tokens it had when it began to run alone."""

    def is_over(self, num_output: int | None) -> bool:
        """Return whether the request, with *num_output* tokens now, may run beside others; None: it left the engine."""
        return num_output is None or num_output - self.began_n >= TOKENS_IN_DOUBT


class Suspects:
    """The suspects of one engine, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[NewRequest] = deque()
        self.trial: Trial | None = None
        """The current trial, if there is one."""

    def __bool__(self) -> bool:
        """Return whether a suspect waits or runs alone."""
        return bool(self._waiting) or self.trial is not None

    def add(self, request: NewRequest) -> None:
        """Queue a request for its trial."""
        self._waiting.append(request)

    def drop(self, uid: str) -> None:
        """Forget a request that ended elsewhere before its trial."""
        self._waiting = deque(request for request in self._waiting if request.uid != uid)

    def begin(self) -> NewRequest | None:
        """Begin the trial of the suspect that waits longest and return it; None: no suspect waits."""
        assert self.trial is None, "one trial at a time"
        if not self._waiting:
            return None
        request = self._waiting.popleft()
        self.trial = Trial(request.uid, len(request.output_ids))
        return request

    def end(self) -> None:
        """End the current trial."""
        self.trial = None
