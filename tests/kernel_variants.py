"""Which kinds of kernels the tests of this machine can ask an engine for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stages.generate.config import EngineConfig

NEEDS: Final = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
}
"""Variant -> what /proc/cpuinfo says of a CPU that can run it. The last one that a CPU can run is the fastest."""


def _variants() -> tuple[str, ...]:
    cpuinfo = Path("/proc/cpuinfo")
    if not hasattr(EngineConfig(), "kernels") or not cpuinfo.exists():
        return ()
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "").split()
    return tuple(name for name, needed in NEEDS.items() if needed <= set(flags))


VARIANTS: Final = _variants()
"""Empty where only torch can compute."""
DTYPES: Final = ("bfloat16", "float32", "float16", *(["int8"] if hasattr(EngineConfig(), "quantization") else []))
"""What weights are computed in; int8 is a quantization of bfloat16 weights."""
