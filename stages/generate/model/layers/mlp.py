"""The dense feed-forward part of a layer. The other kind is in `experts.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.model.layers.linear import Linear

# T = packed tokens, E = hidden size, I = intermediate size, O = 2 I

FeedForward: TypeAlias = Callable[[Tensor], Tensor]
"""x_TE -> y_TE, each token on its own."""


def gated(gate_up_TO: Tensor) -> Tensor:
    """Return silu(gate) * up, y_TI."""
    gate_TI, up_TI = gate_up_TO.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def gated_by_gelu(gate_up_TO: Tensor) -> Tensor:
    """Return gelu(gate) * up, y_TI, with tanh in place of the error function."""
    gate_TI, up_TI = gate_up_TO.chunk(2, dim=-1)
    return F.gelu(gate_TI, approximate="tanh") * up_TI


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gate and up in one matrix, down in the other: SwiGLU or GeGLU (https://arxiv.org/abs/2002.05202)."""

    gate_up: Linear
    down: Linear
    gated: Callable[[Tensor], Tensor] = gated

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return y_TE."""
        return self.down(self.gated(self.gate_up(x_TE)))
