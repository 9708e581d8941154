"""Which kinds of kernels the tests of this machine can ask an engine for."""

from __future__ import annotations

from typing import Final

from stages.generate.kernels.library import available

VARIANTS: Final = available()[::-1]
"""The last one is the fastest. Empty where only torch can compute."""
DTYPES: Final = ("bfloat16", "float32", "float16", "int8")
"""What weights are computed in; int8 is a quantization of bfloat16 weights."""
