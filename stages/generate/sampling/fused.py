"""The draw of rows without top_k and top_p, for a GPU: three Triton kernels that choose the tokens of `sampler`.

Only with --gpu-new: no GPU has run it yet. The logits are read twice, and nothing of their size is written.

The arithmetic is that of `sampler.weights`, operation by operation: products are not fused with sums, quotients are
rounded to nearest, and only integers are summed, so the order of a sum does not matter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.generate.batch import on_device
from stages.generate.sampling.draws import HALF_BITS, Draws

# R = rows of the logits, X = rows that are drawn, V = vocabulary, T = tiles of a row

TILE: Final = 2048
"""Number of logits that one program reads."""
WARPS: Final = 8
LEAST, HIGH, LOW, ROW, DIVISOR = (tl.constexpr(place) for place in (3, 4, 5, 6, 7))
"""Places in the numbers of a row: those of `Draws.numbers_FR`, its row in the logits, and the bits of its divisor."""


@triton.jit
def _rounded(x):
    """Return x >= 0 rounded to a whole number, halves to even. From 2**23 on, every float32 is whole."""
    return tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x)


@triton.jit
def _weights(distances, divisor):
    """Return rint(2**(40 - distance / divisor)) as int64: `sampler.weights`."""
    halvings = tl.minimum(tl.div_rn(distances, divisor), 50.0)
    whole = _rounded(halvings)
    part = whole - halvings
    power = part * 0.0013264729641377926
    power = (power + 0.009671512991189957) * part
    power = (power + 0.05550733581185341) * part
    power = (power + 0.24022242426872253) * part
    power = (power + 0.6931470036506653) * part
    power = power + 1.0
    scale = ((167 - whole.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
    return _rounded(power * scale).to(tl.int64)


@triton.jit
def _share(total, high, low, half: tl.constexpr):
    """Return the fraction high / 2**half + low / 4**half of a sum, rounded down: `sampler.share`."""
    upper = total >> half
    lower = total & ((1 << half) - 1)
    return upper * high + ((upper * low + lower * high + ((lower * low) >> half)) >> half)


@triton.jit
def _divisor(numbers, num_rows, row):
    return tl.load(numbers + DIVISOR * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _find_most(logits, numbers, most, size, num_rows, num_tiles, tile_size: tl.constexpr):
    """most[X, T]: the largest logit of each tile."""
    row, tile = tl.program_id(0), tl.program_id(1)
    places = tile * tile_size + tl.arange(0, tile_size)
    at = tl.load(numbers + ROW * num_rows + row) * size
    found = tl.load(logits + at + places, mask=places < size, other=float("-inf")).to(tl.float32)
    tl.store(most + row * num_tiles + tile, tl.max(found, 0))


@triton.jit(do_not_specialize=["num_rows"])
def _sum_tiles(logits, numbers, most, sums, size, num_rows, num_tiles, tile_size: tl.constexpr, tiles: tl.constexpr):
    """sums[X, T]: the weights of each tile."""
    row, tile = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, tiles)
    largest = tl.max(tl.load(most + row * num_tiles + every, mask=every < num_tiles, other=float("-inf")), 0)
    places = tile * tile_size + tl.arange(0, tile_size)
    at = tl.load(numbers + ROW * num_rows + row) * size
    found = tl.load(logits + at + places, mask=places < size, other=float("-inf")).to(tl.float32)
    weights = _weights(largest - found, _divisor(numbers, num_rows, row))
    least = tl.load(numbers + LEAST * num_rows + row)
    tl.store(sums + row * num_tiles + tile, tl.sum(tl.where(weights >= least, weights, 0), 0))


@triton.jit(do_not_specialize=["num_rows"])
def _choose(
    logits,
    numbers,
    most,
    sums,
    tokens,
    size,
    num_rows,
    num_tiles,
    tile_size: tl.constexpr,
    tiles: tl.constexpr,
    half: tl.constexpr,
):
    """tokens[R]: where the running sum of the weights first passes the row's share of all of them."""
    row = tl.program_id(0)
    every = tl.arange(0, tiles)
    is_tile = every < num_tiles
    sums_T = tl.load(sums + row * num_tiles + every, mask=is_tile, other=0)
    high, low = tl.load(numbers + HIGH * num_rows + row), tl.load(numbers + LOW * num_rows + row)
    before = _share(tl.sum(sums_T, 0), high, low, half)
    passed = (tl.cumsum(sums_T, 0) <= before) & is_tile
    tile = tl.minimum(tl.sum(passed.to(tl.int32), 0), num_tiles - 1)
    before -= tl.sum(tl.where(every < tile, sums_T, 0), 0)

    largest = tl.max(tl.load(most + row * num_tiles + every, mask=is_tile, other=float("-inf")), 0)
    inside = tl.arange(0, tile_size)
    places = tile * tile_size + inside
    its_row = tl.load(numbers + ROW * num_rows + row)
    found = tl.load(logits + its_row * size + places, mask=places < size, other=float("-inf")).to(tl.float32)
    weights = _weights(largest - found, _divisor(numbers, num_rows, row))
    weights = tl.where(weights >= tl.load(numbers + LEAST * num_rows + row), weights, 0)
    ends = tl.cumsum(weights, 0)
    place = tl.minimum(tl.sum((ends <= before).to(tl.int32), 0), tile_size - 1)
    token = tl.minimum(tile * tile_size + place, size - 1).to(tl.int64)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(tokens + its_row, tl.where(is_finite, token, -1))


def draw_by_all(tokens_R: Tensor, logits_RV: Tensor, rows_X: np.ndarray, draws: Draws) -> None:
    """Write the tokens, int64, of the rows *rows_X*, int64, which *draws* is about: NOT_A_NUMBER where the largest
    logit is infinite; a NaN gives any token. There is one copy to the device.
    """
    num_rows, size = len(rows_X), logits_RV.shape[1]
    numbers_8X = np.empty((8, num_rows), np.int64)
    numbers_8X[:6], numbers_8X[6], numbers_8X[7] = draws.numbers_FR, rows_X, draws.divisors_R.view(np.int32)
    numbers = on_device(numbers_8X, logits_RV.device)
    num_tiles = triton.cdiv(size, TILE)
    most_XT = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits_RV.device)
    sums_XT = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits_RV.device)
    sizes, tiles = (size, num_rows, num_tiles), triton.next_power_of_2(num_tiles)
    how = {"tile_size": TILE, "num_warps": WARPS, "enable_fp_fusion": False}
    each = (num_rows, num_tiles)
    _find_most[each](logits_RV, numbers, most_XT, *sizes, **how)
    _sum_tiles[each](logits_RV, numbers, most_XT, sums_XT, *sizes, tiles=tiles, **how)
    _choose[(num_rows,)](logits_RV, numbers, most_XT, sums_XT, tokens_R, *sizes, tiles=tiles, half=HALF_BITS, **how)
