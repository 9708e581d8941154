"""The fused draw for GPUs chooses the tokens that the CPU's kernel chooses: on a double of Triton, bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from support import triton_double

from pipeline.events import SamplingParams
from stages.generate.sampling import compiled
from stages.generate.sampling.draws import make_draws
from stages.generate.sampling.sampler import best, draw, draw_again, sample
from stages.generate.schedule.plan import NOT_A_NUMBER, Sample


@pytest.fixture(scope="module")
def fused() -> Iterator[ModuleType]:
    with triton_double.triton():
        module = importlib.import_module("stages.generate.sampling.fused")
        yield module


def samples_of(num_rows: int, **params: float) -> list[Sample]:
    return [
        Sample(SamplingParams(seed=row, **{"temperature": 0.6, **params}), 7 * row, ())  # type: ignore[arg-type]
        for row in range(num_rows)
    ]


def drawn(fused: ModuleType, logits_RV: torch.Tensor, samples: list[Sample]) -> list[int]:
    tokens_R = torch.zeros(len(samples), dtype=torch.int64)
    fused.draw_by_all(tokens_R, logits_RV, np.arange(len(samples)), make_draws(samples))
    return list(tokens_R.tolist())


@pytest.mark.parametrize("vocab_size", [1, 100, 2048, 2049, 32_000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_the_tokens_are_those_of_the_kernel_for_cpus(fused: ModuleType, vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = spread * torch.randn(40, vocab_size, generator=generator)
    for params in ({}, {"min_p": 0.05}, {"temperature": 2.0}, {"temperature": 0.01}):
        samples = samples_of(len(logits_RV), **params)
        assert drawn(fused, logits_RV, samples) == sample(logits_RV, samples)


def test_many_draws_from_the_same_logits_are_the_same(fused: ModuleType) -> None:
    logits_V = 2 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    samples = samples_of(500, temperature=1.0)
    logits_RV = logits_V.expand(len(samples), -1).contiguous()
    expected = sample(logits_RV, samples)
    assert drawn(fused, logits_RV, samples) == expected and len(set(expected)) > 200


def test_equal_and_excluded_logits(fused: ModuleType) -> None:
    logits_RV = torch.zeros(60, 6000)
    logits_RV[:, 100:5000] = float("-inf")
    samples = samples_of(60)
    tokens = drawn(fused, logits_RV, samples)
    assert tokens == sample(logits_RV, samples)
    assert all(token < 100 or token >= 5000 for token in tokens)


def test_only_the_rows_that_are_drawn_change(fused: ModuleType) -> None:
    logits_RV = torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    samples = samples_of(2)
    tokens_R, rows_X = torch.full((6,), 9999, dtype=torch.int64), np.array([4, 1])
    fused.draw_by_all(tokens_R, logits_RV, rows_X, make_draws(samples))
    expected = sample(logits_RV[rows_X], samples)
    assert tokens_R.tolist() == [9999, expected[1], 9999, 9999, expected[0], 9999]


def test_what_is_not_a_number_gives_some_token_and_harms_no_other_row(fused: ModuleType) -> None:
    logits_RV = torch.randn(4, 3000, generator=torch.Generator().manual_seed(3))
    logits_RV[1, 7], logits_RV[2, 8], logits_RV[3] = float("nan"), float("inf"), float("-inf")
    samples = samples_of(4)
    tokens = drawn(fused, logits_RV, samples)
    expected = sample(logits_RV, samples)
    assert [tokens[row] for row in (0, 2, 3)] == [expected[0], NOT_A_NUMBER, NOT_A_NUMBER] and tokens[1] < 3000


def test_a_row_that_may_have_no_token_gets_none(fused: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "functions", lambda: None)
    params = SamplingParams(seed=1, temperature=0.7, allowed_token_ids=(5,))
    logits_RV = torch.randn(1, 3000, generator=torch.Generator().manual_seed(5))
    logits_RV[0, 5] = float("-inf")
    assert sample(logits_RV, [Sample(params, 0, ())], fused=True) == [NOT_A_NUMBER]


def test_rows_of_every_kind_in_one_step(fused: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[dict[str, float]] = [{"top_k": 5}, {"top_k": 2000}, {"top_p": 0.9}, {"min_p": 0.1}]
    kinds: list[dict[str, float]] = [{}, {"temperature": 0}, *limits]
    samples = [how for params in 3 * kinds for how in samples_of(1, **params)]
    logits_RV = 2 * torch.randn(len(samples), 4000, generator=torch.Generator().manual_seed(4))
    logits_RV[0, 5] = float("nan")
    expected = sample(logits_RV, samples)
    monkeypatch.setattr(compiled, "functions", lambda: None)  # as on a GPU, torch draws the others
    tokens_R = best(logits_RV)
    draw(tokens_R, logits_RV, samples, fused=True)
    assert draw_again(tokens_R.tolist(), logits_RV, samples) == expected
