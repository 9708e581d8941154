"""y = W x + b. On a CPU W can be packed: laid out once as oneDNN reads it, instead of at every multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

# T = packed tokens, I = inputs, O = outputs

ROUNDED = ((32, 1), (128, 8), (512, 32))
"""(rows, step): up to so many rows their number is rounded up to a multiple of the step."""
LARGEST_STEP = 128


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight that is multiplied with, plain or packed; `bias_O` is None where the architecture has none."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return y_TO."""
        if not self.weight_OI.is_mkldnn:
            return F.linear(x_TI, self.weight_OI, self.bias_O)
        num_rows = len(x_TI)
        more = computed_rows(num_rows) - num_rows
        if more:
            x_TI = F.pad(x_TI, (0, 0, 0, more))
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.weight_OI, self.bias_O, "none", [], "")
        return y_TO[:num_rows]


def computed_rows(num_rows: int) -> int:
    """Return how many rows oneDNN is given to multiply *num_rows*.

    It compiles code for each number of rows that it sees, for each shape of weight, and keeps it: half a megabyte and a
    millisecond or two. Decode batches are few, and exact; prompts come in every length, and are rounded up.
    """
    step = next((step for most, step in ROUNDED if num_rows <= most), LARGEST_STEP)
    return -(-num_rows // step) * step


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
