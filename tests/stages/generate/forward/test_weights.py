"""Weights are loaded once, into their place."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file

import stages.generate.forward.weights as weights_module
from stages.generate.forward.weights import load_weights
from stages.generate.model.checkpoint import WEIGHTS_FILE
from stages.generate.model.spec import read_spec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def load(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, torch.Tensor]:
    return load_weights(read_spec(folder), folder, dtype=dtype, device=CPU, **more)


def test_fused_weights_hold_their_parts_in_order(folder: Path) -> None:
    ours, theirs = load(folder), load_file(folder / WEIGHTS_FILE)
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    q, k, v = (theirs[f"{attention}{part}_proj.weight"] for part in "qkv")
    assert torch.equal(ours[f"{attention}qkv_proj.weight"], torch.cat((q, k, v)))
    gate, up = (theirs[f"{mlp}{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(ours[f"{mlp}gate_up_proj.weight"], torch.cat((gate, up)))
    assert torch.equal(ours["model.norm.weight"], theirs["model.norm.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_take_their_own_size_and_no_more(folder: Path, dtype: torch.dtype) -> None:
    weights = load(folder, dtype)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in weights.values()}
    num_parameters = sum(tensor.numel() for tensor in load_file(folder / WEIGHTS_FILE).values())
    assert sum(storages.values()) == num_parameters * dtype.itemsize
    assert len(storages) == len(weights)


def test_one_tensor_of_the_file_is_in_memory_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched:
        def __init__(self, path: Path, framework: str) -> None:
            self._file: Any = safe_open(path, framework=framework)

        def __enter__(self) -> Watched:
            self._file.__enter__()
            return self

        def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> torch.Tensor:
            assert not [name for tensor in alive if tensor() is not None]
            tensor: torch.Tensor = self._file.get_tensor(name)
            alive.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(weights_module, "safe_open", Watched)
    load(folder)
    assert len(alive) == len(load_file(folder / WEIGHTS_FILE))


def test_progress_grows_to_the_size_of_the_file(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: seen.append((done, total)))
    size = (folder / WEIGHTS_FILE).stat().st_size
    assert seen == sorted(seen) and seen[-1] == (size, size) and len(seen) > 10
