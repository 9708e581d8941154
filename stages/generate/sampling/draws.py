"""How each row of a step is drawn, as flat arrays for the sampler and its kernel. Knows no logits and no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from stages.generate.schedule.plan import Sample

# R = rows

GOLDEN64: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64
OF_PARAMS: Final = attrgetter("top_k", "seed", "temperature", "top_p", "min_p")
LN2: Final = 0.6931471805599453
SMALLEST: Final = float(np.finfo(np.float32).tiny)
MOST_WEIGHT: Final = 2**40
"""Weight of the most probable token, see `sampler.weights`."""
HALF_BITS: Final = 30
"""Bits of each of the two numbers of a fraction, so that its products with sums of weights fit into 64 bits."""
FIRST_F1: Final = np.array([[0], [2**HALF_BITS], [0], [MOST_WEIGHT], [0], [0]])
"""`Draws.numbers_FR` of a greedy row. Its divisor is the smallest: only logits that equal the largest weigh so much."""

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """One number for each row. A fraction, such as top_p, is high / 2**30 + low / 2**60."""

    divisors_R: npt.NDArray[np.float32]
    """Temperature times ln 2: a logit that is this much below the largest weighs half."""
    numbers_FR: npt.NDArray[np.int64]
    """top_k (0: off), top_p in two parts, the smallest weight that min_p keeps, and in two parts the share of the
    weights that lies before the drawn token: `Draw` of sample.h.
    """


def make_draws(samples: Sequence[Sample]) -> Draws:
    """Return the arrays of rows. With temperature 0, the first of the tokens with the largest logit is drawn."""
    of_rows = [OF_PARAMS(how.params) for how in samples]  # faster than one list for each of them
    top_k, seeds, *floats = zip(*of_rows, strict=True) if of_rows else [()] * 5
    temperatures_R, top_p_R, min_p_R = np.array(floats, np.float64)
    positions_R = np.array([how.position for how in samples], np.int64)
    shares_R = uniform(np.array(seeds, np.int64), positions_R)
    numbers_FR = np.empty((6, len(samples)), np.int64)
    numbers_FR[0] = [each if each < 2**31 else 2**31 for each in top_k]
    numbers_FR[3] = np.ceil(min_p_R * MOST_WEIGHT)
    numbers_FR[1::3], numbers_FR[2::3] = fractions(np.stack((top_p_R, shares_R)))
    numbers_FR[:, temperatures_R == 0] = FIRST_F1
    divisors_R = np.maximum(temperatures_R * LN2, SMALLEST)
    return Draws(divisors_R.astype(np.float32), numbers_FR)


def fractions(values_R: Floats) -> tuple[Floats, Floats]:
    """Return each number in [0, 1] as two whole numbers of 30 bits: exactly, but for bits below 2**-60."""
    scaled_R = values_R * 2.0**HALF_BITS
    high_R = np.floor(scaled_R)
    return high_R, np.floor((scaled_R - high_R) * 2.0**HALF_BITS)


def uniform(seeds_R: npt.NDArray[np.int64], positions_R: npt.NDArray[np.int64]) -> Floats:
    """Return numbers in [0, 1) with 53 random bits, a pure function of seed and position.

    SplitMix64 as a counter-based generator (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA
    2014): its state after `position` steps can be computed directly. The seed is mixed first, so that no two seeds that
    a person would choose are shifts of one sequence.
    """
    states_R = splitmix64(seeds_R.view(np.uint64)) + positions_R.astype(np.uint64) * np.uint64(GOLDEN64)
    return (splitmix64(states_R) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(states_R: Words) -> Words:
    """Return the outputs of SplitMix64 that follow *states_R*."""
    z_R = states_R + np.uint64(GOLDEN64)
    z_R = (z_R ^ (z_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_R = (z_R ^ (z_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_R ^ (z_R >> np.uint64(31))
