"""A schedule without an engine or a log, and its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.events import EventRow, SamplingParams, StepRow, TokenRow
from stages.generate.kvcache import make_cache
from stages.generate.loop.flights import Launches
from stages.generate.schedule.plan import BatchPlan, Computed
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

TOKEN = 7
"""What every sample gives, unless a test says otherwise."""
Step = tuple[BatchPlan, list[StepRow], list[TokenRow]]
"""A plan, its marks, and the tokens that follow."""


def make_schedule(
    cache: str = "naive",
    *,
    num_pages: int = 100,
    page_size: int = 4,
    context: int = 100,
    prefill: int = 32,
    mixed: int = 8,
    running: int = 16,
    vocab_size: int = 1000,
    eos_ids: Sequence[int] = (),
) -> Schedule:
    limits = ScheduleLimits(context, prefill, mixed, max_running_requests=running, vocab_size=vocab_size)
    return Schedule(make_cache(cache, num_pages, page_size), limits, eos_ids, Identity("generate-0", 1, "f"))


def request(
    uid: str,
    length: int = 5,
    output: Sequence[int] = (),
    *,
    first: int = 0,
    priority: int = 0,
    bad_words: Sequence[tuple[int, ...]] = (),
    owner: str = "",
    weight: int = 1,
    **sampling: Any,
) -> NewRequest:
    """Return a request whose prompt counts up from *first*."""
    prompt, params = tuple(range(first, first + length)), SamplingParams.model_validate(sampling)
    return NewRequest(*(uid, prompt, tuple(output), params, priority, tuple(bad_words)), owner=owner, weight=weight)


def step(schedule: Schedule, token: int = TOKEN, *, mixed_prefill_length: int | None = None) -> Step:
    """Plan and complete one step in which every sample gives *token*."""
    (made,) = steps(schedule, lambda plan: Computed([token] * num_samples(plan)), 1, mixed_prefill_length)
    return made


def steps(
    schedule: Schedule,
    forward: Callable[[BatchPlan], Computed] | None = None,
    most: int = 0,
    mixed_prefill_length: int | None = None,
) -> Iterator[Step]:
    """Give all steps until nothing is left to do, or at *most* so many."""
    number = 0
    while (not most or number < most) and (planned := schedule.plan(mixed_prefill_length)) is not None:
        plan, marks = planned
        computed = forward(plan) if forward is not None else Computed([TOKEN] * num_samples(plan))
        yield plan, marks, schedule.complete(computed.token_ids, computed.scores)
        assert schedule.problems() == []
        number += 1
        assert number < 10_000, "it does not end"


def steps_ahead(schedule: Schedule, engine: Launches) -> Iterator[Step]:
    """Give all steps until nothing is left to do, each launched before the one before has landed."""
    flights: deque[tuple[BatchPlan, list[StepRow], Any]] = deque()
    while True:
        planned = schedule.plan()
        if planned is not None:
            flights.append((*planned, engine.launch(planned[0], flights[-1][2] if flights else None)))
        elif not flights:
            return
        if planned is None or len(flights) == 2:
            plan, marks, launched = flights.popleft()
            computed = engine.wait(launched)
            yield plan, marks, schedule.complete(computed.token_ids, computed.scores)
            assert schedule.problems() == []


def planned(schedule: Schedule, mixed_prefill_length: int | None = None) -> tuple[BatchPlan, Sequence[StepRow]]:
    """Return the next plan and its marks."""
    made = schedule.plan(mixed_prefill_length)
    assert made is not None
    return made


def num_samples(plan: BatchPlan) -> int:
    return sum(row.sample is not None for row in plan.rows)


def marked(marks: Sequence[StepRow], kind: str) -> list[str]:
    """Return the uids of the marks of one kind."""
    return [mark.uid for mark in marks if isinstance(mark, EventRow) and mark.event.kind == kind]
