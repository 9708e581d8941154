"""The ranks of one model as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from support.checkpoints import make_engine
from torch import Tensor

from stages.generate.collectives import sum_in_order
from stages.generate.schedule.plan import BatchPlan, Computed

T = TypeVar("T")
TIMEOUT_S = 20.0


class Meeting:
    """Where threads show each other their tensors. It breaks for all of them when one fails."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=TIMEOUT_S)
        self._shown: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return copies of what all ranks show."""
        self._shown[rank] = x
        self.barrier.wait()
        copies = [shown.clone() for shown in self._shown]
        self.barrier.wait()
        return copies


class ThreadCollectives:
    """See `Collectives`. Sums as `GlooCollectives` does."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, meeting.barrier.parties
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._meeting.exchange(self.rank, x))

    def gather_to_0(self, x: Tensor) -> Tensor:
        parts = self._meeting.exchange(self.rank, x)
        return x if self.rank else torch.cat(parts, dim=-1)


class Ranks:
    """Engines that compute one model together. It is called as an engine is."""

    def __init__(self, size: int, folder: Path, dtype: str = "auto", **more: Any) -> None:
        self._meeting = Meeting(size)
        self.engines = [
            make_engine(folder, dtype, collectives=ThreadCollectives(rank, self._meeting), **more)
            for rank in range(size)
        ]

    def logits(self, plan: BatchPlan) -> Tensor:
        return self._together(self.engines[0].logits, plan)

    def forward(self, plan: BatchPlan) -> Computed:
        return self._together(self.engines[0].forward, plan)

    def _together(self, call: Callable[[BatchPlan], T], plan: BatchPlan) -> T:
        self._meeting.barrier.reset()
        with ThreadPoolExecutor(len(self.engines)) as threads:
            first = threads.submit(self._watched, call, plan)
            others = [threads.submit(self._watched, engine.follow, plan) for engine in self.engines[1:]]
        all_of_them: list[Future[Any]] = [first, *others]
        for failed in (each.exception() for each in all_of_them):
            if failed is not None and not isinstance(
                failed, BrokenBarrierError
            ):  # which follows from another's failure
                raise failed
        return first.result()

    def _watched(self, call: Callable[[BatchPlan], T], plan: BatchPlan) -> T:
        try:
            return call(plan)
        except BaseException:
            self._meeting.barrier.abort()
            raise
