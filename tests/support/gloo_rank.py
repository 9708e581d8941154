"""A rank over gloo, and what it computes. As a script it is the other process of a test:
`gloo_rank.py <rank> <folder> <kernels> <store>`. It imports no transformers, which would take seconds.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support.plans import Request, plan, shuffled_pages
from torch import Tensor

from stages.generate.collectives import Collectives, GlooCollectives
from stages.generate.forward.engine import Engine
from stages.generate.model.spec import read_spec

TIMEOUT = timedelta(seconds=60)


def compute(rank: int, folder: Path, kernels: str, store: Path) -> list[Tensor]:
    """Compute with another process."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=TIMEOUT)
    try:
        assert dist.group.WORLD is not None
        return logits_of(GlooCollectives(dist.group.WORLD), folder, kernels)
    finally:
        dist.destroy_process_group()


def logits_of(collectives: Collectives, folder: Path, kernels: str) -> list[Tensor]:
    """Return on rank 0 the logits after a prompt, in two chunks, and after a token."""
    engine = Engine(
        read_spec(folder),
        folder,
        device=torch.device("cpu"),
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
            found.append(engine.logits(step))
        else:
            engine.forward(step)
        request.tokens += [7] * (request.computed == len(request.tokens))
    return found


if __name__ == "__main__":
    compute(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
