"""Functions of rows, computed so many rows at a time: then their sums do not depend on how many rows there are.

A library chooses how it multiplies and sums by the shape of a matrix. Here every call has one shape, so a row gets the
same bits alone and among others. It knows neither models nor attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

BLOCK_ROWS: Final = 128
"""Of `--deterministic`. A GPU reads the weights for so many rows in about the time that it takes for one; with more,
a step of few rows would be slower, with fewer a long prompt."""

OfRows: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Takes and returns tensors that have as many rows as each other; a row of the result depends on that row alone."""


def by_rows(num_rows: int, function: OfRows, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return what *function* makes of *tensors*, always of *num_rows* rows: rows of zeros pad the last ones.

    0: of all rows at once.
    """
    if not num_rows:
        return function(*tensors)
    size = len(tensors[0])
    blocks = zip(*(torch.split(padded(each, -size % num_rows), num_rows) for each in tensors), strict=True)
    made = zip(*(function(*block) for block in blocks), strict=True)
    return tuple((torch.cat(parts) if len(parts) > 1 else parts[0])[:size] for parts in made)


def padded(tensor: Tensor, num_rows: int) -> Tensor:
    """Return *tensor* with so many rows of zeros after its own."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, num_rows)) if num_rows else tensor
