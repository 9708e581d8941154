"""The dense feed-forward part of a layer. The other kind is in `experts.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.model.layers.linear import Linear

# T = packed tokens, E = hidden size

FeedForward: TypeAlias = Callable[[Tensor], Tensor]
"""x_TE -> y_TE, each token on its own."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gate and up in one matrix, down in the other: SwiGLU (https://arxiv.org/abs/2002.05202)."""

    gate_up: Linear
    down: Linear

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return y_TE."""
        gate, up = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
