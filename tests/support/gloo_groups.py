"""Gloo groups whose ranks are all in this process."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from stages.generate.ranks.channel import PATIENCE_S, connect


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
