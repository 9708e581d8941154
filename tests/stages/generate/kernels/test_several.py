"""Several steps in one call: the tokens and the pages of as many single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint, make_engine
from support.kernel_variants import VARIANTS

from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")

PAGE_SIZE = 16
PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8)]
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3),
]
MOST = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(params=VARIANTS, scope="module")
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    return make_engine(folder, kernels=request.param, page_size=PAGE_SIZE, num_pages=8, max_running_requests=4)


def row(table: int, start: int, token_ids: Sequence[int], *, first: bool = False) -> PlanRow:
    sample = Sample(SAMPLING[table], start + len(token_ids), ())
    return PlanRow(
        table, start, tuple(token_ids), (2 * table, 2 * table + 1) if first else (), 0 if first else 2, sample
    )


def begun(engine: Engine, tables: Sequence[int]) -> BatchPlan:
    """Compute the prompts; return the first step after them."""
    rows = tuple(row(table, 0, PROMPTS[table], first=True) for table in tables)
    token_ids = engine.forward(BatchPlan(1, rows, 0)).token_ids
    after = tuple(row(table, len(PROMPTS[table]), [token]) for table, token in zip(tables, token_ids, strict=True))
    return BatchPlan(2, after, len(after))


def following(plan: BatchPlan, token_ids: Sequence[int]) -> BatchPlan:
    rows = tuple(row(one.table, one.start + 1, [token]) for one, token in zip(plan.rows, token_ids, strict=True))
    return replace(plan, rows=rows)


def single_steps(engine: Engine, tables: Sequence[int]) -> list[Sequence[int]]:
    plan, made = begun(engine, tables), []
    for _ in range(MOST):
        made.append(engine.forward(plan).token_ids)
        plan = following(plan, made[-1])
    return made


def pages_of(engine: Engine) -> torch.Tensor:
    """Return the keys and values of the tokens that were computed."""
    lengths = [len(prompt) + MOST for prompt in PROMPTS]
    return torch.cat([engine.kv_L2PKSD[:, :, 2 * at, :, :length].flatten() for at, length in enumerate(lengths)])


@pytest.mark.parametrize("tables", [(0,), (1,), (2,), (0, 1, 2)])
def test_steps_in_one_call_are_single_steps_bit_for_bit(engine: Engine, tables: Sequence[int]) -> None:
    engine.kv_L2PKSD.zero_()
    expected, pages = single_steps(engine, tables), pages_of(engine)
    engine.kv_L2PKSD.zero_()
    assert engine.computes_several
    made = engine.several(begun(engine, tables), MOST, [()] * len(tables))
    assert [one.token_ids for one in made] == expected
    assert torch.equal(pages_of(engine), pages)


@pytest.mark.parametrize("at", range(MOST))
def test_no_step_follows_one_in_which_a_row_ends(engine: Engine, at: int) -> None:
    expected = single_steps(engine, (0, 1, 2))
    for ending in range(3):
        end = expected[at][ending]
        first = next(step for step in range(MOST) if expected[step][ending] == end)
        ends = [(12345, end) if table == ending else () for table in range(3)]
        made = engine.several(begun(engine, (0, 1, 2)), MOST, ends)
        assert [one.token_ids for one in made] == expected[: first + 1]


def test_a_row_without_a_token_ends_the_call(engine: Engine) -> None:
    plan = begun(engine, (0, 1, 2))
    page = engine.kv_L2PKSD[:, :, 2]
    kept = page.clone()
    page.fill_(float("nan"))  # table 1
    made = engine.several(plan, MOST, [()] * 3)
    page.copy_(kept)
    assert len(made) == 1 and made[0].token_ids[1] == -1 and made[0].token_ids[0] >= 0


def test_a_step_that_cannot_be_is_refused_as_a_single_one(engine: Engine) -> None:
    plan = begun(engine, (0,))
    wrong = replace(plan, rows=(replace(plan.rows[0], token_ids=(10**6,)),))
    with pytest.raises(ValueError, match="token id 1000000: the vocabulary has"):
        engine.several(wrong, MOST, [()])
