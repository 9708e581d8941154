"""As a script, it compares the products of a prompt with those of torch, in turn and in one process.

    PYTHONPATH=tests:. .venv/bin/python tests/support/product_speed.py [--rows 2048] [--threads 2] [--rounds 5]

Both multiply the matrices of the 95 M model in bfloat16. Ours go in the tiles of a step; torch's weights are packed by
oneDNN. Where the CPU does not multiply bfloat16, torch multiplies float32: there our kernels compute in it, too.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import torch
from support.kernel_variants import VARIANTS, Functions
from support.packed_products import PANEL, Gemm, Packed, padded
from torch import Tensor

from ops.bench.models import SHAPES
from ops.bench.report import cpu_model
from stages.generate.model.layers.linear import Linear, pack

# R = rows, I = inputs, O = outputs

SHAPE = SHAPES["95m"]


def weights() -> list[Tensor]:
    """Return the matrices of all layers."""
    attention, inner = SHAPE.num_heads * SHAPE.head_dim, SHAPE.intermediate_size
    qkv = attention + 2 * SHAPE.num_kv_heads * SHAPE.head_dim
    shapes = [(qkv, SHAPE.hidden_size), (SHAPE.hidden_size, attention)]
    shapes += [(2 * inner, SHAPE.hidden_size), (SHAPE.hidden_size, inner)]
    return [torch.randn(shape).bfloat16() for _ in range(SHAPE.num_layers) for shape in shapes]


def of_ours(weights: Sequence[Tensor], num_rows: int, threads: int) -> Callable[[], None]:
    """Return a call that multiplies with all *weights*. Each thread takes the next tile, as in a step."""
    gemm = Gemm(Functions(VARIANTS[-1]))
    packed = [gemm.pack("bfloat16", weight_OI) for weight_OI in weights]
    x_RI = {one.matrix.inputs: gemm.prepare(one, torch.randn(num_rows, one.matrix.inputs)) for one in packed}
    out = np.empty((threads, 2**20), np.float32)

    def tiles(one: Packed) -> list[tuple[Any, ...]]:
        num_panels = padded(one.matrix.outputs, PANEL) // PANEL
        rows, panels = gemm.tile(one.matrix, num_rows, threads)
        matrix, x = ctypes.byref(one.matrix), x_RI[one.matrix.inputs]
        return [
            (
                matrix,
                ctypes.c_void_p(x[row:].ctypes.data),
                min(rows, num_rows - row),
                panel,
                min(panels, num_panels - panel),
            )
            for panel in range(0, num_panels, panels)
            for row in range(0, num_rows, rows)
        ]

    def work(thread: int, taken: Iterator[tuple[Any, ...]]) -> None:
        at = ctypes.c_void_p(out[thread].ctypes.data)
        for tile in taken:
            gemm.call("multiply", *tile, at, tile[-1] * PANEL)

    tiles_of = [tiles(one) for one in packed]
    pool = ThreadPoolExecutor(threads)

    def multiply() -> None:
        for each in tiles_of:
            taken = iter(each)
            list(pool.map(work, range(threads), [taken] * threads))

    return multiply


def of_torch(weights: Sequence[Tensor], num_rows: int, threads: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a call that multiplies with all *weights*."""
    torch.set_num_threads(threads)
    linears = [Linear(pack(weight_OI.to(dtype)), None) for weight_OI in weights]
    x_RI = {weight_OI.shape[1]: torch.randn(num_rows, weight_OI.shape[1]).to(dtype) for weight_OI in weights}

    def multiply() -> None:
        for weight_OI, linear in zip(weights, linears, strict=True):
            linear(x_RI[weight_OI.shape[1]])

    return multiply


def main() -> None:
    """Print the speed of each round, and the median of the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    dtype = torch.bfloat16 if VARIANTS[-1] == "avx512" else torch.float32
    made = weights()
    num_flops: int = 2 * options.rows * sum(weight_OI.numel() for weight_OI in made)
    calls = of_ours(made, options.rows, options.threads), of_torch(made, options.rows, options.threads, dtype)

    def gflops(call: Callable[[], None]) -> float:
        began_s = time.perf_counter()
        call()
        return num_flops / (time.perf_counter() - began_s) / 1e9

    sizes = f"{options.rows} rows, {options.threads} threads"
    sys.stdout.write(f"{cpu_model()}; {sizes}, {VARIANTS[-1]}, torch in {dtype}\n")
    with torch.inference_mode():
        for call in calls:
            call()
        rounds = [[gflops(call) for call in calls] for _ in range(options.rounds)]
    for ours, torchs in rounds:
        sys.stdout.write(f"ours {ours:.0f} GFLOP/s, torch {torchs:.0f}: {ours / torchs:.2f}\n")
    sys.stdout.write(f"median {median(ours / torchs for ours, torchs in rounds):.2f}\n")


if __name__ == "__main__":
    main()
