"""A rank over gloo or NCCL, and what it computes. As a script it is the other process of a test:
`gloo_rank.py <rank> <folder> <kernels> <store> <device>`. It imports no transformers, which would take seconds.
Groups whose ranks are all in one process are made here, too.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.plans import Request, plan, shuffled_pages
from torch import Tensor

from pipeline.errors import RankLost
from stages.generate.collectives import Collectives, GlooCollectives, NcclCollectives
from stages.generate.forward.engine import Engine
from stages.generate.model.config import read_spec
from stages.generate.ranks.channel import PATIENCE_S, connect
from stages.generate.schedule.plan import BatchPlan, PlanRow

TIMEOUT = timedelta(seconds=60)


def plan_of(step: int, num_tokens: int = 1, num_pages: int = 0) -> BatchPlan:
    """Return a plan of one row, for frames."""
    return BatchPlan(step, (PlanRow(0, 0, tuple(range(num_tokens)), tuple(range(num_pages)), 0, None),), 0)


def fail(error: RankLost) -> None:
    raise error


def compute(
    rank: int, folder: Path, kernels: str, store: Path, device: str = "cpu", size: int = 2, backend: str = "gloo"
) -> list[Tensor]:
    """Compute with other processes."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        assert dist.group.WORLD is not None
        collectives = (NcclCollectives if backend == "nccl" else GlooCollectives)(dist.group.WORLD)
        return logits_of(collectives, folder, kernels, device)
    finally:
        dist.destroy_process_group()


def logits_of(collectives: Collectives, folder: Path, kernels: str, device: str = "cpu") -> list[Tensor]:
    """Return on rank 0 the logits after a prompt, in two chunks, and after a token."""
    engine = Engine(
        read_spec(folder),
        folder,
        device=torch.device(device),
        dtype=torch.float32,
        num_pages=128,
        page_size=4,
        max_running_requests=4,
        max_seq_len=160,
        kernels=kernels,
        collectives=collectives,
    )
    request, found = Request(0, list(range(5, 45)), shuffled_pages()), []
    for count in (30, 10, 1):
        step = plan(request.row(count))
        if collectives.rank:
            engine.follow(step)
        elif step.rows[0].sample is not None:
            found.append(engine.logits(step).cpu())
        else:
            engine.forward(step)
        request.tokens += [7] * (request.computed == len(request.tokens))
    return found


def memory_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it


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


if __name__ == "__main__":
    compute(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
