"""The decoder in C, for CPUs. Each number is summed in one order, whatever else is in the batch: see `kernels.h`."""

from __future__ import annotations

from typing import Final

VERSION: Final = 2
"""Count this up with every change that changes a result by one bit. It is part of an engine's numerics."""
MOST_THREADS: Final = 256
"""As in pool.h."""
