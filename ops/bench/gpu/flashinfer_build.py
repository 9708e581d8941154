"""Compiles FlashInfer's attention for one head_dim in bfloat16, or its other operations, and prints as JSON how long
that took. A process of its own, so that several compile at the same time.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from stages.generate.attention import AttentionShape, fused
from stages.generate.attention.flashinfer import kernels_of, load_library, tools


def main() -> None:
    """Compile what the arguments say: HEAD_DIM WINDOWED(0|1), or `operations`."""
    tools()
    began_s = time.perf_counter()
    if sys.argv[1:] == ["operations"]:
        print(json.dumps(build_operations(fused.descriptions(load_library()))))
        return
    shape = AttentionShape(1, 1, int(sys.argv[1]), 16, int(sys.argv[2]), torch.bfloat16)
    kernels = kernels_of(load_library(), shape)
    imported_s = time.perf_counter() - began_s
    was_there = bool(kernels.is_compiled)
    kernels.build_and_load()
    seconds = time.perf_counter() - began_s - imported_s
    print(json.dumps({"seconds": seconds, "import_s": imported_s, "was_compiled": was_there}))


def build_operations(described: dict[str, Any]) -> dict[str, dict[str, object]]:
    """Compile the modules, all at once; return of each what it took, or why it does not compile."""

    def build(description: Any) -> dict[str, object]:
        began_s = time.perf_counter()
        try:
            description.build_and_load()
        except Exception as error:  # whatever a compiler says
            return {"ok": False, "error": str(error)}
        return {"ok": True, "seconds": time.perf_counter() - began_s}

    with ThreadPoolExecutor(len(described) or 1) as pool:
        return dict(zip(described, pool.map(build, described.values()), strict=True))


if __name__ == "__main__":
    main()
