"""From logits to token ids. A token depends only on its row's logits and parameters, the tokens before it, and (seed,
position).

So a request gets the same tokens alone, in any batch, after a preemption and after a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pipeline.events import SamplingParams
from stages.generate.forward.shaping import shaped
from stages.generate.schedule.plan import Sample

# R = rows that sample, V = vocabulary, C = candidates

MASK64: Final = 2**64 - 1
GOLDEN64: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64
FEW: Final = 1024  # top_p sorts this many tokens first, which nearly always suffice, and only then all of them


def sample(logits_RV: Tensor, samples: Sequence[Sample]) -> list[int]:
    """Return one token id per row. Temperature 0 takes the argmax of the shaped logits and ignores top_p and so on."""
    if not samples:
        return []
    logits_RV = shaped(logits_RV, samples)
    tokens_R = logits_RV.argmax(-1)
    for row, how in enumerate(samples):
        if how.params.temperature > 0:
            p_V = distribution(logits_RV[row], how.params)
            tokens_R[row] = pick(p_V, uniform(how.params.seed, how.position))
    return [int(token) for token in tokens_R.tolist()]


def pick(p_V: Tensor, u: float) -> Tensor:
    """Return the token at which the running sum of *p_V* passes the share *u* of the whole: the inverse CDF."""
    cdf_V = p_V.cumsum(0)
    return torch.searchsorted(cdf_V, u * cdf_V[-1:], right=True)[0].clamp(max=len(p_V) - 1)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, a pure function of its arguments.

    SplitMix64 as a counter-based generator (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA
    2014): its state after `position` steps is known without taking them. The seed is mixed first, so that no two
    seeds that a person would choose are shifts of one sequence.
    """
    return (splitmix64(splitmix64(seed) + position * GOLDEN64) >> 11) * 2.0**-53


def splitmix64(state: int) -> int:
    """Return the output of SplitMix64 that follows *state*."""
    z = (state + GOLDEN64) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return p_V, float64, not normalised, after temperature, top_k, top_p, min_p and typical_p in this order, as in
    transformers.

    Tokens of equal probability at a border are all kept or all dropped, so the result does not depend on how a sort
    orders equal logits. In bfloat16 these are common.
    """
    scaled_V = (logits_V.double() - logits_V.max()) / params.temperature  # at most 0: no temperature overflows
    if 0 < params.top_k < len(scaled_V):
        scaled_V = scaled_V.masked_fill(scaled_V < scaled_V.topk(params.top_k).values[-1], float("-inf"))
    p_V = scaled_V.softmax(-1)
    if params.top_p < 1:
        p_V = p_V * (p_V >= _smallest_of_nucleus(p_V, params.top_p))
    if params.min_p > 0:
        p_V = p_V * (p_V >= params.min_p * p_V.max())
    if params.typical_p < 1:
        p_V = p_V * _is_typical(p_V, params.typical_p)
    return p_V


def _is_typical(p_V: Tensor, typical_p: float) -> Tensor:
    """Mark the tokens whose information is closest to the entropy and that together reach *typical_p*.

    Meister, Pimentel, Wiher, Cotterell: Locally Typical Sampling, TACL 2023 (arXiv:2202.00666).
    """
    p_V = p_V / p_V.sum()
    distance_V = (-p_V.log() - torch.special.entr(p_V).sum()).abs()  # infinite where p is 0
    nearest_V = distance_V.argsort()
    num_before = (p_V[nearest_V].cumsum(0) < typical_p).sum()
    typical_V: Tensor = distance_V <= distance_V[nearest_V[num_before.clamp(max=len(p_V) - 1)]]
    return typical_V


def _smallest_of_nucleus(p_V: Tensor, top_p: float) -> Tensor:
    """Return the smallest probability among the most probable tokens that together reach *top_p*."""
    for count in (min(FEW, len(p_V)), len(p_V)):
        p_C = p_V.topk(count).values
        before_C = p_C.cumsum(0) - p_C
        if before_C[-1] >= top_p:
            break
    return p_C[(before_C < top_p).sum() - 1]
