"""y = W x + b, and the lookup of rows of W."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

# T = packed tokens, I = inputs, O = outputs


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight that is multiplied with; `bias_O` is None where the architecture has none."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return y_TO."""
        return F.linear(x_TI, self.weight_OI, self.bias_O)
