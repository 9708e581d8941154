"""Gloo groups whose ranks are all in this process."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from pipeline.errors import RankLost
from stages.generate.ranks.channel import PATIENCE_S, connect
from stages.generate.schedule.plan import BatchPlan, PlanRow


def memory_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it


def plan_of(step: int, num_tokens: int = 1, num_pages: int = 0) -> BatchPlan:
    """Return a plan of one row, for frames."""
    return BatchPlan(step, (PlanRow(0, 0, tuple(range(num_tokens)), tuple(range(num_pages)), 0, None),), 0)


def fail(error: RankLost) -> None:
    raise error


def connected(size: int, patience_s: float = PATIENCE_S) -> list[Any]:
    """Return the ends of a group."""
    store, groups = memory_store(), dict[int, Any]()

    def come(rank: int) -> None:
        groups[rank] = connect(store, rank, size, patience_s=patience_s)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[rank] for rank in range(size)]
