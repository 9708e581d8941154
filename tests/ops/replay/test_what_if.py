"""What would have happened with other limits: the times of steps are fitted, and the requests live again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.journalled import Life, live

from ops.replay.schedule import fitted, lived_again, measured, parts_of
from pipeline.log.journal import JournalStep, steps
from stages.generate.schedule.plan import BatchPlan, PlanRow

PER_PART = (2.0, 0.25, 0.001, 0.05, 0.0)


@pytest.fixture(scope="module")
def life() -> Life:
    return live("radix", 300, 100)


@pytest.fixture
def journal(life: Life) -> list[JournalStep]:
    return list(steps(life.journal()))


def lived(journal: Sequence[JournalStep], life: Life, **limits: int) -> tuple[int, int, float]:
    time_of = fitted([(1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 0, 1, 0)], [2, 3, 4], [1])
    outcome = lived_again(journal, life.request_of, life.made, time_of, **limits)
    return outcome.tokens, outcome.steps, max(outcome.step_ms)


def test_the_time_of_steps_is_found_again() -> None:
    chance = random.Random(0)
    parts = [(1, chance.randrange(64), chance.randrange(9000), chance.randrange(99), 0) for _ in range(200)]
    times = [sum(a * b for a, b in zip(PER_PART, each, strict=True)) for each in parts]
    time_of = fitted(parts, times, [0.5, 0.7, 99.0])
    assert time_of.per_part == pytest.approx(PER_PART, abs=1e-6)
    assert time_of.error < 1e-6
    assert 0.5 <= time_of.between_ms < 0.7 or time_of.between_ms == pytest.approx(33.4)


def test_no_part_of_a_step_makes_it_shorter() -> None:
    time_of = fitted([(1, 1, 0, 0, 0), (1, 2, 0, 0, 0), (1, 3, 0, 9, 0)], [5, 4, 2], [])
    assert min(time_of.per_part) == 0 and time_of.between_ms == 0


def test_parts_of_a_step_are_counted_from_its_plan() -> None:
    rows = (PlanRow(0, 7, (1,), (), 0, None), PlanRow(1, 4, (1, 2), (), 0, None))
    assert parts_of(BatchPlan(1, rows, 1)) == (1, 1, 7, 2, 10)


def test_requests_that_live_again_get_the_same_tokens(life: Life, journal: list[JournalStep]) -> None:
    tokens, _, _ = lived(journal, life)
    new = sum(len(life.made[uid]) - len(life.came[uid].output_ids) for uid in life.came)
    assert tokens >= new == measured(journal).tokens


def test_a_smaller_limit_makes_more_and_shorter_steps(life: Life, journal: list[JournalStep]) -> None:
    small, large = (lived(journal, life, max_prefill_length=limit, mixed_prefill_length=2) for limit in (4, 64))
    assert small[0] == large[0]
    assert small[1] > large[1]
    assert small[2] < large[2]


def test_times_of_a_journal_are_measured(life: Life, journal: list[JournalStep]) -> None:
    outcome = measured(journal)
    assert len(outcome.first_token_ms) + len(outcome.pause_ms) <= outcome.tokens
    assert outcome.total_ms > 0
    assert {"first_token_p50_ms", "pause_p99_ms"} < outcome.told().keys()


def test_a_request_without_a_known_token_gets_one_and_leaves(life: Life, journal: list[JournalStep]) -> None:
    time_of = fitted([(1, 0, 0, 0, 0)], [2], [1])
    outcome = lived_again(journal[:1], life.request_of, {"r0": []}, time_of)
    assert (outcome.tokens, outcome.steps) == (1, 1)
