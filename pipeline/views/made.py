"""When an engine made each token of a history, and which tokens were committed together. A pure fold of its events.

An engine commits several short steps together (`--commit-interval`). Their tokens have one `ms`, when clients got them.
`age_ms` says when each was made. Older histories lack it: then the tokens of a commit divide the time since the token
before evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeline.events import TokensProduced
from pipeline.walk import Moment


class Made(NamedTuple):
    """When a token was made."""

    ms: int
    """By Redis' clock."""
    is_estimate: bool
    """Whether nobody knows it: older histories say of tokens that were committed together when that was."""
    first: int
    """Number of the first token of the same commit."""


class Times:
    """Takes tokens as they come. A token whose time the log does not say waits for the end of its commit."""

    def __init__(self) -> None:
        self._commit = -1, 0
        """The moment and the epoch of the last token."""
        self._first = self._last = 0
        self._since_ms: int | None = None
        """When the last token that does not wait was made; None: the log lacks it."""
        self._waiting: list[int] = []

    def take(self, n: int, event: TokensProduced) -> Iterator[tuple[int, Made]]:
        """Take the tokens up to number *n*. Yield (number, when it was made) of all that do not wait any more. Later
        tokens never have earlier times."""
        first, commit = n - event.count + 1, (event.ms, int(event.step.partition("-")[0] or 0))
        if commit != self._commit or first != self._last + 1:
            yield from self.rest()
            if first != self._last + 1:
                self._since_ms = None
            self._commit, self._first = commit, first
        if event.accepted and event.age_ms is not None and self._waiting:
            yield from self._divide(event.ms - event.age_ms, is_known=False)
        self._last = n
        self._waiting += range(first, n + 1)
        if event.age_ms is not None:
            yield from self._divide(event.ms - event.age_ms, is_known=True, together=event.accepted > 0)

    def rest(self) -> Iterator[tuple[int, Made]]:
        """Yield those that wait: their commit is over."""
        if self._waiting:
            yield from self._divide(self._commit[0], is_known=False)

    def _divide(self, now_ms: int, *, is_known: bool, together: bool = False) -> Iterator[tuple[int, Made]]:
        """Yield those that wait: they divide the time up to *now_ms*, when the last of them was made.

        *together*: one step made them all, because it had drafts.
        """
        waiting, self._waiting = self._waiting, []
        began_ms = now_ms if self._since_ms is None else self._since_ms
        self._since_ms = now_ms = max(now_ms, began_ms)
        is_alone = self._first == self._last
        for place, n in enumerate(waiting, 1):
            ms = now_ms if together else began_ms + (now_ms - began_ms) * place // len(waiting)
            yield n, Made(ms, not (is_alone or together or (is_known and n == self._last)), self._first)


def times_made(moments: Iterable[Moment]) -> dict[int, Made]:
    """Return number -> when it was made, of each token in *moments*."""
    times, made = Times(), dict[int, Made]()
    for moment in moments:
        if isinstance(moment.event, TokensProduced):
            made.update(times.take(moment.n, moment.event))
    made.update(times.rest())
    return made
