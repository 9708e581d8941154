"""`kernels_sample` and `kernels_refuse` for Python: draw tokens on a CPU, and exclude tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import CDLL, c_int, c_int64, c_void_p

import numpy as np

from stages.generate.kernels.library import Library, library
from stages.generate.sampling.draws import Draws
from stages.generate.schedule.plan import Words

# R = rows of the logits, D = rows that are drawn, V = vocabulary, W = words of 32 tokens


@functools.cache
def functions() -> CDLL | None:
    """Return the library that can draw tokens here, or None."""
    found = library()
    if not isinstance(found, Library):
        return None
    kinds = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_void_p)
    found.functions.kernels_sample.argtypes = list(kinds)
    found.functions.kernels_refuse.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int]
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


def refuse(found: CDLL, logits_RV: np.ndarray, rows: Sequence[int], masks_DW: Sequence[Words], threads: int) -> None:
    """Set the logits, float32, of tokens that some *rows* cannot have to minus infinity. Each row has a mask."""
    assert logits_RV.flags.c_contiguous
    rows_D, vocab_size = np.array(rows, np.int64), logits_RV.shape[1]
    masks = addresses(masks_DW, vocab_size)
    found.kernels_refuse(logits_RV.ctypes.data, vocab_size, rows_D.ctypes.data, len(rows_D), masks.ctypes.data, threads)


def addresses(masks_D: Sequence[Words | None], vocab_size: int) -> np.ndarray:
    """Return pointers to masks of *vocab_size* tokens; NULL for None. The caller must keep the masks meanwhile."""
    pointers_D = np.zeros(len(masks_D), np.uintp)
    for row, mask_W in enumerate(masks_D):
        if mask_W is not None:
            assert mask_W.dtype == np.uint32 and 32 * len(mask_W) >= vocab_size and mask_W.flags.c_contiguous
            pointers_D[row] = mask_W.ctypes.data
    return pointers_D
