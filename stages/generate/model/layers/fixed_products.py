"""y = W x + b for a GPU, with `--deterministic`: a row has the same bits alone, and among others at any place.

The tiles are always the same, and the inputs are summed in segments that depend on the shape of the weight alone. With
few rows, each segment is a program of its own, so that even one row occupies a GPU, and a second kernel adds their
sums. With many rows, one program computes all segments of a tile, and adds the same sums in the same order. Both ways
run the same compiled kernel.

Only with --gpu-new: no GPU has run it yet. It relies on tensor cores that compute all rows of a tile alike.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.generate.model.layers.operations import Operations

# T = packed tokens, I = inputs, O = outputs, G = segments

DTYPES: Final = (torch.bfloat16, torch.float16)
ROWS, OUTPUTS, INPUTS = 64, 128, 64
"""Sizes of a tile. A GPU reads the weights for 64 rows in about the time that it takes for one."""
TILE_ROWS, TILE_OUTPUTS, TILE_INPUTS = (tl.constexpr(size) for size in (ROWS, OUTPUTS, INPUTS))
WARPS, STAGES = 4, 4
PROGRAMS: Final = 264
"""Programs that occupy a GPU: two for each multiprocessor of an H100."""
FEW: Final = PROGRAMS // 4
"""With fewer tiles than that, their segments are programs of their own."""
MOST_SEGMENTS, LEAST_STEPS = 16, 4
"""Of one product, and of one segment."""
SUM_TILE: Final = 1024
"""Outputs of one program that adds segments."""


@triton.jit
def _finish(total, bias, y, outputs, is_output, at, mask):
    """Add the bias, and round once."""
    if bias is not None:
        total += tl.load(bias + outputs, mask=is_output, other=0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "steps", "num_segments", "is_split"])
def _multiply(x, weight, bias, y, sums, num_outputs, num_inputs, num_rows, steps, num_segments, is_split):
    """Multiply *num_segments* segments of *steps* tiles. sums[G, T, O] get the result if it *is_split*, else y does."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    outputs = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)[None, :]
    is_row, is_output = rows < num_rows, outputs < num_outputs
    across, down = tl.arange(0, TILE_INPUTS)[None, :], tl.arange(0, TILE_INPUTS)[:, None]
    x_at = x + rows.to(tl.int64) * num_inputs + across
    weight_at = weight + outputs.to(tl.int64) * num_inputs + down
    total = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    first = tl.program_id(2) * num_segments
    for segment in range(first, first + num_segments):
        part = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
        for step in range(segment * steps, (segment + 1) * steps):
            begin = step * TILE_INPUTS  # so the compiler knows that it is aligned
            left = num_inputs - begin
            x_tile = tl.load(x_at + begin, mask=is_row & (across < left), other=0)
            weight_tile = tl.load(weight_at + begin, mask=is_output & (down < left), other=0)
            part = tl.dot(x_tile, weight_tile, part)
        total += part
    at = rows.to(tl.int64) * num_outputs + outputs
    if is_split != 0:
        tl.store(sums + first * num_rows * num_outputs + at, total, mask=is_row & is_output)
    else:
        _finish(total, bias, y, outputs, is_output, at, is_row & is_output)


@triton.jit(do_not_specialize=["num_rows"])
def _add(sums, bias, y, num_outputs, num_rows, num_segments: tl.constexpr, tile: tl.constexpr):
    """Add the segments of a row, the first one first."""
    outputs = tl.program_id(1) * tile + tl.arange(0, tile)
    is_output = outputs < num_outputs
    at = tl.program_id(0) * num_outputs + outputs
    total = tl.zeros((tile,), tl.float32)
    for segment in tl.static_range(num_segments):
        total += tl.load(sums + segment * num_rows * num_outputs + at, mask=is_output, other=0)
    _finish(total, bias, y, outputs, is_output, at, is_output)


def segments(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """Return how many segments a weight of this shape has, and how many tiles of inputs each of them."""
    tiles = triton.cdiv(num_outputs, OUTPUTS)
    wanted = min(PROGRAMS // tiles, MOST_SEGMENTS) if tiles < FEW else 1
    steps = max(triton.cdiv(triton.cdiv(num_inputs, INPUTS), wanted), LEAST_STEPS)
    return triton.cdiv(num_inputs, steps * INPUTS), steps


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """See `Operations`."""
    assert x_TI.is_contiguous() and weight_OI.is_contiguous()
    num_rows, (num_outputs, num_inputs), device = len(x_TI), weight_OI.shape, x_TI.device
    y_TO = torch.empty(num_rows, num_outputs, dtype=x_TI.dtype, device=device)
    if not num_rows:  # a step in which no row samples
        return y_TO
    num_segments, steps = segments(num_outputs, num_inputs)
    tiles = triton.cdiv(num_rows, ROWS), triton.cdiv(num_outputs, OUTPUTS)
    is_split = num_segments > 1 and tiles[0] * tiles[1] < FEW
    programs = num_segments if is_split else 1
    sums_GTO = torch.empty(is_split * programs, num_rows, num_outputs, dtype=torch.float32, device=device)
    tensors, sizes = (x_TI, weight_OI, bias_O, y_TO, sums_GTO), (num_outputs, num_inputs, num_rows, steps)
    how = {"num_warps": WARPS, "enable_fp_fusion": False}
    _multiply[(*tiles, programs)](*tensors, *sizes, num_segments // programs, int(is_split), num_stages=STAGES, **how)
    if is_split:
        grid = (num_rows, triton.cdiv(num_outputs, SUM_TILE))
        _add[grid](sums_GTO, bias_O, y_TO, num_outputs, num_rows, num_segments=num_segments, tile=SUM_TILE, **how)
    return y_TO


def with_products(operations: Operations, dtype: torch.dtype) -> Operations:
    """Return *operations* with `product`, if it computes in *dtype*."""
    return replace(operations, product=product) if dtype in DTYPES else operations
