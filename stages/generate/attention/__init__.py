"""Attention over KV pages: one Protocol and several backends. `--attn` chooses one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from stages.generate.attention.base import Attend, Attention, AttentionShape
from stages.generate.attention.cpu import CpuAttention
from stages.generate.attention.flashinfer import FlashInferAttention
from stages.generate.attention.reference import ReferenceAttention

__all__ = ["ATTENTION", "Attend", "Attention", "AttentionShape"]

ATTENTION: Final[Mapping[str, Callable[[AttentionShape], Attention]]] = {
    "cpu": CpuAttention,
    "fi": FlashInferAttention,
    "reference": ReferenceAttention,
}
