"""Measures whether the order of the variants fits this CPU. It only informs: no clock decides what computes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from stages.generate.kernels.library import Format, Matrix, variant

ROWS, INPUTS, OUTPUTS = 12, 1024, 256
"""Shape of the measured product. Its weights fit into the L2 cache."""
TIMES: Final = 5
MUCH: Final = 1.3
"""Another variant is worth a line in the log if it is this many times as fast."""


def faster_than(chosen: str, variants: Sequence[str]) -> str:
    """Return which of *variants* multiplies bfloat16 at least MUCH times as fast as *chosen*, one of them; "": none.

    It takes about a millisecond for each.
    """
    seconds = {name: min(_seconds(name) for _ in range(TIMES)) for name in variants}
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[chosen] > MUCH * seconds[best] else ""


def _seconds(name: str) -> float:
    functions = variant(name)
    rows = np.zeros(ROWS * functions.activation_bytes(Format.BFLOAT16, INPUTS) + 64, np.uint8)
    panels = np.zeros(OUTPUTS // 16 * functions.panel_bytes(Format.BFLOAT16, INPUTS) + 64, np.uint8)
    out = np.zeros((ROWS, OUTPUTS), np.float32)
    matrix = Matrix(_aligned(panels), None, OUTPUTS, INPUTS, Format.BFLOAT16)
    began_s = time.perf_counter()
    functions.multiply(ctypes.byref(matrix), _aligned(rows), ROWS, 0, OUTPUTS // 16, out.ctypes.data, OUTPUTS)
    return time.perf_counter() - began_s


def _aligned(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return -(-array.ctypes.data // 64) * 64
