"""`kernels_sample` from Python: tokens drawn from logits on a CPU."""

from __future__ import annotations

import functools
from ctypes import CDLL, c_int, c_int64, c_void_p

import numpy as np

from stages.generate.forward.draws import Draws
from stages.generate.kernels.library import Library, library

# R = rows of the logits, D = rows that are drawn, V = vocabulary


@functools.cache
def functions() -> CDLL | None:
    """Return the library that can draw tokens here, or None."""
    found = library()
    if not isinstance(found, Library):
        return None
    kinds = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_void_p)
    found.functions.kernels_sample.argtypes = list(kinds)
    return found.functions


def draw(
    found: CDLL, tokens_R: np.ndarray, logits_RV: np.ndarray, rows_D: np.ndarray, draws: Draws, threads: int
) -> None:
    """Draw tokens of some rows of *logits_RV*, float32, into *tokens_R*, int64; -1: no token can follow.

    Raises:
        MemoryError: There is no memory for the weights of a row.
    """
    assert logits_RV.flags.c_contiguous and tokens_R.flags.c_contiguous
    outcome = found.kernels_sample(
        logits_RV.ctypes.data,
        logits_RV.shape[1],
        rows_D.ctypes.data,
        len(rows_D),
        draws.divisors_R.ctypes.data,
        draws.numbers_FR.ctypes.data,
        threads,
        tokens_R.ctypes.data,
    )
    if outcome:
        raise MemoryError(f"there is no memory to draw from {logits_RV.shape[1]} logits")
