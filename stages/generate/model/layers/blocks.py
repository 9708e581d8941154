"""Computes functions a fixed number of rows at a time: then their sums do not depend on how many rows there are.

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
"""Rows of a block with `--deterministic`. A GPU reads the weights for so many rows in about the time that it takes for
one; larger blocks would make steps of few rows slower, smaller ones long prompts."""

OfRows: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Takes and returns tensors with equal numbers of rows; a row of the result depends on that row alone."""


def by_rows(num_rows: int, function: OfRows, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the result of *function* for *tensors*, called with *num_rows* rows at a time: zeros pad the last ones.

    0: with all rows at once.
    """
    if not num_rows:
        return function(*tensors)
    size = len(tensors[0])
    blocks = zip(*(torch.split(padded(each, -size % num_rows), num_rows) for each in tensors), strict=True)
    made = zip(*(function(*block) for block in blocks), strict=True)
    return tuple((torch.cat(parts) if len(parts) > 1 else parts[0])[:size] for parts in made)


def padded(tensor: Tensor, num_rows: int) -> Tensor:
    """Return *tensor* with *num_rows* rows of zeros after its own."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, num_rows)) if num_rows else tensor
