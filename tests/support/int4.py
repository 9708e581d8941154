"""Blocks of INT4 as `kernels/blocks.c` describes them, and the weights that they mean."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

KINDS: Final = {"INT4_32": 32, "INT4_64": 64, "INT4_128": 128}
"""Kinds of blocks, and the weights of a group."""


def random_int4(kind: str, rows: int, columns: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return rows of blocks with any integers and zeros, and scales of a usual size."""
    groups = columns // KINDS[kind]
    blocks = generator.integers(0, 256, (rows, groups, 4 + KINDS[kind] // 2), np.uint8)
    scales = generator.uniform(0.001, 0.05, (rows, groups, 1)).astype(np.float16)
    blocks[..., 0:2] = scales.view(np.uint8)
    blocks[..., 2] = generator.integers(0, 17, (rows, groups))
    return blocks.reshape(rows, -1)


def int4_weights(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the weights of rows of blocks."""
    parts = blocks.reshape(len(blocks), -1, 4 + KINDS[kind] // 2)
    scales = np.ascontiguousarray(parts[..., 0:2]).view(np.float16).astype(np.float64)
    zeros = parts[..., 2:3].astype(np.float64)
    nibbles = np.stack([parts[..., 4:] & 15, parts[..., 4:] >> 4], axis=-1).reshape(*parts.shape[:2], -1)
    weights: NDArray[np.float32] = (scales * (nibbles - zeros)).astype(np.float32)
    return weights.reshape(len(blocks), -1)
