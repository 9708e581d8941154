"""y = W x + b. On a CPU W can be packed: laid out once as oneDNN reads it, instead of at every multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

# T = packed tokens, I = inputs, O = outputs


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight that is multiplied with, plain or packed; `bias_O` is None where the architecture has none."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return y_TO."""
        if self.weight_OI.is_mkldnn:
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.weight_OI, self.bias_O, "none", [], "")
            return y_TO
        return F.linear(x_TI, self.weight_OI, self.bias_O)


def pack(weight_OI: Tensor) -> Tensor:
    """Return *weight_OI* in oneDNN's blocked layout, of which only `Linear` can make use."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    return packed


def can_pack(dtype: torch.dtype) -> bool:
    """Say whether this torch, on this CPU, multiplies with packed weights of *dtype*.

    The two operations are private ones that torch's own compiler uses, so they are tried instead of assumed.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x_TI, weight_OI = (torch.linspace(-1, 1, rows * 32).view(rows, 32).to(dtype) for rows in (3, 48))
    bias_O = torch.linspace(0, 1, 48).to(dtype)
    expected_TO = F.linear(x_TI.float(), weight_OI.float(), bias_O.float())
    try:
        y_TO = Linear(pack(weight_OI), bias_O)(x_TI)
    except (RuntimeError, NotImplementedError, AttributeError):  # not built in, not for this dtype, gone
        return False
    return y_TO.dtype == dtype and torch.allclose(y_TO.float(), expected_TO, rtol=0.02, atol=0.02)
