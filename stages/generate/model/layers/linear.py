"""y = W x + b. On a CPU W can be packed: brought into oneDNN's layout once, instead of at every multiplication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

# T = packed tokens, I = inputs, O = outputs

ROUNDED = ((32, 1), (128, 8), (512, 32))
"""(rows, step): up to this number of rows, the number is rounded up to a multiple of the step."""
LARGEST_STEP = 128

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x_TI, weight_OI, bias_O) -> y_TO."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight, plain or packed, and its bias; `bias_O` is None if the architecture has none."""

    weight_OI: Tensor
    bias_O: Tensor | None
    product: Product | None = None
    """Multiplies in place of torch where the weight is not packed."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return y_TO."""
        if not self.weight_OI.is_mkldnn:
            return (self.product or F.linear)(x_TI, self.weight_OI, self.bias_O)
        num_rows = len(x_TI)
        more = computed_rows(num_rows) - num_rows
        if more:
            x_TI = F.pad(x_TI, (0, 0, 0, more))
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.weight_OI, self.bias_O, "none", [], "")
        return y_TO[:num_rows]


def computed_rows(num_rows: int) -> int:
    """Return the number of rows that oneDNN multiplies for *num_rows*.

    For each number of rows and shape of weight it compiles code and keeps it, at half a megabyte and a millisecond or
    two. Decode batches have few sizes and are not rounded. Prompts come in every length and are rounded up.
    """
    step = next((step for most, step in ROUNDED if num_rows <= most), LARGEST_STEP)
    return -(-num_rows // step) * step


def pack(weight_OI: Tensor) -> Tensor:
    """Return *weight_OI* in oneDNN's blocked layout, which only `Linear` can use."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    return packed


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this torch can multiply with packed weights of *dtype* on this CPU.

    The two operations are private to torch's own compiler, so this function tries them.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x_TI, weight_OI = (torch.linspace(-1, 1, rows * 32).view(rows, 32).to(dtype) for rows in (3, 48))
    bias_O = torch.linspace(0, 1, 48).to(dtype)
    expected_TO = F.linear(x_TI.float(), weight_OI.float(), bias_O.float())
    try:
        y_TO = Linear(pack(weight_OI), bias_O)(x_TI)
    except (RuntimeError, NotImplementedError, AttributeError):  # not built in, not for this dtype, or removed
        return False
    return y_TO.dtype == dtype and torch.allclose(y_TO.float(), expected_TO, rtol=0.02, atol=0.02)
