"""A token is a function of its logits, its parameters and (seed, position)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pipeline.events import SamplingParams
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling import draws
from stages.generate.sampling.draws import GOLDEN64, fractions, splitmix64, uniform
from stages.generate.sampling.sampler import AGAIN, best, draw, is_drawn_again, kept_weights, sample, share
from stages.generate.schedule.plan import Sample

NEVER = float("-inf")


def how(position: int = 0, forbidden: tuple[int, ...] = (), **params: Any) -> Sample:
    return Sample(SamplingParams(**params), position, forbidden)


def drawn(logits: list[float], count: int = 400, **params: Any) -> Counter[int]:
    samples = [how(position, **params) for position in range(count)]
    return Counter(sample(torch.tensor(logits).expand(count, -1), samples))


def log(*probabilities: float) -> list[float]:
    return torch.tensor(probabilities).log().tolist()


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    logits_RV = 3 * torch.randn(12, 3000, generator=torch.Generator().manual_seed(1))
    last: dict[str, Any] = {"top_k": 40, "min_p": 0.02, "temperature": 0.7}
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_p": 0.8}, last]
    samples = [how(100 + row, (5,) if row % 5 == 0 else (), seed=row, **kinds[row % 4]) for row in range(12)]
    together = sample(logits_RV, samples)
    assert together == [sample(logits_RV[row : row + 1], samples[row : row + 1])[0] for row in range(12)]
    assert together == sample(logits_RV.flip(0), samples[::-1])[::-1]
    assert len(set(together)) > 6


def test_the_position_and_the_seed_both_change_the_token() -> None:
    logits = torch.zeros(1, 1000)
    assert len({sample(logits, [how(position)])[0] for position in range(50)}) > 40
    assert len({sample(logits, [how(0, seed=seed)])[0] for seed in range(-25, 25)}) > 40


def words(*numbers: int) -> np.ndarray:
    return np.array([number % 2**64 for number in numbers], np.uint64)


def test_splitmix64_gives_the_published_sequence() -> None:
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(words(*(count * GOLDEN64 for count in range(3)))).tolist() == expected


def test_two_seeds_are_not_shifts_of_one_sequence() -> None:
    seeds = np.array([*range(20), GOLDEN64 - 2**64])  # unmixed, the last would be the first, one position later
    assert len({u for seed in seeds for u in uniform(seed.repeat(100), np.arange(100))}) == 100 * len(seeds)


def test_a_share_is_exact_up_to_the_largest_sum() -> None:
    values = np.array([0.0, 2.0**-53, 1e-9, 0.1, 0.25, 0.9, 1 - 2**-53, 1.0])
    halves_2X = torch.from_numpy(np.array(fractions(values)).astype(np.int64))
    for total in (0, 1, 2**30 - 1, 2**40, 3 * 2**40 + 12345, 152_064 * 2**40, 2**60 - 1):
        found = share(torch.tensor([total] * len(values)), halves_2X).tolist()
        assert found == [total * int(value * 2**60) >> 60 for value in values.tolist()]


def test_the_ends_of_the_distribution_are_reached_and_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[NEVER, 0.0, NEVER, torch.tensor(3.0).log(), NEVER]])
    seen = []
    for u in (0.0, 0.25 - 2**-30, 0.25 + 2**-20, 1 - 2**-53):
        monkeypatch.setattr(draws, "uniform", lambda seeds_R, positions_R, u=u: np.full(len(seeds_R), u))
        seen += sample(logits, [how()])
    assert seen == [1, 1, 3, 3]


def test_a_nucleus_larger_than_the_first_look_is_found_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, params = torch.linspace(0, 1e-3, 5000), SamplingParams(top_p=0.9)
    assert int((kept_weights(logits, Sample(params, 0, ())) > 0).sum()) == pytest.approx(4500, abs=5)
    monkeypatch.setattr(sampling, "functions", lambda: None)  # the kernel looks at all tokens
    tokens = best(logits[None])
    draw(tokens, logits[None].clone(), [how(top_p=0.9)])
    assert tokens.tolist() == [AGAIN]
    assert 490 < min(drawn(logits.tolist(), 100, top_p=0.9)) < 800


@pytest.mark.parametrize("top_k", [0, 50, 1024, 1025, 4999, 5000])
@pytest.mark.parametrize("typical_p", [1.0, 0.5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_known_before_which_rows_are_drawn_again(
    top_k: int, typical_p: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "functions", lambda: None)
    logits_RV = torch.linspace(0, 20, 5000)[None]
    sample = how(temperature=temperature, top_k=top_k, typical_p=typical_p)
    tokens = best(logits_RV)
    draw(tokens, logits_RV.clone(), [sample])
    assert (tokens.tolist() == [AGAIN]) is is_drawn_again(sample.params, 5000)


def test_uniform_is_uniform_over_positions_and_seeds() -> None:
    sevens, others = np.full(8000, 7), np.arange(8000)
    for values in (uniform(sevens, others), uniform(others, sevens)):
        counts = Counter(int(value * 16) for value in values)
        assert sum((counts[bin_] - 500) ** 2 / 500 for bin_ in range(16)) < 45  # 15 degrees of freedom, p = 1e-4


def test_tokens_come_as_often_as_they_should() -> None:
    p = (0.5, 0.25, 0.15, 0.1)
    counts = drawn(log(*p), 4000)
    assert sum((counts[token] - 4000 * p[token]) ** 2 / (4000 * p[token]) for token in range(4)) < 22


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"typical_p": 0.29}, {3}),  # 1.2 nats, where 1.28 are expected
        ({"typical_p": 0.49}, {2, 3}),
        ({"typical_p": 0.71}, {1, 2, 3}),
    ],
    ids=str,
)
def test_the_best_tokens_are_kept_and_no_others(params: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn(log(0.1, 0.4, 0.2, 0.3), **params)) == kept


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert sample(logits, [how(forbidden=(1,), temperature=0)]) == [0]
    assert logits.tolist() == [[1.0, 2.0]]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("vocab_size", [50, 5000])
@pytest.mark.parametrize("seed", range(6))
def test_the_distribution_is_that_of_transformers(vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(vocab_size, generator=generator)
    params = SamplingParams(
        temperature=(0.5, 1.0, 1.5)[seed % 3],
        top_p=(0.5, 0.99)[seed % 2],
        top_k=(0, 30)[seed % 2],
        min_p=(0.0, 0.02)[seed % 2],
        typical_p=(1.0, 0.3, 0.9)[seed % 3],
    )
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    warpers.extend([TopKLogitsWarper(params.top_k)] if params.top_k else [])
    warpers.append(TopPLogitsWarper(params.top_p))
    warpers.extend([MinPLogitsWarper(params.min_p)] if params.min_p else [])
    warpers.extend([TypicalLogitsWarper(params.typical_p)] if params.typical_p < 1 else [])
    theirs = warpers(torch.LongTensor(), logits.double()[None])[0].softmax(-1)
    ours = kept_weights(logits, Sample(params, 0, ())).double()
    torch.testing.assert_close(ours / ours.sum(), theirs, rtol=2e-6, atol=1e-12)
