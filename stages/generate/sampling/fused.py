"""The tokens of a step on a GPU: Triton kernels that choose the tokens of `sampler`, also with top_k, top_p and min_p.

Only with --gpu-new: no GPU has run it yet. Nothing of the size of the logits is written. A greedy row reads them once,
a drawn one twice, one with top_p five times, and one with a small top_k little more than once.

The arithmetic is that of `sampler.weights`, operation by operation: products are not fused with sums, quotients are
rounded to nearest, and only integers are summed, so the order of a sum does not matter. A greedy row is drawn like all
others, see `make_draws`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.generate.batch import on_device
from stages.generate.sampling.draws import HALF_BITS, Draws

# R = rows, V = vocabulary, T = tiles of a row, B = bins, N = numbers of a row

HALF = tl.constexpr(HALF_BITS)
TILE = tl.constexpr(2048)
"""Logits that one program reads."""
BINS = tl.constexpr(2048)
MOST_BOUNDED: Final = 256
"""Largest number of tiles for which `_bound` compares all with all."""
LEVELS: Final = ((31, 20), (20, 10), (10, 0))
"""Passes of the radix select that finds the largest kept distance: how many of its lowest bits are unknown before and
after each.
"""
WANTED, PART, REST, LEAST, HIGH, LOW, DIVISOR, LAST, FOUND, NUMBERS = (tl.constexpr(place) for place in range(10))
"""Places in the numbers of a row: those of `Draws.numbers_FR`, the bits of its divisor, the bits of the largest kept
distance, and those found so far. WANTED or PART is -1 if there is no top_k or top_p.
"""


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
def _share(total, high, low):
    """Return the fraction high / 2**HALF + low / 4**HALF of a sum, rounded down: `sampler.share`."""
    upper = total >> HALF
    lower = total - (upper << HALF)
    return upper * high + ((upper * low + lower * high + ((lower * low) >> HALF)) >> HALF)


@triton.jit
def _divisor(numbers):
    return tl.load(numbers + DIVISOR).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _largest(most, num_tiles, tiles: tl.constexpr):
    every = tl.arange(0, tiles)
    return tl.max(tl.load(most + every, mask=every < num_tiles, other=float("-inf")), 0)


@triton.jit
def _logits(logits, size, tile):
    """Return the logits of a tile of this program's row, -inf beyond the end."""
    places = tile * TILE + tl.arange(0, TILE)
    at = logits + tl.program_id(0).to(tl.int64) * size
    return tl.load(at + places, mask=places < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _bits(distances):
    """Return the bits of distances without the sign of -0: a larger distance has larger bits."""
    return distances.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weighed(logits, numbers, size, tile, largest):
    """Return the bits of a tile's distances, and the weights."""
    distances = largest - _logits(logits, size, tile)
    return _bits(distances), _weights(distances, _divisor(numbers))


@triton.jit
def _kept(logits, numbers, size, tile, largest):
    """Return the weights of a tile, 0 where top_k, top_p or min_p drop the token."""
    bits, weights = _weighed(logits, numbers, size, tile, largest)
    return tl.where((bits <= tl.load(numbers + LAST)) & (weights >= tl.load(numbers + LEAST)), weights, 0)


@triton.jit
def _is_near(numbers, most, tile, largest):
    """Return whether a tile may have kept tokens of some weight. In greedy rows and with top_k few tiles have them."""
    near = largest - tl.load(most + tile)
    return (near <= 50.0 * _divisor(numbers)) & (_bits(near) <= tl.load(numbers + LAST))


@triton.jit
def _find_most(logits, most, size, num_tiles):
    """most[R, T]: the largest logit of each tile; inf if one is NaN, which `tl.max` would ignore."""
    row, tile = tl.program_id(0), tl.program_id(1)
    found = _logits(logits, size, tile)
    tl.store(most + row * num_tiles + tile, tl.max(tl.where(found == found, found, float("inf")), 0))


@triton.jit
def _bound(numbers, most, num_tiles, tiles: tl.constexpr):
    """Keep what is as near as the top_k-th of the largest logits of tiles: at least top_k tokens, in few tiles."""
    row, every = tl.program_id(0), tl.arange(0, tiles)
    numbers, wanted = numbers + row * NUMBERS, tl.load(numbers + row * NUMBERS + WANTED)
    if (wanted > 0) & (wanted <= num_tiles):
        found = tl.load(most + row * num_tiles + every, mask=every < num_tiles, other=float("-inf"))
        num_larger = tl.sum((found[None, :] > found[:, None]).to(tl.int32), 1)
        distance = tl.max(found, 0) - tl.min(tl.where(num_larger < wanted, found, float("inf")), 0)
        tl.store(numbers + LAST, _bits(distance).to(tl.int64))


@triton.jit(do_not_specialize=["before", "after"])
def _fill_bins(logits, numbers, most, bins, size, num_tiles, before, after, limit: tl.constexpr, tiles: tl.constexpr):
    """Add weights to bins[R, B], which are 0 before; for top_k, count tokens instead.

    A token counts if it is kept, its distance begins with the bits found so far, and its weight is not 0: no draw
    chooses a token of weight 0. The next bits of the distance are the number of its bin.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    numbers, most = numbers + row * NUMBERS, most + row * num_tiles
    largest = _largest(most, num_tiles, tiles)
    if (tl.load(numbers + limit) >= 0) & _is_near(numbers, most, tile, largest):
        bits, weights = _weighed(logits, numbers, size, tile, largest)
        is_in = (bits <= tl.load(numbers + LAST)) & (bits >> before == tl.load(numbers + FOUND)) & (weights > 0)
        places = row * BINS + (bits >> after & (BINS - 1))
        tl.atomic_add(bins + places, weights if limit == PART else is_in.to(tl.int64), mask=is_in, sem="relaxed")


@triton.jit(do_not_specialize=["before", "after"])
def _pick_bin(numbers, bins, before, after, limit: tl.constexpr):
    """Go on with the bits of the bin in which the nearest tokens reach what is wanted of them."""
    row, every = tl.program_id(0), tl.arange(0, BINS)
    numbers += row * NUMBERS
    if tl.load(numbers + limit) >= 0:
        amounts, wanted = tl.load(bins + row * BINS + every), tl.load(numbers + WANTED)
        if limit == PART:
            share = _share(tl.sum(amounts, 0), tl.load(numbers + PART), tl.load(numbers + REST))
            wanted = tl.where(before == 31, share, wanted)
        place = tl.minimum(tl.sum((tl.cumsum(amounts, 0) < wanted).to(tl.int32), 0), BINS - 1)
        found = tl.load(numbers + FOUND) << (before - after) | place
        tl.store(numbers + WANTED, wanted - tl.sum(tl.where(every < place, amounts, 0), 0))
        tl.store(numbers + FOUND, tl.where(after == 0, 0, found))
        tl.store(numbers + LAST, tl.where(after == 0, found, tl.load(numbers + LAST)))


@triton.jit
def _sum_tiles(logits, numbers, most, sums, size, num_tiles, tiles: tl.constexpr):
    """sums[R, T]: the kept weights of each tile."""
    row, tile = tl.program_id(0), tl.program_id(1)
    numbers, most = numbers + row * NUMBERS, most + row * num_tiles
    largest = _largest(most, num_tiles, tiles)
    tl.store(sums + row * num_tiles + tile, 0)
    if _is_near(numbers, most, tile, largest):
        tl.store(sums + row * num_tiles + tile, tl.sum(_kept(logits, numbers, size, tile, largest), 0))


@triton.jit
def _choose(logits, numbers, most, sums, tokens, size, num_tiles, tiles: tl.constexpr):
    """tokens[R]: where the running sum of the kept weights first passes the row's share of all of them."""
    row, every = tl.program_id(0), tl.arange(0, tiles)
    numbers, is_tile = numbers + row * NUMBERS, every < num_tiles
    sums_T = tl.load(sums + row * num_tiles + every, mask=is_tile, other=0)
    before = _share(tl.sum(sums_T, 0), tl.load(numbers + HIGH), tl.load(numbers + LOW))
    passed = (tl.cumsum(sums_T, 0) <= before) & is_tile
    tile = tl.sum(passed.to(tl.int32), 0)
    before -= tl.sum(tl.where(every < tile, sums_T, 0), 0)

    largest = _largest(most + row * num_tiles, num_tiles, tiles)
    ends = tl.cumsum(_kept(logits, numbers, size, tile, largest), 0)
    token = tile * TILE + tl.sum((ends <= before).to(tl.int32), 0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(tokens + row, tl.where(is_finite, token.to(tl.int64), -1))


def choose_all(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Return tokens_R, int64: NOT_A_NUMBER where a logit is NaN or the largest one is infinite."""
    assert logits_RV.is_contiguous()
    device, (num_rows, size) = logits_RV.device, logits_RV.shape
    numbers_RN = np.zeros((num_rows, int(NUMBERS)), np.int64)
    numbers_RN[:, :6], numbers_RN[:, 6] = draws.numbers_FR.T, draws.divisors_R.view(np.int32)
    numbers_RN[:, 7] = 2**31 - 1
    top_k_R, top_p_R = numbers_RN[:, 0], numbers_RN[:, 1]
    top_k_R[(top_k_R == 0) | (top_k_R >= size)] = -1
    top_p_R[top_p_R == 2**HALF_BITS] = -1
    limits = [limit for limit, of_R in enumerate((top_k_R, top_p_R)) if (of_R >= 0).any()]
    numbers, num_tiles = on_device(numbers_RN, device), triton.cdiv(size, int(TILE))
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    most_RT = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    sums_RT = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device)
    bins_PRB = torch.zeros(len(limits) * len(LEVELS), num_rows, int(BINS), dtype=torch.int64, device=device)
    each, alone, how = (num_rows, num_tiles), (num_rows,), {"num_warps": 8, "enable_fp_fusion": False}
    tiled = {"tiles": triton.next_power_of_2(num_tiles), **how}
    _find_most[each](logits_RV, most_RT, size, num_tiles, **how)
    if 0 in limits and num_tiles <= MOST_BOUNDED:
        _bound[alone](numbers, most_RT, num_tiles, **tiled)
    for bins_RB, (limit, level) in zip(bins_PRB, itertools.product(limits, LEVELS), strict=True):
        _fill_bins[each](logits_RV, numbers, most_RT, bins_RB, size, num_tiles, *level, limit=limit, **tiled)
        _pick_bin[alone](numbers, bins_RB, *level, limit=limit, **how)
    _sum_tiles[each](logits_RV, numbers, most_RT, sums_RT, size, num_tiles, **tiled)
    _choose[alone](logits_RV, numbers, most_RT, sums_RT, tokens_R, size, num_tiles, **tiled)
    return tokens_R
