"""Why a token took long: what an engine did between two tokens of a request, from its journal. A pure fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.events import Preempted, TakenOver
from pipeline.log.journal import JournalStep

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
