"""What a row costs is learned from the times of steps."""

from __future__ import annotations

import random

import pytest

from stages.generate.loop.row_cost import FIRST_SHARE, RowCost
from stages.generate.schedule.plan import BatchPlan, PlanRow


def step(rows: int, chunks: int = 0) -> BatchPlan:
    return BatchPlan(1, tuple(PlanRow(at, 0, (1,), (), 0, None) for at in range(rows + chunks)), rows)


def test_before_any_step_the_cost_is_a_guess() -> None:
    assert RowCost().thousandths(1) == 1000 * FIRST_SHARE


@pytest.mark.parametrize("row_s", [0.0002, 0.001, 0.004])
def test_the_cost_of_a_row_is_learned_from_steps_of_different_lengths(row_s: float) -> None:
    cost, chance = RowCost(), random.Random(1)
    for _ in range(200):
        rows = chance.choice([1, 1, 5, 9])
        late = 5.0 if chance.random() < 0.05 else chance.uniform(1, 1.2)
        cost.measured(step(rows), (0.01 + row_s * (rows - 1)) * late)
        cost.measured(step(rows, chunks=1), 1.0)  # a prompt takes its own time
    assert cost.thousandths(1) == pytest.approx(1000 * row_s / 0.01, rel=0.5)
    assert cost.thousandths(6) < cost.thousandths(1)


def test_steps_of_one_length_teach_nothing_of_a_row() -> None:
    cost = RowCost()
    for _ in range(100):
        cost.measured(step(1), 0.02)
    assert cost.thousandths(1) == 1000 * FIRST_SHARE


def test_a_machine_that_became_slower_is_noticed() -> None:
    cost = RowCost()
    for row_s in (0.0001, 0.002):
        for number in range(150):
            rows = 1 + 8 * (number % 2)
            cost.measured(step(rows), 0.01 + row_s * (rows - 1))
    assert cost.thousandths(1) == pytest.approx(200, rel=0.3)
