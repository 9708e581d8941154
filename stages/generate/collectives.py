"""Operations that all ranks of a model do together in a step. Each has a part of every matrix (`forward/weights.py`).

All ranks call the same methods in the same order, with tensors of the same shape. Does not know how ranks find each
other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import RankLost


class Collectives(Protocol):
    """One rank's connection to the others."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of *x* over all ranks, with the same bits on each. The caller may write to it."""
        ...

    def gather_to_0(self, x: Tensor) -> Tensor:
        """Return on rank 0 the tensors of all ranks, in order, side by side along the last dimension.

        Another rank gets *x* back, which is only its own part.
        """
        ...


class Alone:
    """The collectives of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return *x*."""
        return x

    def gather_to_0(self, x: Tensor) -> Tensor:
        """Return *x*."""
        return x


ALONE: Final = Alone()


class GlooCollectives:
    """Collectives of processes, for tensors on a CPU.

    A ring's sums depend on the size of the tensor, so on the batch. Here each rank gathers all parts and adds them in
    the order of the ranks. So for one number of ranks a token has the same bits in any batch.
    """

    def __init__(self, group: Any) -> None:
        """Use *group*, a gloo group of the caller. The methods raise RankLost when a rank is gone."""
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.num_gathered = 0
        """Number of times that `gather_to_0` has returned."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        finish([self._group.allgather([parts], [x])])
        return sum_in_order(parts)

    def gather_to_0(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        finish([self._group.gather([parts] if parts else [], [x], options)])
        self.num_gathered += 1
        return torch.cat(parts, dim=-1) if parts else x


class NcclCollectives(GlooCollectives):
    """Collectives of processes, for tensors on GPUs, over an NCCL group. The devices wait, not the hosts.

    NCCL chooses the order of a sum by its size. With torch on a GPU, tokens depend on the batch anyway.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives`. The sum replaces *x*."""
        finish([self._group.allreduce([x], dist.AllreduceOptions())])
        return x


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of *parts* in their dtype. Sum in float32, in order; the first part may be overwritten."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def finish(works: Sequence[dist.Work]) -> None:
    """Wait until *works* are done.

    Raises:
        RankLost: A rank is gone, or did not take its part in time.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise RankLost(f"another rank of the engine is gone: {told(error)}") from error


def told(error: RuntimeError) -> str:
    """Return gloo's message without the place in its source and its advice."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". This is typically")[0].strip()
