"""The activation of the feed-forward part."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of the two halves of the last dimension (https://arxiv.org/abs/2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
