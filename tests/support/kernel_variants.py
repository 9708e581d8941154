"""Which kinds of kernels this machine can use, and their functions."""

from __future__ import annotations

import ctypes
from typing import Final

from torch import Tensor

from stages.generate.kernels import library

VARIANTS: Final = library.available()[::-1]
"""The last one is the fastest. Empty where only torch can compute."""
DTYPES: Final = ("bfloat16", "float32", "float16", "int8")
"""What weights are computed in; int8 is a quantization of bfloat16 weights."""


class Functions:
    """The table of one variant: `Variant` of kernels.h."""

    def __init__(self, variant: str) -> None:
        self.variant, self._table = variant, library.variant(variant)

    def call(self, name: str, *arguments: object) -> int:
        """Call a function by its name in the table; a tensor is passed as its address."""
        passed = (ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments)
        result: int | None = getattr(self._table, name)(*passed)
        return result or 0
