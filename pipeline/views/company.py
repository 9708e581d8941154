"""In whose company a request was computed, step by step, and why its tokens were late.

A pure fold of its history and of the journals of its engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low
from typing import Any, Final

from pipeline.events import Admitted, Preempted, TakenOver
from pipeline.log.journal import JournalStep
from pipeline.names import parse_id
from pipeline.views.recorded import History

LEAST_MS: Final = 5
"""In shorter waits, what the engine did not compute may be the rounding of clocks."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was computed meanwhile."""

    uid: str
    num_tokens: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Wait:
    """What happened between two tokens of a request, or between its arrival and its first token."""

    uid: str
    n: int
    """Number of the second one."""
    waited_ms: int
    num_steps: int
    """The last of them made the token."""
    computed_ms: float
    """Time of the forward passes."""
    longest_ms: float
    """The longest of them."""
    own: Prompt | None
    """What was computed of the request itself: its prompt, or all its tokens after a preemption or a takeover."""
    others: tuple[Prompt, ...]
    """The longest first."""
    preempted: tuple[str, ...]
    """Requests that lost their pages; this one may be among them."""
    taken_over: bool
    """Another owner of a slot went on with it."""

    @property
    def reasons(self) -> list[str]:
        """What can be said about it, in English, the most important first."""
        said: list[str] = []
        if self.taken_over:
            said.append("its engine was gone, and another one took it over")
        if self.uid in self.preempted:
            said.append("it was preempted because the pages ran out, and computed again")
        if self.own is not None:
            what = "its prompt" if self.n == 1 else "its prompt and output"
            said.append(
                f"{self.own.num_tokens:,} tokens of {what} were prefilled in {_counted(self.own.num_chunks, 'chunk')}"
            )
        if len(self.others) == 1:
            (one,) = self.others
            said.append(f"a prompt of {one.num_tokens:,} tokens was prefilled in {_counted(one.num_chunks, 'chunk')}")
        elif self.others:
            tokens, chunks = (sum(getattr(one, name) for one in self.others) for name in ("num_tokens", "num_chunks"))
            said.append(
                f"{len(self.others)} prompts of {tokens:,} tokens were prefilled in {_counted(chunks, 'chunk')}"
            )
        if others := len(set(self.preempted) - {self.uid}):
            said.append(f"{_counted(others, 'other request')} {'was' if others == 1 else 'were'} preempted")
        if self.computed_ms < self.waited_ms / 2 and self.waited_ms >= LEAST_MS:
            said.append(f"the engine computed for only {spoken(self.computed_ms)} of that time")
        return said

    def __str__(self) -> str:
        reasons = self.reasons
        listed = (
            ", ".join(reasons[:-1]) + (", and " if len(reasons) > 1 else "") + reasons[-1]
            if reasons
            else (
                f"nothing else happened in {_counted(self.num_steps, 'step')}, the longest of which took "
                f"{spoken(self.longest_ms)}"
            )
        )
        return f"token {self.n} of {self.uid} waited {spoken(self.waited_ms)}: {listed}"


def why_waited(steps: Sequence[JournalStep], uid: str, n: int, since_ms: int, until_ms: int | None = None) -> Wait:
    """Return what happened in *steps*, the last of which made token *n* of *uid*; *since_ms* is when the wait began.

    *until_ms* is an estimate of when the token was made, where the log does not say it.

    The steps are those of the engine that made the token, after the step that made the token before.
    """
    done: dict[str, list[int]] = {}
    for step in steps:
        for chunk in step.chunks:
            done.setdefault(chunk.uid, []).append(chunk.count)
    prompts = {other: Prompt(other, sum(counts), len(counts)) for other, counts in done.items()}
    own = prompts.pop(uid, None)
    events = [row for step in steps for row in step.events]
    times = [step.figures.forward_ms for step in steps]
    return Wait(
        uid=uid,
        n=n,
        waited_ms=max((steps[-1].made_ms if until_ms is None else until_ms) - since_ms, 0),
        num_steps=len(steps),
        computed_ms=sum(times),
        longest_ms=max(times),
        own=own,
        others=tuple(sorted(prompts.values(), key=lambda one: (-one.num_tokens, one.uid))),
        preempted=tuple(dict.fromkeys(row.uid for row in events if isinstance(row.event, Preempted))),
        taken_over=any(row.uid == uid and isinstance(row.event, TakenOver) for row in events),
    )


def spoken(ms: float) -> str:
    """Return a time for people: in seconds from 1 s on, in milliseconds below."""
    if ms >= 1000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


MOST_WAITS: Final = 1000
"""So many waits are told, the longest."""
LATE: Final = 2.0
"""A token is late if it took so many times as long as the median."""
SOON_MS: Final = 5
"""Shorter waits are not late."""


class Company:
    """Takes the steps of the engines of one request, and tells what they were to it."""

    def __init__(self, history: History) -> None:
        self._uid = history.uid
        self._late = late_tokens(history)
        self._estimated = {token.n: token.made.ms for token in history.tokens[1:] if token.made.is_estimate}
        self._steps: list[dict[str, Any]] = []
        self._companions: list[tuple[str, ...]] = []
        """Of each of these steps."""
        self._between: dict[str, list[JournalStep]] = {}
        """The steps of each engine since its last one with a token of the request."""
        self._waits: list[Wait] = []
        self._missing = {(token.by.engine, token.step) for token in history.tokens}

    @property
    def companions(self) -> list[str]:
        """The uids of all others that were computed together with it, in the order of their coming."""
        return list(dict.fromkeys(uid for uids in self._companions for uid in uids))

    def take(self, engine: str, step: JournalStep) -> None:
        """Take the next step of *engine*."""
        between = self._between.setdefault(engine, [])
        between.append(replace(step, rows=(), schedule="", inputs=()))
        chunks = {chunk.uid: chunk.count for chunk in step.chunks}
        row = next((row for row in step.rows if row.uid == self._uid), None)
        if row is None and self._uid not in chunks and all(event.uid != self._uid for event in step.events):
            return
        self._tell(engine, step, row.n if row is not None else 0, chunks.get(self._uid, 0))
        others = dict.fromkeys([*(each.uid for each in step.rows), *chunks])
        self._companions.append(tuple(uid for uid in others if uid != self._uid))
        if row is not None:
            self._missing.discard((engine, step.id))
            since_ms = self._late.get(row.n)
            if since_ms is not None:
                those = [each for each in between if each.made_ms > since_ms or each.id == step.id]
                self._waits.append(why_waited(those, self._uid, row.n, since_ms, self._estimated.get(row.n)))
            between.clear()

    def plain(self, name: Callable[[str], str | int]) -> dict[str, Any]:
        """Return what is known as plain data. *name* says how another request is called: by its uid, or a number."""
        steps: list[dict[str, Any]] = []
        before: tuple[str, ...] | None = None
        both = sorted(zip(self._steps, self._companions, strict=True), key=lambda each: each[0]["ms"])
        for step, uids in both:
            steps.append(step if uids == before else step | {"companions": [name(uid) for uid in uids]})
            before = uids
        longest = sorted(self._waits, key=lambda wait: -wait.waited_ms)[:MOST_WAITS]
        waits = [
            {"n": wait.n, "waited_ms": wait.waited_ms, "why": wait.reasons}
            for wait in sorted(longest, key=lambda wait: wait.n)
        ]
        return {"uid": self._uid, "complete": not self._missing, "steps": steps, "waits": waits}

    def _tell(self, engine: str, step: JournalStep, n: int, prompt_tokens: int) -> None:
        figures = step.figures
        told: dict[str, Any] = {
            "id": step.id,
            "engine": engine,
            "ms": step.ms,
            "made_ms": step.made_ms,
            "forward_ms": figures.forward_ms,
            "rows": figures.decode_rows + figures.prefill_rows,
            "tokens": figures.decode_rows + figures.prefill_tokens,
            "waiting": figures.waiting,
            "pages_free": figures.free_pages,
        }
        told |= {"n": n} if n else {}
        told |= {"prompt_tokens": prompt_tokens} if prompt_tokens else {}
        self._steps.append(told)


def late_tokens(history: History) -> dict[int, int]:
    """Return the numbers of the tokens that the engine made late, and since when. The first token always is."""
    if history.submitted is None or not history.tokens:
        return {}
    made = [(token.n, token.made.ms) for token in history.tokens]
    pauses = [(n, since_ms, now_ms - since_ms) for (_, since_ms), (n, now_ms) in pairwise(made)]
    usual_ms = median_low(pause_ms for _, _, pause_ms in pauses) if pauses else 0
    least_ms = max(LATE * usual_ms, SOON_MS)
    late = {n: since_ms for n, since_ms, pause_ms in pauses if pause_ms > least_ms}
    return {1: history.submitted.ms} | late


def spans_of(history: History) -> Mapping[str, tuple[str, str]]:
    """Return engine -> the ids of the first and of the last step that it made for the request; a running one goes on,
    to `+`.
    """
    ids: dict[str, list[str]] = {}
    engine = ""
    for moment in history.walk():
        match moment.event:
            case Admitted() | Preempted() as event:
                engine = event.engine
                ids.setdefault(engine, []).append(f"{event.epoch}-{event.step}")
            case TakenOver() as event:
                engine = event.engine
    for token in history.tokens:
        if token.by.engine:
            ids.setdefault(token.by.engine, []).append(token.step)
    spans = {slot: (min(steps, key=parse_id), max(steps, key=parse_id)) for slot, steps in ids.items()}
    if engine in spans and history.end is None:
        spans[engine] = spans[engine][0], "+"
    return spans
