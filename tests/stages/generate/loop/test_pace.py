"""Budgets from measured times: a simulated engine whose costs are known, under the real schedule."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from support.schedules import make_schedule, num_samples, planned, request

from stages.generate.loop.pace import (
    ALONE_S,
    FEWEST_ALONE,
    FEWEST_MIXED,
    FEWEST_OF_SEVERAL,
    FEWEST_PLAIN,
    FEWEST_TOKENS,
    FIRST_SHARE,
    MANY,
    MOST_MIXED,
    STREAMS_PER_TOKEN,
    Budget,
    Pace,
)
from stages.generate.schedule.plan import BatchPlan, PlanRow, Work
from stages.generate.schedule.schedule import Schedule
from stages.generate.setup.config import Targets

LONG = 2000
VERY_LONG = 6000
MOST_PREFILL = 2048
STEP_MS, MANY_MS, ALONE_MS = 90, 120, 300
"""The default targets."""


@dataclass(frozen=True)
class Costs:
    """How long an engine takes, in ms."""

    weights: float
    """To read them all, in which some rows are free."""
    row: float
    attended: float
    """For each row and each position that it attends to."""

    def __call__(self, plan: BatchPlan) -> float:
        lengths = [len(row.token_ids) for row in plan.rows]
        attended = sum(length * (row.start + length / 2) for row, length in zip(plan.rows, lengths, strict=True))
        return 0.5 + max(self.weights, self.row * sum(lengths)) + self.attended * attended


MACHINES = {
    "avx512": Costs(5.5, 0.57, 0.0001),
    "avx2": Costs(8.0, 1.6, 0.0003),
    "a large model": Costs(40.0, 4.0, 0.0004),
    "bound by memory": Costs(10.0, 0.2, 0.00003),
    "slow attention": Costs(8.0, 1.0, 0.00125),
}
VERY_LARGE_MODEL = Costs(100.0, 8.0, 0.0004)


@dataclass(frozen=True)
class Step:
    """One step of the simulation."""

    plan: BatchPlan
    budget: Budget | None
    ms: float
    """Its time, without noise."""
    plain_ms: float
    """The same without prompts."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.plan.rows[self.plan.num_decode_rows :])


def plain(plan: BatchPlan) -> BatchPlan:
    return BatchPlan(plan.step, plan.rows[: plan.num_decode_rows], plan.num_decode_rows)


class Engine:
    """A schedule, a pace and a simulated clock."""

    def __init__(self, costs: Costs, *, pace: Pace | None = None, streams: int = 8) -> None:
        self.costs = costs
        self.pace = pace or Pace()
        self.schedule: Schedule = make_schedule(
            num_pages=4000, page_size=64, context=8192, prefill=MOST_PREFILL, running=64, vocab_size=10**9
        )
        self.num_sent = 0
        self.held_up: Callable[[], float] = lambda: 1.0
        """By how much the next step takes longer than it should."""
        for _ in range(streams):
            self.send(40)
        while self.schedule.work.streams < streams:
            self.step()
        self.steps(20 if streams else 0)

    def send(self, length: int, max_tokens: int = 8000) -> str:
        uid = str(self.num_sent)
        failed = self.schedule.add(request(uid, length, first=10_000 * self.num_sent, max_tokens=max_tokens))
        assert failed is None
        self.num_sent += 1
        return uid

    def step(self) -> Step:
        budget = self.pace.budget(self.schedule.work)
        plan, _ = planned(self.schedule, None if budget is None else budget.tokens)
        ms = self.costs(plan)
        self.pace.measured(plan, ms * self.held_up() / 1000, budget)
        self.schedule.complete([7] * num_samples(plan))
        return Step(plan, budget, ms, self.costs(plain(plan)))

    def steps(self, number: int) -> list[Step]:
        return [self.step() for _ in range(number)]

    def prompt(self, length: int = LONG) -> list[Step]:
        """Send a prompt; return the steps until it is computed. It makes one token."""
        self.send(length, max_tokens=1)
        return list(self._until_no_prompts())

    def _until_no_prompts(self) -> Iterator[Step]:
        while self.schedule.work.prompts:
            yield self.step()


def mixed_ms(steps: Sequence[Step]) -> list[float]:
    """Return the times of the steps that had prompts, but for the last: the rest of a prompt is no full step."""
    return [step.ms for step in steps if step.prompt_tokens][:-1]


def row(start: int, length: int = 1) -> PlanRow:
    return PlanRow(0, start, (0,) * length, (), 0, None)


def a_plan(streams: int, context: int, *chunks: tuple[int, int]) -> BatchPlan:
    decodes = [row(context - 1)] * streams
    return BatchPlan(1, (*decodes, *(row(start, length) for start, length in chunks if length)), streams)


PLAIN_S = 0.010
ENDLESS = (0, 10**6)
"""A prompt that takes every budget."""


def work(*prompts: tuple[int, int], streams: int = 8, context: int = 100) -> Work:
    return Work(streams, streams * context, prompts or [ENDLESS])


def budget(pace: Pace, work: Work) -> Budget:
    made = pace.budget(work)
    assert made is not None
    return made


def learned(streams: int = 8) -> Pace:
    """Return a pace that has seen many steps without prompts."""
    pace = Pace()
    for _ in range(20):
        pace.measured(a_plan(streams, 100), PLAIN_S, None)
    return pace


def learn(pace: Pace, position: int, token_s: float, *, streams: int = 8) -> None:
    """Let a pace see steps in which each prompt token at *position* took *token_s*."""
    for _ in range(40):
        made = budget(pace, work((position, 10**6), streams=streams))
        plan = a_plan(streams, 100, (position, made.tokens))
        pace.measured(plan, (PLAIN_S if streams else 0) + made.tokens * token_s, made)


# how long steps take


@pytest.mark.parametrize(("machine", "streams"), [*((name, 8) for name in MACHINES), ("avx2", 1), ("avx512", 32)])
def test_steps_beside_streams_take_about_ninety_milliseconds_on_every_machine(machine: str, streams: int) -> None:
    engine = Engine(MACHINES[machine], streams=streams)
    for _ in range(2):
        times = mixed_ms(engine.prompt(VERY_LONG))
        assert statistics.median(times) == pytest.approx(STEP_MS, rel=0.1)
        assert max(times) < 1.2 * STEP_MS
        engine.steps(30)


def test_where_a_step_without_prompts_is_long_one_with_prompts_takes_half_as_long_again() -> None:
    engine = Engine(VERY_LARGE_MODEL)
    steps = [step for step in engine.prompt() if step.prompt_tokens][:-1]
    ratios = [step.ms / step.plain_ms for step in steps]
    assert statistics.median(ratios) == pytest.approx(1.5, rel=0.1) and max(ratios) < 1.8


@pytest.mark.parametrize("machine", ["avx512", "avx2", "bound by memory"])
def test_without_streams_steps_take_about_three_hundred_milliseconds(machine: str) -> None:
    engine = Engine(MACHINES[machine], streams=0)
    engine.prompt(VERY_LONG)
    assert statistics.median(mixed_ms(engine.prompt(VERY_LONG))) == pytest.approx(ALONE_MS, rel=0.2)


@pytest.mark.parametrize("target_ms", [20, 50, 200])
def test_a_target_that_is_given_is_held_however_many_prompts_wait(target_ms: int) -> None:
    engine = Engine(MACHINES["avx512"], pace=Pace(Targets.exactly(target_ms / 1000)))
    for _ in range(MANY):
        engine.send(LONG)
    steps = engine.steps(60)
    assert {step.budget.target_s for step in steps if step.budget} == {target_ms / 1000}
    assert statistics.median(mixed_ms(steps)) == pytest.approx(target_ms, rel=0.1)


@pytest.mark.parametrize("machine", ["avx512", "avx2"])
def test_noise_of_ten_per_cent_and_steps_that_are_held_up_change_little(machine: str) -> None:
    engine, noise = Engine(MACHINES[machine]), random.Random(0)
    engine.held_up = lambda: math.exp(noise.gauss(0, 0.1)) * (noise.choice((2, 5, 500)) if noise.random() < 0.01 else 1)
    times: list[float] = []
    for _ in range(3):
        times += mixed_ms(engine.prompt(VERY_LONG))
        engine.steps(30)
    assert statistics.median(times) == pytest.approx(STEP_MS, rel=0.15)
    assert max(times) < 1.6 * STEP_MS


def test_short_prompts_that_cost_nothing_do_not_teach_that_a_long_one_would_not() -> None:
    engine = Engine(MACHINES["bound by memory"], streams=1)
    for _ in range(100):
        engine.prompt(5)
    assert max(step.ms for step in engine.prompt()) < 1.2 * STEP_MS


# which target a step has


def test_eight_prompts_get_more_time_than_seven() -> None:
    pace = learned()
    learn(pace, 0, 0.0004)
    few, many = (budget(pace, work(*[ENDLESS] * number)) for number in (MANY - 1, MANY))
    assert (few.target_s, many.target_s) == (STEP_MS / 1000, MANY_MS / 1000)
    assert (few.tokens, many.tokens) == pytest.approx((200, 275), abs=2)


@pytest.mark.parametrize(
    ("lengths", "target_ms"),
    [
        ([10_000], ALONE_MS),
        ([50], ALONE_MS),
        ([50, 10_000], STEP_MS),
        ([50] * MANY, MANY_MS),
        ([1000, 10_000], ALONE_MS),
    ],
)
def test_without_streams_a_short_prompt_of_several_gets_a_short_step(lengths: list[int], target_ms: int) -> None:
    pace = Pace()
    learn(pace, 0, 0.001, streams=0)
    made = budget(pace, work(*((0, length) for length in lengths), streams=0))
    assert made.target_s == target_ms / 1000
    assert min(made.tokens, sum(lengths)) == pytest.approx(min(target_ms, sum(lengths)), abs=2)


def test_without_prompts_there_is_nothing_to_decide() -> None:
    assert learned().budget(Work(8, 800, [])) is None and Pace().budget(Work(0, 0, [])) is None


# what is learned


def test_before_any_time_is_known_a_step_alone_is_small_and_its_time_is_believed() -> None:
    pace, alone = Pace(), work(streams=0)
    assert budget(pace, work(ENDLESS, ENDLESS, streams=0)) == Budget(FEWEST_OF_SEVERAL, ALONE_S)
    first = budget(pace, alone)
    assert first == Budget(FEWEST_ALONE, ALONE_S)
    pace.measured(a_plan(0, 1, (0, first.tokens)), 0.001 * first.tokens, first)
    assert budget(pace, alone).tokens == pytest.approx(ALONE_MS, abs=1)


def test_before_any_time_of_a_prompt_is_known_it_follows_from_the_steps_without_prompts() -> None:
    assert budget(learned(), work()).tokens == int(0.080 / (FIRST_SHARE * PLAIN_S))


def test_a_few_tokens_alone_do_not_teach_that_many_would_be_slow() -> None:
    pace, alone = Pace(), work(streams=0)
    learn(pace, 0, 0.001, streams=0)
    before = budget(pace, alone)
    pace.measured(a_plan(0, 1, (0, 5)), 0.100, before)
    assert budget(pace, alone) == before


def test_tokens_at_high_positions_are_learned_apart_from_those_at_low_ones() -> None:
    pace = learned()
    learn(pace, 100, 0.0004)
    learn(pace, 5000, 0.002)

    def tokens(*prompts: tuple[int, int]) -> int:
        return budget(pace, work(*prompts)).tokens

    assert tokens((100, 9000)) == tokens((200, 9000)) == pytest.approx(200, abs=2)
    assert tokens((5000, 9000)) == tokens((6000, 9000)) == pytest.approx(40, abs=1)
    assert tokens((100_000, 9000)) == tokens((5000, 9000)), "of those that are known, the most similar ones"
    assert tokens((0, 100), (5000, 9000)) == pytest.approx(100 + 20, abs=1), "one step has both"


@pytest.mark.parametrize("held_up", [1, 6])
def test_steps_without_prompts_that_were_held_up_teach_nothing_unless_nearly_all_were(held_up: int) -> None:
    pace = learned()
    learn(pace, 0, 0.0004)
    before = budget(pace, work())
    for _ in range(held_up):
        pace.measured(a_plan(8, 100), 5.0, None)
    assert budget(pace, work()) == before


def test_after_streams_changed_a_few_steps_without_prompts_are_enough() -> None:
    pace = learned()
    learn(pace, 0, 0.0004)
    assert budget(pace, work()).tokens == pytest.approx(200, abs=2)
    for _ in range(FEWEST_PLAIN):
        pace.measured(a_plan(16, 100), 0.030, None)
    assert budget(pace, work(streams=16)).tokens == pytest.approx(150, abs=2)


def test_tokens_that_seem_to_cost_nothing_are_tried_in_larger_numbers_step_by_step() -> None:
    pace, tried = learned(), []
    for _ in range(10):
        made = budget(pace, work())
        tried.append(made.tokens)
        pace.measured(a_plan(8, 100, (0, made.tokens)), PLAIN_S, made)
    assert all(before < after < 1.5 * before for before, after in pairwise(tried))


def test_a_step_with_prompts_that_was_held_up_costs_a_third_of_the_budget_for_a_moment() -> None:
    pace = learned()
    learn(pace, 0, 0.0004)
    before = budget(pace, work())
    pace.measured(a_plan(8, 100, (0, before.tokens)), 45.0, before)
    assert budget(pace, work()).tokens == pytest.approx(before.tokens / math.sqrt(2), abs=2)
    learn(pace, 0, 0.0004)
    assert budget(pace, work()).tokens == pytest.approx(before.tokens, abs=2)


@pytest.mark.parametrize("of_its_own", [False, True], ids=["without a budget", "beyond its budget"])
def test_a_step_in_which_the_schedule_took_more_teaches_nothing(of_its_own: bool) -> None:
    pace = learned()
    before = budget(pace, work())
    pace.measured(a_plan(8, 100, (0, MOST_PREFILL)), 0.011, before if of_its_own else None)
    assert budget(pace, work()) == before


# what streams and prompts get in any case


def test_prompts_progress_however_long_their_tokens_take() -> None:
    for streams in (1, 8, 64):
        pace, tokens = learned(streams), []
        for _ in range(200):
            made = budget(pace, work(streams=streams))
            tokens.append(made.tokens)
            pace.measured(a_plan(streams, 100, (0, made.tokens)), PLAIN_S + 1.0 * made.tokens, made)
        fewest = max(FEWEST_TOKENS, streams // STREAMS_PER_TOKEN)
        assert tokens[-1] == fewest and set(tokens[50:]) == {0, fewest}
        assert tokens.count(0) == 200 // (MOST_MIXED + 1)


def test_without_a_break_in_the_prompts_a_step_has_none_now_and_then_and_sooner_where_streams_changed() -> None:
    pace = Pace()

    def next_steps(streams: int, number: int) -> str:
        """Return which steps have prompts."""
        made = ""
        for _ in range(number):
            each = budget(pace, work(streams=streams))
            made += "p" if each.tokens else "-"
            pace.measured(a_plan(streams, 100, (0, each.tokens)), PLAIN_S, each)
        return made

    start = "-" * FEWEST_PLAIN + "p" * MOST_MIXED
    assert next_steps(8, len(start) + 1) == start + "-"
    changed = ("p" * FEWEST_MIXED + "-") * FEWEST_PLAIN + "p" * MOST_MIXED
    assert next_steps(16, len(changed)) == changed
