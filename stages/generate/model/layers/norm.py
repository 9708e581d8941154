"""Root mean square normalisation (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return *x* normalised over its last dimension, in float32, times *weight*, which may have a row for each head."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps) * weight
