"""`History`: one request that was recorded. Walk over it, look at it after any token, compare it with another.

A pure fold of its entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    Answered,
    End,
    Failed,
    Finished,
    Logprob,
    Mark,
    Preempted,
    Submitted,
    TakenOver,
    Tokenized,
    TokensProduced,
)
from pipeline.recording import Recording
from pipeline.views.made import Made, times_made
from pipeline.walk import Moment, walk


@dataclass(frozen=True, slots=True)
class Maker:
    """Under what an engine made tokens. What a history does not say is empty."""

    engine: str = ""
    epoch: int = 0
    weights: str = ""
    """Identifies them, whatever the dtype."""
    numerics: str = ""
    """How it computed with them, as in Admitted."""
    version: str = ""
    """Of MiniSGL."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    n: int
    """The first is 1."""
    id: int
    ms: int
    """When it was committed for its client, by Redis' clock."""
    made: Made
    """When the engine had made it, and what was committed together with it."""
    step: str
    """`<epoch>-<step>` of its engine."""
    chunks: int
    """As in TokensProduced."""
    by: Maker
    score: Logprob | None
    """Its log-probability and the most probable tokens, if the client asked for them."""


@dataclass(frozen=True, slots=True)
class State:
    """A request when it had n tokens."""

    n: int
    token_ids: tuple[int, ...]
    """Of the answer so far."""
    text: str
    """That could be shown so far. What a client was shown may lack the end, inside a character or a stop string."""
    last: Token | None
    """Token number n; None: the answer had not begun."""
    at_ms: int
    """When the engine had made token n, in milliseconds since the request was submitted."""
    pause_ms: int
    """Milliseconds since the engine had made the token before, or since the submit."""
    client_at_ms: int
    """When token n was committed for the client, in milliseconds since the submit."""
    client_pause_ms: int
    """Milliseconds since the token before was committed for the client, or since the submit."""
    marks: tuple[Mark, ...]
    """What engines said of it between the token before and this one."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two answers differ. A token is None where that answer had ended."""

    n: int
    recorded: int | None
    now: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of a comparison of one answer with another."""

    num_tokens: int
    """So many are the same, from the first on."""
    difference: Difference | None = None
    other: str = ""
    """What differs although all tokens are the same: the text, or how the answer ended."""

    @property
    def is_identical(self) -> bool:
        return self.difference is None and not self.other


class History:
    """One recorded request."""

    def __init__(self, recording: Recording, *, without: Collection[str] = ()) -> None:
        """Fold *recording*. Fields of its first event *without* which somebody can do are not decoded.

        Raises:
            UndecodableEvent: It is damaged: an event does not decode, or tokens are missing.
        """
        self._without = without
        self.uid = recording.uid
        self.recording = recording
        self.submitted: Submitted | None = None
        self.tokenized: Tokenized | None = None
        self.end: End | None = None
        """What sealed it; None: the request had not ended."""
        self.tokens: list[Token] = []
        """The answer."""
        self.maker = Maker()
        """Under what its last engine made tokens."""
        self._texts: list[tuple[int, str]] = []
        """(n, text that could be shown from token n on)"""
        self._marks: list[tuple[int, Mark]] = []
        """(n, what an engine said when there were n tokens)"""
        moments = list(self.walk())
        self._made = times_made(moments)
        for moment in moments:
            self._take(moment)

    def walk(self) -> Iterator[Moment]:
        """Give its events in order, each with its id and the number of tokens after it."""
        yield from walk(self.recording.entries, without=self._without)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer."""
        return tuple(token.id for token in self.tokens)

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(text for _, text in self._texts)

    @property
    def is_whole(self) -> bool:
        """Whether the model ended the answer, not its client, an error or the moment of the recording."""
        return isinstance(self.end, Finished)

    def at(self, n: int) -> State:
        """Return the request when it had *n* tokens.

        Raises:
            IndexError: It never had so many.
        """
        if not 0 <= n <= len(self.tokens):
            raise IndexError(f"{self.uid} has {len(self.tokens)} tokens; expected a number from 0 to that, got {n}")
        began_ms = self.submitted.ms if self.submitted is not None else 0
        last = self.tokens[n - 1] if n else None
        before = self.tokens[n - 2] if n > 1 else None
        now_ms, came_ms = (last.made.ms, last.ms) if last is not None else (began_ms, began_ms)
        return State(
            n,
            self.token_ids[:n],
            "".join(text for after, text in self._texts if after <= n),
            last,
            now_ms - began_ms,
            now_ms - (before.made.ms if before is not None else began_ms),
            came_ms - began_ms,
            came_ms - (before.ms if before is not None else began_ms),
            tuple(mark for after, mark in self._marks if after == n - 1),
        )

    def commit_of(self, token: Token) -> tuple[int, int]:
        """Return the numbers of the first and of the last token that were committed together with *token*."""
        first = token.made.first
        later = itertools.takewhile(lambda each: each.made.first == first, self.tokens[token.n - 1 :])
        return first, max(each.n for each in later)

    def compare(self, now: History) -> Comparison:
        """Compare this answer with the one that the same request got *now*, token by token.

        If a client or an error ended one of them, only the tokens that both have are compared. An error *now* is a
        difference, unless it came after all tokens of this one.
        """
        mine, theirs = self.token_ids, now.token_ids
        shared = min(len(mine), len(theirs))
        same = next((place for place in range(shared) if mine[place] != theirs[place]), shared)
        has_ended = (now if len(theirs) < len(mine) else self).is_whole
        if same < shared or (len(mine) != len(theirs) and has_ended):
            recorded, got = (ids[same] if same < len(ids) else None for ids in (mine, theirs))
            return Comparison(same, Difference(same + 1, recorded, got))
        return Comparison(same, None, self._other_difference(now))

    def _other_difference(self, now: History) -> str:
        if isinstance(now.end, Failed) and (self.is_whole or len(now.tokens) < len(self.tokens)):
            return f"it failed after {len(now.tokens)} of {len(self.tokens)} tokens: {now.end.code}: {now.end.message}"
        if not isinstance(self.end, Finished) or not isinstance(now.end, Finished):
            return ""
        if self.text != now.text:
            pairs = zip(self.text, now.text, strict=False)
            place = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
            place = min(len(self.text), len(now.text)) if place is None else place
            return f"its text differs from character {place + 1} on"
        mine, theirs = ((end.reason, end.stop_string) for end in (self.end, now.end))
        return "" if mine == theirs else f"it ended otherwise: {_ending(*mine)} recorded, {_ending(*theirs)} now"

    def _take(self, moment: Moment) -> None:
        match moment.event:
            case Submitted() as event:
                self.submitted = event
            case Tokenized() as event:
                self.tokenized = event
            case TokensProduced() as event:
                self._take_tokens(moment.n, event)
            case Admitted() as event:
                self.maker = Maker(event.engine, event.epoch, event.fingerprint, event.numerics, event.version)
                self._marks.append((moment.n, event))
            case Preempted() | TakenOver() as event:
                self._marks.append((moment.n, event))
            case event:
                self.end = event
                if isinstance(event, Answered):
                    self._texts.append((moment.n, event.text))

    def _take_tokens(self, n: int, event: TokensProduced) -> None:
        if len(event.tokens) != event.count:
            raise UndecodableEvent(f"token event {n} of {self.uid} counts {event.count} and has {len(event.tokens)}")
        scores = event.scores or (None,) * event.count
        for number, (token, score) in enumerate(zip(event.tokens, scores, strict=True), n - event.count + 1):
            made = self._made[number]
            self.tokens.append(Token(number, token, event.ms, made, event.step, event.chunks, self.maker, score))
        self._texts.append((n, event.text))


def _ending(reason: str, stop_string: str) -> str:
    return f"{reason} ({stop_string!r})" if stop_string else reason


def said_of_end(end: End | None) -> str:
    """Return in one word how a request ended, with the reason."""
    match end:
        case Finished():
            return f"finished ({end.reason})"
        case Failed():
            return f"failed ({end.code})"
        case None:
            return "running"
        case _:
            return end.kind
