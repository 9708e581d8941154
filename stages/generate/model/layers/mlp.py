"""The dense feed-forward part of a layer. The other kind is in `experts.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from stages.generate.model.layers.activation import swiglu
from stages.generate.model.layers.linear import Linear

# T = packed tokens, E = hidden size

FeedForward: TypeAlias = Callable[[Tensor], Tensor]
"""x_TE -> y_TE, each token on its own."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gate and up in one matrix, down in the other."""

    gate_up: Linear
    down: Linear

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return y_TE."""
        return self.down(swiglu(self.gate_up(x_TE)))
