"""Rotary position embedding (https://arxiv.org/abs/2104.09864), with the long-context scaling of Llama 3.1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.generate.model.spec import RopeSpec

# T = packed tokens, H = heads, D = head dim, F = D / 2 frequencies


def rope_frequencies(rope: RopeSpec, head_dim: int, device: torch.device) -> Tensor:
    """Return freq_F in float32, radians per position."""
    freq_F = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if rope.kind == "default":
        return freq_F
    # Llama 3.1: long waves are stretched by `factor`, short ones kept, between the two bounds it is blended.
    turns_F = rope.original_max_positions * freq_F / (2 * math.pi)
    keep_F = ((turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep_F) * freq_F / rope.factor + keep_F * freq_F


def rope_tables(freq_F: Tensor, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos_T1D and sin_T1D for one step; computed in float32 (bfloat16 cannot count beyond 256), cast at the end.

    Computed per step instead of looked up: a table for 131,072 positions would take more memory than it saves time.
    """
    angle_T1F = (positions_T.float()[:, None] * freq_F)[:, None]
    angle_T1D = torch.cat((angle_T1F, angle_T1F), dim=-1)
    return angle_T1D.cos().to(dtype), angle_T1D.sin().to(dtype)


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head, the pairing of the Hugging Face checkpoints."""
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D
