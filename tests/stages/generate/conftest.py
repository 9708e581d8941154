"""The scene of tests with an engine's loop: once on the log in memory, once on Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support import checkpoints
from support.engine_rig import Scene
from support.selection import rest_at_night

from pipeline.log.redis import RedisLog
from stages.generate.kernels import library


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """An engine sets the number of torch's threads: keep it from the other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def scene(another_log: Callable[[], RedisLog]) -> Scene:
    """An empty log without engines."""
    return Scene(another_log)


@pytest.fixture(
    params=[*rest_at_night(library.available()), "torch", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes in the engines of a test: the kernels that this machine can use, torch, and torch on a GPU."""
    chosen: str = request.param
    if chosen == "cuda":
        monkeypatch.setattr(checkpoints, "DEVICE", torch.device("cuda"))
        chosen = "torch"
    monkeypatch.setattr(checkpoints, "KERNELS", chosen)
    return chosen
