"""Compiles FlashInfer's attention for one head_dim in bfloat16, and prints as JSON how long that took. A process of its
own, so that several compile at the same time.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from stages.generate.attention import AttentionShape
from stages.generate.attention.flashinfer import kernels_of, load_library, tools


def main() -> None:
    """Compile what the arguments say: HEAD_DIM WINDOWED(0|1)."""
    tools()
    began_s = time.perf_counter()
    shape = AttentionShape(1, 1, int(sys.argv[1]), 16, int(sys.argv[2]), torch.bfloat16)
    kernels = kernels_of(load_library(), shape)
    imported_s = time.perf_counter() - began_s
    was_there = bool(kernels.is_compiled)
    kernels.build_and_load()
    seconds = time.perf_counter() - began_s - imported_s
    print(json.dumps({"seconds": seconds, "import_s": imported_s, "was_compiled": was_there}))


if __name__ == "__main__":
    main()
