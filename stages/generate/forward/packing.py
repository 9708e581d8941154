"""Which weights of a model are packed for a CPU, and when. `model/layers/linear.py` says how."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.generate.model.checkpoint import EMBEDDING, HEAD
from stages.generate.model.layers.linear import can_pack, pack


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights are packed on this device."""
    return device.type == "cpu" and can_pack(dtype)


def pack_weights(weights: dict[str, Tensor]) -> None:
    """Replace every matrix of a linear layer by its packed form, one after the other.

    Tied embeddings become two matrices: one to look up rows in, and a packed one for the head.
    """
    weights[HEAD] = pack(weights.pop(HEAD, weights[EMBEDDING]))
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = pack(weights.pop(name))
