"""Which weights of a model are packed for a CPU, and when. How, `model/layers/linear.py` knows."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.generate.model.checkpoint import EMBEDDING, HEAD
from stages.generate.model.layers.linear import can_pack, pack


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether weights are packed here."""
    return device.type == "cpu" and can_pack(dtype)


def pack_weights(weights: dict[str, Tensor]) -> None:
    """Replace every matrix that is multiplied with by its packed form, one after the other.

    Tied embeddings become two: rows are looked up in the one, and the head multiplies with the other.
    """
    weights[HEAD] = pack(weights.pop(HEAD, weights[EMBEDDING]))
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = pack(weights.pop(name))
