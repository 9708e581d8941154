"""What would have happened with other limits: an engine's journalled steps, lived again by a clock that is an estimate.

The same requests come at the same times, and get the same tokens. How long a step takes follows from its rows, by a
fit to the times of the journalled steps. Trials of suspects are left out: all run together.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from pipeline.events import Preempted
from pipeline.log.journal import JournalStep
from stages.generate.loop.pace import Pace
from stages.generate.schedule.plan import BatchPlan
from stages.generate.schedule.recorded import RecordedSchedule, snapshot_uids
from stages.generate.schedule.request import NewRequest

FEWEST_FITTED: Final = 20
"""A fit to fewer steps says nothing."""
UNKNOWN: Final = 0
"""The token of a request of which no token is known."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes, in milliseconds: a sum with a summand for each number of `parts`."""

    per_part: tuple[float, ...]
    between_ms: float
    """From one step to the next, besides the forward pass."""
    error: float
    """Half of the fitted steps took less than this share longer or shorter."""

    def forward_ms(self, parts: Sequence[float]) -> float:
        return float(np.dot(self.per_part, parts))


def parts_of(plan: BatchPlan) -> tuple[float, ...]:
    """Return what the time of a step depends on: a step, its streams, their context, its prompt tokens, and how many
    earlier positions those attend to.
    """
    decodes, prefills = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
    return (
        1.0,
        float(len(decodes)),
        float(sum(row.start for row in decodes)),
        float(sum(len(row.token_ids) for row in prefills)),
        float(sum(len(row.token_ids) * (row.start + len(row.token_ids) / 2) for row in prefills)),
    )


def fitted(parts: Sequence[Sequence[float]], forward_ms: Sequence[float], between_ms: Sequence[float]) -> StepTime:
    """Fit the times of steps. No part makes a step shorter: where the best fit says so, it is left out."""
    rows, times = np.array(parts), np.array(forward_ms)
    weights = 1 / np.maximum(times, 1e-3)  # a short step counts as much as a long one
    used = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, used] * weights[:, None], times * weights, rcond=None)
        if len(used) == 1 or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    per_part = np.zeros(rows.shape[1])
    per_part[used] = found
    errors = np.abs(rows @ per_part - times) * weights
    usual = sorted(between_ms)[: -(-9 * len(between_ms) // 10)]  # the others were held up
    return StepTime(tuple(per_part.tolist()), statistics.fmean(usual or [0.0]), float(np.median(errors)))


@dataclass(slots=True)
class Outcome:
    """What became of the requests of some steps, in milliseconds."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    total_ms: float = 0
    step_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    """From the arrival at the engine to the first token, of the requests that came."""
    pause_ms: list[float] = field(default_factory=list)
    """From each token to the next of the same request."""

    def told(self) -> dict[str, float]:
        """Return it in numbers."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "preemptions": self.preemptions,
            "seconds": round(self.total_ms / 1000, 1),
            "longest_step_ms": round(max(self.step_ms), 1),
            "first_token_p50_ms": _quantile(self.first_token_ms, 0.5),
            "first_token_p99_ms": _quantile(self.first_token_ms, 0.99),
            "pause_p50_ms": _quantile(self.pause_ms, 0.5),
            "pause_p99_ms": _quantile(self.pause_ms, 0.99),
            "longest_pause_ms": _quantile(self.pause_ms, 1),
        }


@dataclass(slots=True)
class Times:
    """When the tokens of requests come."""

    outcome: Outcome = field(default_factory=Outcome)
    _last: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """uid -> moment of its last token, or of its arrival, and whether it was a token."""

    def came(self, uid: str, now_ms: float) -> None:
        self._last[uid] = now_ms, False

    def made(self, uid: str, now_ms: float) -> None:
        self.outcome.tokens += 1
        if uid in self._last:
            before_ms, was_token = self._last[uid]
            (self.outcome.pause_ms if was_token else self.outcome.first_token_ms).append(now_ms - before_ms)
        self._last[uid] = now_ms, True

    def stepped(self, forward_ms: float, preemptions: int) -> None:
        self.outcome.steps += 1
        self.outcome.step_ms.append(forward_ms)
        self.outcome.preemptions += preemptions


def measured(steps: Sequence[JournalStep]) -> Outcome:
    """Return what the journal itself says."""
    times = Times()
    for step in steps:
        began_ms = step.made_ms - step.figures.forward_ms
        for word in step.inputs:
            if word.startswith("add "):
                times.came(word.rpartition(" ")[2], began_ms)
        for row in step.rows:
            times.made(row.uid, step.made_ms)
        if step.figures.forward_ms:
            times.stepped(step.figures.forward_ms, sum(isinstance(row.event, Preempted) for row in step.events))
    times.outcome.total_ms = steps[-1].made_ms - (steps[0].made_ms - steps[0].figures.forward_ms)
    return times.outcome


def lived_again(
    steps: Sequence[JournalStep],
    request_of: Callable[[str, int], NewRequest],
    tokens: Mapping[str, Sequence[int]],
    time_of: StepTime,
    **other_limits: int,
) -> Outcome:
    """Return what becomes of the requests of *steps*, the first of which has a snapshot, under *other_limits*.

    *tokens*: uid -> all tokens that are known of its output. A request leaves with the last of them; if it got none, it
    leaves when it left.
    """
    first = steps[0]
    schedule = RecordedSchedule.restored(first.schedule, first.number, request_of, **other_limits)
    schedule.isolate(None)
    paced = any(step.figures.mixed_prefill_length is not None for step in steps)
    pace = Pace() if paced and "mixed_prefill_length" not in other_limits else None
    times, waiting, known = Times(), deque(_given(steps)), set(snapshot_uids(first.schedule))
    begin_ms = now_ms = first.ms - first.figures.forward_ms
    while True:
        while waiting and waiting[0][0] <= now_ms:
            at_ms, word = waiting.popleft()
            match word.split():
                case ["add", n, _, uid] if uid not in known:  # else its engine died, which does not happen here
                    known.add(uid)
                    schedule.add(request_of(uid, int(n)))
                    times.came(uid, at_ms)
                case ["drop", uid] if (schedule.num_output(uid) or 0) >= len(tokens.get(uid, ())):
                    schedule.drop(uid)
                case ["flush"]:
                    schedule.flush()
        planned = schedule.plan(None if pace is None else pace.budget(schedule.work))
        if planned is None:
            if not waiting:
                break
            now_ms = waiting[0][0]
            continue
        plan, marks = planned
        forward_ms = time_of.forward_ms(parts_of(plan))
        if pace is not None:
            pace.measured(plan, forward_ms / 1000)
        now_ms += forward_ms + time_of.between_ms
        times.stepped(forward_ms, sum(mark.kind == "event" and isinstance(mark.event, Preempted) for mark in marks))
        following = [tokens[uid][schedule.num_output(uid) or 0 :] for uid, _ in schedule.sampled]
        for row in schedule.complete([more[0] if more else UNKNOWN for more in following]):
            times.made(row.uid, now_ms)
            if row.end is None and row.n >= len(tokens[row.uid]):
                schedule.drop(row.uid)
    times.outcome.total_ms = now_ms - begin_ms
    return times.outcome


def between_ms(steps: Sequence[JournalStep]) -> list[float]:
    """Return the times between steps, besides the forward passes, while there was something to compute."""
    return [
        max(0.0, step.made_ms - step.figures.forward_ms - before.made_ms)
        for before, step in pairwise(steps)
        if before.figures.running or before.figures.waiting
    ]


def _quantile(values: Sequence[float], share: float) -> float:
    return round(float(np.quantile(values, share)), 1) if values else 0.0


def _given(steps: Sequence[JournalStep]) -> list[tuple[float, str]]:
    """Return what the schedule was told, each with its moment."""
    return [(step.made_ms - step.figures.forward_ms, word) for step in steps for word in step.inputs]
