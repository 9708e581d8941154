"""The sampler against a plain one that takes one row after the other, in Python's whole numbers, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from support import triton_double
from support.devices import DEVICES
from support.selection import by_night

from pipeline.events import SamplingParams
from stages.generate.kernels import library
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling.sampler import choose, sample
from stages.generate.schedule.plan import NOT_A_NUMBER, Sample
from stages.generate.schedule.seen import Seen

FLOAT = np.float32
NEVER = FLOAT("-inf")
LARGEST = np.finfo(FLOAT).max
LN2 = 0.6931471805599453
CURVE = (0.0013264729641377926, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653)
VOCABULARIES = (11, 16, 127, 128, 1000, 1025, 4096, 32_000, 151_936)
SHARES = (0.2, 0.1, 0.15, 0.15, 0.15, 0.1, 0.1, 0.04, 0.01)
"""How many of the rows have each vocabulary: Python takes its time for large ones."""


def plain_uniform(seed: int, position: int) -> Fraction:
    def mixed(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    return Fraction(mixed(mixed(seed % 2**64) + position * 0x9E3779B97F4A7C15) >> 11, 2**53)


def part(total: int, share: float | Fraction) -> int:
    """Return *share* of *total*, rounded down; shares have 60 bits."""
    return total * (int(Fraction(share) * 2**60)) >> 60


def plain_shape(row: np.ndarray, how: Sample) -> np.ndarray:
    """Return the logits that a token is chosen from."""
    params, row, size = how.params, row.copy(), len(row)
    for token, bias in dict(params.logit_bias).items():
        if token < size:
            row[token] += FLOAT(bias)
    if params.repetition_penalty != 1:
        factor = FLOAT(max(params.repetition_penalty, float(np.finfo(FLOAT).tiny)))
        for token in set(how.token_ids):
            row[token] = min(row[token] / factor, LARGEST) if row[token] > 0 else row[token] * factor
    for seen, count in Counter(how.token_ids[how.prompt_length :]).items():
        row[seen] -= FLOAT(count) * FLOAT(params.frequency_penalty) + FLOAT(params.presence_penalty)
    allowed = [token for token in params.allowed_token_ids if token < size]
    if allowed:
        row[[token for token in range(size) if token not in allowed]] = NEVER
    left = row.copy()
    left[[token for token in how.forbidden if 0 <= token < size]] = NEVER
    return left if (left > NEVER).any() else row


def plain_weights(halvings: np.ndarray) -> np.ndarray:
    """Return rint(2**(40 - halvings)), with the curve of the sampler: in float32, in its order."""
    whole = np.rint(halvings)
    rest = whole - halvings
    power = rest * FLOAT(CURVE[0])
    for factor in CURVE[1:]:
        power = (power + FLOAT(factor)) * rest
    exact = np.ldexp((power + FLOAT(1)).astype(np.float64), 40 - whole.astype(np.int64))
    rounded: np.ndarray = np.rint(exact).astype(np.int64)
    return rounded


def plain_border(distances: np.ndarray, weights: np.ndarray, share: float) -> Any:
    """Return the distance of the last of the nearest tokens that together reach *share* of the weights."""
    order = np.argsort(distances, kind="stable")
    wanted = max(1, part(int(weights.sum()), share))
    return distances[order[int(np.searchsorted(weights[order].cumsum(), wanted))]]


def plain_sample(row: np.ndarray, how: Sample) -> int:
    if not np.isfinite(row.max()):  # or one is NaN
        return NOT_A_NUMBER
    params, row = how.params, plain_shape(row, how)
    most = row.max()
    if not np.isfinite(most):
        return NOT_A_NUMBER
    if params.temperature == 0:
        return int(row.argmax())
    distances = most - row
    divisor = FLOAT(max(params.temperature * LN2, float(np.finfo(FLOAT).tiny)))
    halvings = np.minimum(distances / divisor, FLOAT(50))
    weights = plain_weights(halvings)
    if 0 < params.top_k < len(row):
        weights[distances > np.sort(distances)[params.top_k - 1]] = 0
    if params.top_p < 1:
        weights[distances > plain_border(distances, weights, params.top_p)] = 0
    weights[weights < ceil(Fraction(params.min_p) * 2**40)] = 0
    if params.typical_p < 1:
        surprise = np.rint(halvings * FLOAT(2**20)).astype(np.int64)
        mean = sum(w * s for w, s in zip(weights.tolist(), surprise.tolist(), strict=True)) // int(weights.sum())
        strangeness = np.where(weights == 0, 2**40, abs(surprise - mean))
        weights[strangeness > plain_border(strangeness, weights, params.typical_p)] = 0
    before = part(int(weights.sum()), plain_uniform(params.seed, how.position))
    return int(np.searchsorted(weights.cumsum(), before, side="right"))


def some_logits(draw: random.Random, size: int) -> np.ndarray:
    normal = torch.randn(size, generator=torch.Generator().manual_seed(draw.getrandbits(40)))
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: 4 * normal,
        lambda: (4 * normal).bfloat16().float(),  # many are equal
        lambda: (2 * normal).round(),  # almost all are equal
        lambda: 0 * normal,
        lambda: 40 * normal,
        lambda: (4 * normal).where(normal < 1, float("-inf")),
        lambda: torch.full((size,), float("-inf")).index_fill(0, torch.tensor(draw.randrange(size)), 1.5),
        lambda: normal.sign() * 3.4e38,
    ]
    return draw.choice(kinds)().numpy()


def some_sample(draw: random.Random, size: int) -> Sample:
    """Return any combination of parameters; each is often left as it is."""

    def maybe(default: Any, *others: Any) -> Any:
        return draw.choice((default, default, *others))

    params = SamplingParams(
        temperature=draw.choice((0.0, 5e-324, 0.05, 0.7, 1.0, 1.0, 2.0)),
        top_k=maybe(0, 1, 7, 50, 500, 1024, 1025, size - 1, size, 10**30),
        top_p=maybe(1.0, 1e-9, 0.3, 0.9, 0.999, 1 - 2**-53),
        min_p=maybe(0.0, 1e-12, 0.02, 0.5, 1.0),
        typical_p=maybe(1.0, 1.0, 1.0, 0.2, 0.95),
        seed=draw.randrange(-(2**63), 2**63),
        presence_penalty=maybe(0.0, -1.5, 0.7),
        frequency_penalty=maybe(0.0, -0.3, 2.0),
        repetition_penalty=maybe(1.0, 1.0, 1e-300, 0.7, 1.3),
        logit_bias=maybe((), (), ((3, 5.0), (7, -100.0), (3, 6.5), (10**30, 1.0))),
        allowed_token_ids=maybe((), (), (), (2, 5, 5, size - 1, 10**30), (10**30,)),
    )
    forbidden = maybe((), (), (0, 0, 9, -1, size - 1, 10**30), tuple(range(min(size, 200))))
    tokens = draw.choices(range(size), k=draw.randrange(1, 60))
    prompt_length = draw.randrange(len(tokens) + 1)
    seen = Seen(prompt_length)
    for length in (draw.randrange(prompt_length, len(tokens) + 1), len(tokens)):  # it grows
        seen.follow(tokens, length)
    return Sample(params, draw.randrange(1, 10**6), forbidden, tokens, prompt_length, seen=seen)


@pytest.fixture(params=["torch", "kernels"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let torch draw, or the kernel of C with two threads."""
    if request.param == "torch":
        monkeypatch.setattr(sampling, "functions", lambda: None)
    elif sampling.functions() is None:
        pytest.skip(library.reason())
    return 2


@pytest.mark.parametrize("top_k", [2, 5])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 1.0])
def test_all_tokens_that_equal_the_last_of_top_k_count_for_top_p(top_k: int, top_p: float, threads: int) -> None:
    """Also if there are more of them than the sampler looks at first, in company with a row that looks at more."""
    row = np.full(1000, 5, np.float32)
    row[3] = 10
    samples = [Sample(SamplingParams(top_k=top_k, top_p=top_p, seed=seed), 7, ()) for seed in range(40)]
    expected = [plain_sample(row, how) for how in samples]
    assert (len(set(expected)) > 10) is (top_p > 0.1)
    assert sample(torch.from_numpy(row).expand(40, -1), samples, threads=threads) == expected
    company = [*samples, Sample(SamplingParams(top_k=600), 7, ())]
    assert sample(torch.from_numpy(row).expand(41, -1), company, threads=threads)[:-1] == expected


@pytest.mark.parametrize("seed", range(by_night(1, 25)))
def test_rows_get_the_tokens_of_the_plain_sampler_alone_and_together(seed: int, threads: int) -> None:
    """With every combination of parameters. Rows that are not numbers are refused, and the others do not notice."""
    draw = random.Random(seed)
    for size, share in zip(VOCABULARIES, SHARES, strict=True):
        samples = [some_sample(draw, size) for _ in range(int(400 * share))]
        rows = [some_logits(draw, size) for _ in samples]
        for row in rows[3::29]:
            row[draw.randrange(size)] = np.nan
        for row in rows[7::31]:
            row[draw.randrange(size)] = np.inf
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            expected = [plain_sample(row, how) for row, how in zip(rows, samples, strict=True)]
        logits_RV = torch.from_numpy(np.stack(rows))
        assert sample(logits_RV, samples, threads=threads) == expected
        assert sample(logits_RV.flip(0), samples[::-1], threads=threads) == expected[::-1]
        for n in range(0, len(rows), 1 if size < 10_000 else 5):
            assert sample(logits_RV[n : n + 1], samples[n : n + 1]) == expected[n : n + 1]


@pytest.mark.parametrize(
    ("fused", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16), (True, torch.float16)],
    ids=["by torch", "fused", "fused bfloat16", "fused float16"],
)
@pytest.mark.parametrize("size", [1000, 151_936])
@pytest.mark.parametrize("device", DEVICES)
def test_a_device_draws_what_a_cpu_draws_alone_and_together(
    device: torch.device, size: int, fused: bool, dtype: torch.dtype
) -> None:
    """On a GPU of far more rows than the plain sampler has time for: a sum that rounds in another way shows seldom."""
    draw, on_gpu = random.Random(size), device.type == "cuda"
    rows_at_once = (256 if size == 1000 else 4) if on_gpu or not fused else 40_000 // size + 1
    with nullcontext() if on_gpu or not fused else triton_double.triton():
        by = (lambda logits_RV, samples: choose(logits_RV, samples).tolist()) if fused else sample
        for number in range(80 if on_gpu else 1):
            samples = [some_sample(draw, size) for _ in range(rows_at_once)]
            logits_RV = torch.from_numpy(np.stack([some_logits(draw, size) for _ in samples])).to(dtype)
            expected = sample(logits_RV, samples, threads=torch.get_num_threads())
            there_RV = logits_RV.to(device)
            assert by(there_RV, samples) == expected, number
            for n in range(8) if number == 0 else ():
                assert by(there_RV[n : n + 1], samples[n : n + 1]) == expected[n : n + 1], n
