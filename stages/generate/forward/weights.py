"""Weights from the file into their place: tensor by tensor, cast on the way, q|k|v and gate|up each in one matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from stages.generate.model.checkpoint import WEIGHTS_FILE
from stages.generate.model.spec import ModelSpec, tensor_shapes

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}

Progress = Callable[[int, int], None]
"""(bytes in place, bytes in all)"""


def load_weights(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> dict[str, Tensor]:
    """Return the weights by their names in the checkpoint, with `qkv_proj` and `gate_up_proj` for what is fused.

    At no time is there more than the result and the one tensor that is being copied. The folder was checked before.
    """
    shapes = tensor_shapes(spec)
    places: dict[str, tuple[str, int]] = {}  # name in the file -> fused name, first row
    num_rows: dict[str, int] = {}
    for name, shape in shapes.items():
        fused = _fused_name(name)
        places[name] = fused, num_rows.get(fused, 0)
        num_rows[fused] = num_rows.get(fused, 0) + shape[0]
    weights: dict[str, Tensor] = {}
    total_bytes, done_bytes = (folder / WEIGHTS_FILE).stat().st_size, 0
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        for name, (fused, first) in places.items():
            source = file.get_tensor(name)
            if fused not in weights:
                weights[fused] = torch.empty((num_rows[fused], *source.shape[1:]), dtype=dtype, device=device)
            weights[fused][first : first + len(source)].copy_(source)
            done_bytes += source.nbytes
            del source  # or it would live on while the next one is read
            progress(done_bytes, total_bytes)
    progress(total_bytes, total_bytes)
    return weights


def _fused_name(name: str) -> str:
    *prefix, module, kind = name.split(".")
    return ".".join((*prefix, FUSED.get(module, module), kind))
