"""Rotary position embedding (https://arxiv.org/abs/2104.09864), and how it is stretched for long contexts.

A rotation depends on the position alone, never on the request, because requests share pages and batches. The
frequencies of each kind are those of transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.generate.model.spec import RopeSpec

# T = packed tokens, H = heads, D = head dim, F = D / 2 frequencies


@dataclass(frozen=True, slots=True)
class Rope:
    """A rope and its values that do not depend on a step."""

    spec: RopeSpec
    exponent_F: Tensor
    """Frequency = theta ** -exponent, before it is stretched."""
    freq_F: Tensor
    """Radians per position, float32; for dynamic, those within the context of the training."""


def make_rope(spec: RopeSpec, head_dim: int, device: torch.device) -> Rope:
    """Return a rope that rotates *head_dim* dimensions of each head."""
    assert spec.kind != "longrope", "`RopeSpec.at` chooses its divisors"
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    freq_F = 1.0 / spec.theta**exponent_F
    if spec.kind == "linear":
        freq_F = freq_F / spec.factor
    elif spec.kind == "factors":
        freq_F = freq_F / torch.tensor(spec.factors, dtype=torch.float32, device=device)
    elif spec.kind == "llama3":
        freq_F = _between(freq_F / spec.factor, freq_F, _llama3_kept(spec, freq_F))
    elif spec.kind == "yarn":
        freq_F = _between(freq_F / spec.factor, freq_F, _yarn_kept(spec, head_dim).to(device))
    return Rope(spec, exponent_F, freq_F)


def rope_tables(rope: Rope, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos_T1D and sin_T1D for one step, for `apply_rope`: the first half of the sines is negated.

    Compute in float32 (bfloat16 cannot count beyond 256), and cast at the end. Compute in each step, because a table
    for 131,072 positions would take much memory and save little time.
    """
    angle_T1F = angles(rope, positions_T)[:, None]
    cos_T1F, sin_T1F = angle_T1F.cos(), angle_T1F.sin()
    cos_T1D, sin_T1D = torch.cat((cos_T1F, cos_T1F), dim=-1), torch.cat((-sin_T1F, sin_T1F), dim=-1)
    if rope.spec.attention_factor != 1.0:
        cos_T1D, sin_T1D = cos_T1D * rope.spec.attention_factor, sin_T1D * rope.spec.attention_factor
    return cos_T1D.to(dtype), sin_T1D.to(dtype)


def angles(rope: Rope, positions_T: Tensor) -> Tensor:
    """Return angle_TF in radians, float32."""
    freq = dynamic_frequencies(rope, positions_T) if rope.spec.kind == "dynamic" else rope.freq_F
    return positions_T.float()[:, None] * freq


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head, the pairing of the Hugging Face checkpoints.

    If the tables have fewer dimensions than a head, only so many are rotated, the first ones.
    """
    if (rotary_dim := cos_T1D.shape[-1]) < x_THD.shape[-1]:
        return torch.cat((apply_rope(x_THD[..., :rotary_dim], cos_T1D, sin_T1D), x_THD[..., rotary_dim:]), dim=-1)
    return torch.addcmul(x_THD * cos_T1D, x_THD.roll(x_THD.shape[-1] // 2, dims=-1), sin_T1D)


def dynamic_frequencies(rope: Rope, positions_T: Tensor) -> Tensor:
    """Return freq_TF: the token at position p has the frequencies that transformers uses for p + 1 tokens.

    So the result equals that of transformers when it computes token by token. When transformers computes a prompt at
    once that is longer than the context of the training, it uses the frequencies of the last token for all tokens. An
    engine that shares pages between requests cannot do that.
    """
    spec = rope.spec
    trained = spec.original_max_positions
    length_T = (positions_T + 1).clamp(min=trained).double()  # rounded at the end: the same in any batch
    head_dim = 2 * len(rope.exponent_F)
    stretch_T = (spec.factor * length_T / trained - (spec.factor - 1)) ** (head_dim / (head_dim - 2))
    stretched_TF = (1.0 / (spec.theta * stretch_T)[:, None] ** rope.exponent_F.double()).float()
    return stretched_TF.where(stretch_T[:, None] > 1, rope.freq_F)


def _llama3_kept(spec: RopeSpec, freq_F: Tensor) -> Tensor:
    """Return the ramp of Llama 3.1: keep waves with many turns in the training context, stretch those with few."""
    turns_F = spec.original_max_positions * freq_F / (2 * math.pi)
    return ((turns_F - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)


def _yarn_kept(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return the ramp of YaRN (https://arxiv.org/abs/2309.00071), over the dimensions. Llama 3.1's is over turns."""

    def dimension(turns: float) -> float:
        """Return the dimension whose wave makes this many *turns* in the training context."""
        return head_dim * math.log(spec.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # avoids a division by 0, as transformers does
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _between(stretched_F: Tensor, plain_F: Tensor, kept_F: Tensor) -> Tensor:
    return (1 - kept_F) * stretched_F + kept_F * plain_F
