"""When an engine made each token of a history, and which tokens were committed together. A pure fold of its events.

An engine commits several short steps together (`--commit-interval`). Their tokens have one `ms`, when clients got them.
`age_ms` says when each was made. Older histories lack it: then the tokens of a commit divide the time since the token
before evenly. js/timeline/model.js does the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from pipeline.events import TokensProduced
from pipeline.walk import Moment


class Made(NamedTuple):
    """When a token was made."""

    ms: int
    """By Redis' clock."""
    is_known: bool
    """Whether the log says it. If not, it is an estimate."""
    first: int
    """Number of the first token of the same commit."""
    last: int
    """Number of the last one."""

    @property
    def is_estimate(self) -> bool:
        """Whether nobody knows it: older histories say of tokens that were committed together when that was."""
        return not self.is_known and self.first < self.last


class _Come(NamedTuple):
    n: int
    ms: int
    made_ms: int | None
    commit: tuple[int, int, int]
    """The same for all tokens of a commit."""


def times_made(moments: Iterable[Moment]) -> dict[int, Made]:
    """Return number -> when it was made, of each token in *moments*. Later tokens never have earlier times."""
    made: dict[int, Made] = {}
    for _, tokens in groupby(_tokens(moments), lambda token: token.commit):
        _add(made, list(tokens))
    return made


def _tokens(moments: Iterable[Moment]) -> Iterable[_Come]:
    last, holes = 0, 0
    for moment in moments:
        event = moment.event
        if not isinstance(event, TokensProduced):
            continue
        first, epoch = moment.n - event.count + 1, int(event.step.partition("-")[0] or 0)
        holes += first != last + 1
        last = moment.n
        for n in range(first, last + 1):
            is_known = n == last and event.age_ms is not None
            yield _Come(n, event.ms, event.ms - (event.age_ms or 0) if is_known else None, (event.ms, epoch, holes))


def _add(made: dict[int, Made], tokens: list[_Come]) -> None:
    """Add the tokens of one commit. Those of unknown time divide the time up to the next known one, or the commit."""
    first, last = tokens[0].n, tokens[-1].n
    before = made.get(first - 1)
    since_ms = before.ms if before is not None else None
    unknown: list[_Come] = []
    for token in tokens:
        unknown.append(token)
        if token.made_ms is None and token.n != last:
            continue
        now_ms = token.ms if token.made_ms is None else token.made_ms
        now_ms = now_ms if since_ms is None else max(now_ms, since_ms)
        began_ms = now_ms if since_ms is None else since_ms
        for place, each in enumerate(unknown, 1):
            ms = began_ms + (now_ms - began_ms) * place // len(unknown)
            made[each.n] = Made(ms, each.made_ms is not None, first, last)
        since_ms, unknown = now_ms, []
