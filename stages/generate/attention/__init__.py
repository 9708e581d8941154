"""Attention over KV pages: one Protocol and several backends. `--attn` chooses one, or two: for prefill, decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from stages.generate.attention.flashinfer import FlashInferAttention
from stages.generate.attention.one_shape import OneShapeAttention
from stages.generate.attention.reference import ReferenceAttention
from stages.generate.attention.torch import TorchAttention
from stages.generate.model.attention import Attend, Attention, AttentionShape

__all__ = ["ATTENTION", "DETERMINISTIC", "WITH_SINKS", "Attend", "Attention", "AttentionShape"]

ATTENTION: Final[Mapping[str, Callable[[AttentionShape], Attention]]] = {
    "fa,fi": partial(FlashInferAttention, prefill="fa3"),
    "fi": FlashInferAttention,
    "reference": ReferenceAttention,
    "torch": lambda shape: (OneShapeAttention if shape.deterministic else TorchAttention)(shape),
}
WITH_SINKS: Final = ("reference", "torch")
"""Backends that know sinks (`Attend`)."""
DETERMINISTIC: Final = ("fi", "torch")
"""Backends that can be deterministic (`AttentionShape.deterministic`)."""
