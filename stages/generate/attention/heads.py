"""The work between a layer's projection and its attention, for a GPU, in one Triton kernel: it normalises and rotates
the query and key heads, and stores keys and values in the pages.

Only with --gpu-new: no GPU has run it yet. It rounds where FlashInfer's four kernels round (`fused.py`), after the norm
and after the rotation. It sums squares in another order, so a few results differ in their last bit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.generate.attention.fused import Beside
from stages.generate.model.layers.operations import Operations

# T = packed tokens, H = query heads, K = kv heads, N = H + K, M = H + 2 K, D = head dim, P = pages, S = slots of a page

WARPS: Final = 4
"""A program has a head for each. So a step of one token has several programs."""
GROUP = tl.constexpr(WARPS)


@triton.jit(do_not_specialize=["slots"])
def _place(
    heads,
    weights,
    table,
    slots,
    pages,
    queries,
    eps,
    side,
    num_q: tl.constexpr,
    num_kv: tl.constexpr,
    page_size: tl.constexpr,
    half: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    inside = tl.arange(0, half)[None, :]
    is_head, is_rotated = head < num_q + 2 * num_kv, head < num_q + num_kv
    at = heads + (token * (num_q + 2 * num_kv) + head) * (2 * half) + inside
    given_1, given_2 = tl.load(at, mask=is_head, other=0), tl.load(at + half, mask=is_head, other=0)
    one, two = given_1.to(tl.float32), given_2.to(tl.float32)
    if weights is not None:
        mean = tl.sum(one * one + two * two, 1)[:, None] * (0.5 / half)
        factor = tl.rsqrt(mean + eps)
        at = weights + head * (2 * half) + inside
        one = one * factor * tl.load(at, mask=is_rotated, other=0).to(tl.float32)
        two = two * factor * tl.load(at + half, mask=is_rotated, other=0).to(tl.float32)
        one, two = one.to(given_1.dtype).to(tl.float32), two.to(given_1.dtype).to(tl.float32)
    if table is not None:
        at = table + token * (2 * half) + inside
        cos, sin = tl.load(at), tl.load(at + half)
        one, two = one * cos - two * sin, two * cos + one * sin
    one = tl.where(is_rotated, one.to(given_1.dtype), given_1)
    two = tl.where(is_rotated, two.to(given_1.dtype), given_2)

    at = queries + (token * num_q + head) * (2 * half) + inside
    tl.store(at, one, mask=head < num_q)
    tl.store(at + half, two, mask=head < num_q)
    slot, kv_head = tl.load(slots + token).to(tl.int64), head - num_q
    row = ((slot // page_size) * num_kv + kv_head % num_kv) * page_size + slot % page_size
    at = pages + (kv_head // num_kv) * side + row * (2 * half) + inside
    tl.store(at, one, mask=is_head & (kv_head >= 0))
    tl.store(at + half, two, mask=is_head & (kv_head >= 0))


def place_heads(
    heads_TMD: Tensor, weight_ND: Tensor | None, eps: float, table_TD: Tensor | None, slots_T: Tensor, kv_2PKSD: Tensor
) -> Tensor:
    """See `Operations`."""
    num_tokens, num_heads, head_dim = heads_TMD.shape
    num_kv, page_size = kv_2PKSD.shape[2:4]
    num_q = num_heads - 2 * num_kv
    assert heads_TMD.is_contiguous() and kv_2PKSD.is_contiguous()
    q_THD = torch.empty(num_tokens, num_q, head_dim, dtype=heads_TMD.dtype, device=heads_TMD.device)
    sizes = {"num_q": num_q, "num_kv": num_kv, "page_size": page_size, "half": head_dim // 2}
    tensors = (heads_TMD, weight_ND, table_TD, slots_T, kv_2PKSD, q_THD)
    grid, how = (num_tokens, triton.cdiv(num_heads, WARPS)), {"num_warps": WARPS, "enable_fp_fusion": False}
    _place[grid](*tensors, eps, kv_2PKSD.stride(0), **sizes, **how)
    return q_THD


def with_heads(beside: Beside) -> Operations:
    """Return the operations of *beside* with `place_heads`, if their tables are those of FlashInfer's ropes.

    `Decoder` does not call it where it computes blocks of rows (`by_rows`): the rows that pad a block have no slots.
    """
    return replace(beside.operations, place_heads=place_heads) if "rope" in beside.modules else beside.operations
