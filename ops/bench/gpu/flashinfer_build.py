"""Compiles FlashInfer's attention for one head_dim in bfloat16, and prints as JSON how long that took. A process of its
own, so that several compile at the same time.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch


def spec_of(head_dim: int, windowed: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return what FlashInfer compiles for prefill, and for decode with tensor cores."""
    jit = importlib.import_module("flashinfer.jit")
    return jit.gen_batch_prefill_module(
        "fa2",
        dtype,
        dtype,
        dtype,
        torch.int32,
        head_dim,
        head_dim,
        0,  # no position encoding
        windowed,
        False,  # no soft cap of the logits
        False,  # no sums in float16
    )


def main() -> None:
    """Compile what the arguments say: HEAD_DIM WINDOWED(0|1)."""
    began_s = time.perf_counter()
    spec = spec_of(int(sys.argv[1]), sys.argv[2] == "1")
    imported_s = time.perf_counter() - began_s
    was_there = bool(spec.is_compiled)
    spec.build_and_load()
    seconds = time.perf_counter() - began_s - imported_s
    print(json.dumps({"seconds": seconds, "import_s": imported_s, "was_compiled": was_there, "name": spec.name}))


if __name__ == "__main__":
    main()
