"""Operations of a layer between its matrices, in torch. `attention/fused.py` has FlashInfer's functions for the same,
which launch fewer kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.model.layers.linear import Product
from stages.generate.model.layers.mlp import gated, gated_by_gelu
from stages.generate.model.layers.rope import Rope, apply_rope, rope_tables
from stages.generate.model.spec import ModelSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return *x* normalised over its last dimension, in float32, times *weight*.

    *weight* may have a row for each head, and be in float32 where *x* is not.
    """
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps) * weight


# T = packed tokens, E = hidden size, H = query heads, K = kv heads, N = H + K, D = head dim, I = intermediate size,
# O = 2 I


def add_norm(x_TE: Tensor, added_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Operations`."""
    x_TE = x_TE + added_TE
    return x_TE, rms_norm(x_TE, weight_E, eps)


def norm_heads(qk_TND: Tensor, weight_ND: Tensor, num_heads: int, eps: float) -> Tensor:
    """See `Operations`."""
    return rms_norm(qk_TND, weight_ND, eps)


def rotate(qk_TND: Tensor, num_heads: int, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
    """See `Operations`."""
    qk_TND = apply_rope(qk_TND, cos_T1D, sin_T1D)
    return qk_TND[:, :num_heads], qk_TND[:, num_heads:]


@dataclass(frozen=True, slots=True)
class Operations:
    """Functions that the decoder calls. The engine chooses them once."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    """(x_TE, weight_E, eps) -> y_TE."""
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_norm
    """(x_TE, added_TE, weight_E, eps) -> (the sum, its norm). It may write to x_TE and added_TE."""
    norm_heads: Callable[[Tensor, Tensor, int, float], Tensor] = norm_heads
    """(qk_TND, weight_ND, H, eps) -> qk_TND. All query heads have the same weights, and all kv heads, too."""
    rope_tables: Callable[[Rope, Tensor, torch.dtype], tuple[Tensor, Tensor]] = rope_tables
    """(rope, positions_T, dtype) -> the last two arguments of `rotate`, for all layers of a step."""
    rotate: Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    """(qk_TND, H, ..) -> (q_THD, k_TKD)."""
    gated: Callable[[Tensor], Tensor] = gated
    """gate_up_TO -> y_TI, the input of the last matrix of an MLP."""
    place_heads: Callable[[Tensor, Tensor | None, float, Tensor | None, Tensor, Tensor], Tensor] | None = None
    """(heads_TMD, weight_ND, eps, table_TD, slots_T, kv_2PKSD) -> q_THD, with M = H + 2 K: normalise, rotate, and write
    keys and values. table_TD: `fused.Rotation.tables`. None: the functions above, and attention writes."""
    product: Product | None = None
    """Computes the same bits for a row in any company, and replaces `by_rows`; None: torch's. See `Linear`."""


TORCH: Final = Operations()

VERSION: Final = 1
"""Increase this with every change of --gpu-new that may change a bit. It is part of an engine's numerics then."""


def suited_to(spec: ModelSpec, operations: Operations) -> Operations:
    """Return *operations* with torch's in place of those that do not compute what *spec* asks for."""
    if spec.norm_offset:
        operations = replace(operations, norm=TORCH.norm, add_norm=TORCH.add_norm, norm_heads=TORCH.norm_heads)
    if spec.activation != "silu":
        operations = replace(operations, gated=gated_by_gelu)
    if spec.rotary_dim < spec.head_dim:
        operations = replace(operations, rope_tables=TORCH.rope_tables, rotate=TORCH.rotate)
    if spec.norm_offset or spec.rotary_dim < spec.head_dim or spec.head_dim & (spec.head_dim - 1):
        operations = replace(operations, place_heads=None)
    if spec.experts.layers:
        operations = replace(operations, product=None)
    return operations
