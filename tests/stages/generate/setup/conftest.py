"""What the tests of `resolve` share: a model, no kernels unless a test says which, and a GPU for those that ask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.devices import need_triton
from support.resolving import H100, Kernels

from stages.generate.model.config import read_spec
from stages.generate.model.spec import ModelSpec
from stages.generate.setup import resolve as resolve_module


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """None unless a test says which."""
    return Kernels(monkeypatch)


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", max_positions=512))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 with FlashInfer and Triton."""
    need_triton(torch.device("cpu"), monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(resolve_module, "why_not", lambda shape, prefill: "")
    monkeypatch.setattr(resolve_module, "load_library", lambda: SimpleNamespace(__version__="0.6.13"))
