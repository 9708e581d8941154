"""Does this device draw the tokens that the CPU draws? A token is a function of its logits, its parameters and (seed,
position): alone, in a batch, and wherever it is computed. And what a sampled row costs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ops.bench.gpu.phase import Report, Scale, attempt
from ops.bench.gpu.timing import median_s
from pipeline.events import SamplingParams
from stages.generate.sampling.sampler import sample
from stages.generate.schedule.plan import Sample
from stages.generate.schedule.seen import Seen

# R = rows that sample, V = vocabulary

VOCAB_SIZES: Final = {"toy": (1000,), "small": (1000, 151_936), "full": (1000, 151_936)}
ROUNDS: Final = {"toy": (1,), "small": (1, 1), "full": (14_800, 4)}
"""Times that all parameter sets are tried with each vocabulary, with other logits and seeds: a million rows at most."""
MOST_S: Final = 3.0
"""No further batch of a kind of logits begins after so many seconds: `rows` says how many were compared."""
AT_ONCE: Final = 64
"""So many rounds make one batch."""
ALONE: Final = 4
"""The rows of so many rounds are also drawn one by one."""
TIMED_ROWS: Final = {"toy": (1, 4), "small": (1, 32), "full": (1, 32, 256)}
SHOWN: Final = 3
"""Mismatches that are described."""

PARAMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "warm": {"temperature": 1.7},
    "cold": {"temperature": 0.01},
    "top_k": {"top_k": 50},
    "top_k 1": {"top_k": 1},
    "top_k of all": {"top_k": 100_000_000},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-6},
    "wide top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "all three": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 0.8},
    "bias": {"logit_bias": ((3, 5.0), (7, -100.0), (11, 20.5), (10**9, 1.0))},
    "allowed": {"allowed_token_ids": (2, 5, 17, 400)},
    "forbidden": {"temperature": 0.9},
}
FORBIDDEN: Final = (0, 1, 9, 10**9)
"""Of the set `forbidden`."""
TIMED: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_p": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "penalties": PARAMS["penalties"],
}


def run(scale: Scale, report: Report) -> None:
    """Report mismatches of each kind of logits, then times."""
    device = torch.device(scale.device)
    for vocab_size, rounds in zip(VOCAB_SIZES[scale.size], ROUNDS[scale.size], strict=True):
        for kind in LOGITS:
            item = f"{kind} logits, vocabulary of {vocab_size}"
            with attempt(report, item):
                _compare(report, item, kind, vocab_size, device, rounds)
        for name in TIMED:
            item = f"time of {name}, vocabulary of {vocab_size}"
            with attempt(report, item):
                rows = TIMED_ROWS[scale.size]
                times = {f"rows_{num}_ms": 1e3 * _time_s(name, num, vocab_size, device) for num in rows}
                report(item, ok=None, **times)


def _normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return 4 * torch.randn(shape, generator=generator)


def _tied(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Logits as a model in bfloat16 gives them: many are equal."""
    return _normal(shape, generator).bfloat16().float()


def _flat(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A handful of values: every border of top_k, top_p and min_p lies amid equals."""
    return torch.randint(5, shape, generator=generator).float()


def _sharp(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return 40 * torch.randn(shape, generator=generator)


LOGITS: Final = {"normal": _normal, "bfloat16": _tied, "flat": _flat, "sharp": _sharp}


def _samples(names: Sequence[str], vocab_size: int, seed: int) -> list[Sample]:
    draw = random.Random(seed)
    samples = []
    for name in names:
        tokens = draw.choices(range(vocab_size), k=60)
        params = SamplingParams(**PARAMS[name], seed=draw.getrandbits(62))
        forbidden = FORBIDDEN if name == "forbidden" else ()
        samples.append(Sample(params, draw.randrange(1, 5000), forbidden, seen=_seen(tokens)))
    return samples


def _seen(token_ids: Sequence[int]) -> Seen:
    """Return the record of a request: 20 tokens of prompt, then output."""
    return Seen(prompt_length=20).follow(token_ids, len(token_ids))


def _compare(report: Report, item: str, kind: str, vocab_size: int, device: torch.device, rounds: int) -> None:
    """Compare all parameter sets: in batches on the device, some alone on it, with the CPU."""
    mismatches: list[str] = []
    seen: set[int] = set()
    generator = torch.Generator().manual_seed(vocab_size)
    ends_s, num_rows = time.perf_counter() + MOST_S, 0
    for first in range(0, rounds, AT_ONCE):
        if first and time.perf_counter() > ends_s:
            break
        names = list(PARAMS) * min(AT_ONCE, rounds - first)
        logits_RV = LOGITS[kind]((len(names), vocab_size), generator)
        samples = _samples(names, vocab_size, seed=vocab_size + first)
        num_rows += len(names)
        expected = sample(logits_RV, samples, threads=torch.get_num_threads())
        seen.update(expected)
        there_RV = logits_RV.to(device)
        num_alone = len(PARAMS) * ALONE if first == 0 else 0
        found = {
            "in a batch": sample(there_RV, samples),
            "alone": [
                sample(there_RV[row : row + 1], samples[row : row + 1])[0] for row in range(len(names))[:num_alone]
            ],
        }
        mismatches += [
            f"{names[row]} {way}: {token} instead of {expected[row]}"
            for way, tokens in found.items()
            for row, token in enumerate(tokens)
            if token != expected[row]
        ]
    report(
        item,
        ok=not mismatches,
        rows=num_rows,
        mismatches=len(mismatches),
        shown="; ".join(mismatches[:SHOWN]),
        distinct_tokens=len(seen),
    )


def _time_s(name: str, num_rows: int, vocab_size: int, device: torch.device) -> float:
    """Measure a whole batch of one kind, with the copy of its tokens to the host that ends a step."""
    logits_RV = torch.randn(num_rows, vocab_size, device=device).bfloat16().float()
    draw = random.Random(num_rows)
    seen = [_seen(draw.choices(range(vocab_size), k=60)) for _ in range(num_rows)]
    samples = [
        Sample(SamplingParams(**TIMED[name], seed=row), 100 + row, (), seen=seen[row]) for row in range(num_rows)
    ]
    return median_s(lambda: sample(logits_RV, samples), device, rounds=5)
