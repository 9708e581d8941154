"""Token ids to vectors."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

# T = packed tokens, V = vocabulary, E = hidden size


def embed(token_ids_T: Tensor, weight_VE: Tensor) -> Tensor:
    """Return x_TE."""
    return F.embedding(token_ids_T, weight_VE)
