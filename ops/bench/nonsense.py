"""A small random checkpoint that writes letters without sense, and as many as are asked for.

It serves tests and measurements that do not look at the answers: a second of numpy, 2 MB, no torch.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ops.bench.models import SEED, SPECIAL_TOKENS, STOP, Shape, made_once, write_all_but_weights
from stages.generate.model.spec import read_spec, tensor_shapes

MODEL_ID: Final = "minisgl-nonsense"
CONTEXT: Final = 4096
SHAPE: Final = Shape(
    128, 2, 4, 2, 32, 384, 256 + len(SPECIAL_TOKENS), 10_000.0, CONTEXT, tie_embeddings=False, dtype="float32"
)
"""Its tokens are the 256 bytes and the special ones."""


def ensure(parent: Path) -> Path:
    """Return the folder of the model under *parent*; write it first if it is missing."""
    return made_once(parent / MODEL_ID, write)


def write(folder: Path) -> None:
    """Write config, tokenizer and weights into *folder*."""
    vocabulary = write_all_but_weights(SHAPE, folder)
    wanted = [vocabulary[token] for token in (*string.ascii_lowercase, "Ġ", ".", ",", STOP)]
    shapes = tensor_shapes(read_spec(folder))
    save_file(_weights(shapes, wanted), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(shapes: dict[str, tuple[int, ...]], wanted: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """Return random weights that prefer the tokens *wanted*, so that the output can be read, if not understood.

    Component 0 of every embedding is large and survives the layers. The head's component 0 is positive for the wanted
    tokens and negative for all others.
    """
    generator = np.random.default_rng(SEED)
    scales = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.2}
    weights = {
        name: np.ones(shapes[name], np.float32)
        if "norm" in name
        else (generator.standard_normal(shapes[name]) * scales.get(name, 0.05)).astype(np.float32)
        for name in dict.fromkeys((*scales, *shapes))
    }
    weights["model.embed_tokens.weight"][:, 0] = 8.0
    weights["lm_head.weight"][:, 0] = -1.0
    weights["lm_head.weight"][wanted, 0] = 1.0
    return weights
