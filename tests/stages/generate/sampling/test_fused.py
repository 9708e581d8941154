"""The kernels for GPUs choose the tokens that the CPU's kernel chooses: on a double of Triton, bit for bit."""

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
from stages.generate.sampling.sampler import choose, sample, weights
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


def chosen(logits_RV: torch.Tensor, samples: list[Sample]) -> list[int]:
    before_RV = logits_RV.clone()
    tokens: list[int] = choose(logits_RV, samples).tolist()
    assert torch.equal(logits_RV.nan_to_num(), before_RV.nan_to_num()), "the logits stay as they are"
    return tokens


@pytest.mark.parametrize("vocab_size", [1, 100, 2048, 2049, 32_000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_the_tokens_are_those_of_the_kernel_for_cpus(fused: ModuleType, vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = spread * torch.randn(10, vocab_size, generator=generator)
    for params in ({}, {"min_p": 0.05}, {"temperature": 2.0}, {"temperature": 0.01}, {"temperature": 0}):
        samples = samples_of(len(logits_RV), **params)
        assert chosen(logits_RV, samples) == sample(logits_RV, samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 100, 2049, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_top_k_and_top_p_keep_the_same_tokens(
    fused: ModuleType, vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    """In bfloat16 many logits are equal: all that equal the last of top_k are kept."""
    limits = [
        {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        for top_k in (0, 1, 20, 1500, vocab_size - 1, vocab_size, 10**30)
        for seed, (top_p, min_p) in enumerate(((1.0, 0), (0.9, 0.01), (0.3, 0), (1e-10, 0), (1 - 2**-53, 0)))
    ]
    samples = [Sample(SamplingParams(**each), 3, ()) for each in limits]  # type: ignore[arg-type]
    normal_RV = torch.randn(len(samples), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits_RV = (spread * normal_RV).to(dtype)
    assert chosen(logits_RV, samples) == sample(logits_RV, samples)


def test_top_k_counts_tokens_that_weigh_nothing(fused: ModuleType) -> None:
    logits_RV = torch.full((20, 5000), -500.0)
    logits_RV[:, 4000:4010] = torch.arange(10.0)
    logits_RV[:, 3000:3010] = float("-inf")
    samples = [
        samples_of(20, temperature=2.0, top_k=(5, 10, 11, 3000, 4995)[row % 5], top_p=0.99)[row] for row in range(20)
    ]
    assert chosen(logits_RV, samples) == sample(logits_RV, samples)


def test_a_greedy_row_gets_the_first_of_several_largest_logits(fused: ModuleType) -> None:
    """Also among logits that differ least, and in another tile than the second one."""
    logits_RV = torch.full((7, 5000), -3.0)
    logits_RV[0, [2040, 2050, 4999]] = 1.0
    logits_RV[1, 4999] = -2.9999998
    logits_RV[2], logits_RV[2, 4500] = 0.0, 1e-45
    logits_RV[3], logits_RV[3, [2047, 2048]] = -0.0, 0.0
    logits_RV[4], logits_RV[4, [4990, 4991]] = float("-inf"), -3.4e38
    logits_RV[5, 3000], logits_RV[5, 100] = 3.4e38, -3.4e38
    greedy = samples_of(len(logits_RV), temperature=0, top_k=2, top_p=0.5)
    assert chosen(logits_RV, greedy) == sample(logits_RV, greedy) == [2040, 4999, 4500, 0, 4990, 3000, 0]
    assert sample(logits_RV[:1].expand(50, -1), samples_of(50, top_k=1)) == chosen(
        logits_RV[:1].expand(50, -1).contiguous(), samples_of(50, top_k=1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_row_with_nan_or_an_infinite_logit_has_no_token_and_harms_no_other(
    fused: ModuleType, value: str, dtype: torch.dtype
) -> None:
    logits_RV = torch.randn(12, 4500, generator=torch.Generator().manual_seed(3)).to(dtype)
    for row, place in ((1, 0), (3, 2047), (5, 2048), (7, 4499)):  # of every tile, and its ends
        logits_RV[row, place] = float(value)
    logits_RV[9] = float("-inf")
    kinds: list[dict[str, float]] = [{"temperature": 0}, {"top_k": 9, "top_p": 0.5}, {"typical_p": 0.5}]
    for params in kinds:
        tokens = chosen(logits_RV, samples_of(len(logits_RV), **params))
        assert tokens == sample(logits_RV, samples_of(len(logits_RV), **params))
        assert [row for row, token in enumerate(tokens) if token == NOT_A_NUMBER] == [1, 3, 5, 7, 9]


def test_a_changed_row_has_no_token_if_its_own_logits_are_no_numbers(fused: ModuleType) -> None:
    logits_RV = torch.randn(4, 3000, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits_RV[1, 2500], logits_RV[2, 2500] = float("inf"), float("nan")
    for temperature in (0.0, 0.7):
        params = SamplingParams(seed=1, temperature=temperature, allowed_token_ids=(5, 7))
        tokens = chosen(logits_RV, [Sample(params, 0, ())] * 4)
        assert tokens[1:3] == [NOT_A_NUMBER] * 2 and {tokens[0], tokens[3]} <= {5, 7}
        assert tokens == sample(logits_RV, [Sample(params, 0, ())] * 4)


def test_many_draws_from_the_same_logits_are_the_same(fused: ModuleType) -> None:
    logits_V = 2 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    samples = samples_of(300, temperature=1.0)
    logits_RV = logits_V.expand(len(samples), -1).contiguous()
    expected = sample(logits_RV, samples)
    assert chosen(logits_RV, samples) == expected and len(set(expected)) > 150


def test_equal_and_excluded_logits(fused: ModuleType) -> None:
    logits_RV = torch.zeros(60, 6000)
    logits_RV[:, 100:5000] = float("-inf")
    samples = samples_of(60)
    tokens = chosen(logits_RV, samples)
    assert tokens == sample(logits_RV, samples)
    assert all(token < 100 or token >= 5000 for token in tokens)


@pytest.mark.parametrize("divisor", [1.0, 0.42, 0.6931472, 1.1754944e-38])
def test_weights_are_those_of_the_sampler(fused: ModuleType, divisor: float) -> None:
    """Halves, too, which are rounded to even, and distances at which a weight becomes 0."""
    extremes = torch.tensor([float("inf"), 0.0, 1e-45, 3.4e38])
    halvings = torch.cat((torch.arange(0, 200_000) / 4096, extremes))
    distances = (halvings * divisor).float()
    found = fused._weights(triton_double.Block(distances.numpy()), triton_double.Block(np.float32(divisor))).values
    assert np.array_equal(found, weights(distances.clone()[None], torch.tensor([[divisor]]))[0].numpy())


def test_shares_are_exact(fused: ModuleType) -> None:
    draw = np.random.default_rng(0)
    totals, high, low = draw.integers(0, 2**60, 5000), draw.integers(0, 2**30, 5000), draw.integers(0, 2**30, 5000)
    found = fused._share(*map(triton_double.Block, (totals, high, low))).values
    expected = [
        int(total) * ((int(one) << 30) + int(other)) >> 60 for total, one, other in zip(totals, high, low, strict=True)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("are_equal", [True, False])
def test_top_k_of_fewer_tokens_than_tiles_keeps_those_that_equal_the_last(fused: ModuleType, are_equal: bool) -> None:
    """The largest logits of tiles bound the distance of the last one. Many may be equal, also in one tile."""
    logits_RV = torch.randn(40, 12_000, generator=torch.Generator().manual_seed(6))
    if are_equal:
        logits_RV = logits_RV.round()
        logits_RV[:, 7000:7100] += 3
    samples = [samples_of(40, temperature=2.0, top_k=1 + row % 7, top_p=1 - row % 3 / 9)[row] for row in range(40)]
    assert chosen(logits_RV, samples) == sample(logits_RV, samples)


def test_no_rows_get_no_tokens(fused: ModuleType) -> None:
    assert chosen(torch.zeros(0, 100), []) == []


def test_a_row_that_may_have_no_token_gets_none(fused: ModuleType) -> None:
    params = SamplingParams(seed=1, temperature=0.7, allowed_token_ids=(5,))
    logits_RV = torch.randn(1, 3000, generator=torch.Generator().manual_seed(5))
    logits_RV[0, 5] = float("-inf")
    assert chosen(logits_RV, [Sample(params, 0, ())]) == [NOT_A_NUMBER]


def test_rows_of_every_kind_in_one_step(fused: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[dict[str, float]] = [{"top_k": 5}, {"top_k": 2000}, {"top_p": 0.9}, {"typical_p": 0.5}]
    kinds: list[dict[str, float]] = [{}, {"temperature": 0}, *limits]
    samples = [how for params in 3 * kinds for how in samples_of(1, **params)]
    logits_RV = 2 * torch.randn(len(samples), 4000, generator=torch.Generator().manual_seed(4))
    logits_RV[0, 5] = float("nan")
    expected = sample(logits_RV, samples)
    assert chosen(logits_RV, samples) == expected
    monkeypatch.setattr(compiled, "functions", lambda: None)  # as on a GPU
    assert chosen(logits_RV, samples) == sample(logits_RV, samples) == expected
