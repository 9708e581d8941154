"""Packed and plain weights are the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint, make_engine

from pipeline.events import SamplingParams
from stages.generate.forward import engine as engine_module
from stages.generate.forward.engine import pack_weights, packs
from stages.generate.forward.weights import load_weights
from stages.generate.model.checkpoint import EMBEDDING, HEAD, check_folder
from stages.generate.model.layers.linear import can_pack
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

CPU = torch.device("cpu")
PLAN = BatchPlan(1, (PlanRow(0, 0, tuple(range(4, 40)), tuple(range(10)), 0, Sample(SamplingParams(), 36, ())),), 0)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen3", tie=request.param)


def test_packed_weights_give_the_logits_of_plain_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_pack(torch.float32), "or this test compares plain weights with themselves"
    packed_RV = make_engine(folder).logits(PLAN)
    monkeypatch.setattr(engine_module, "packs", lambda device, dtype: False)
    torch.testing.assert_close(packed_RV, make_engine(folder).logits(PLAN), atol=1e-4, rtol=1e-4)


def test_what_is_packed_is_packed_once_and_what_is_looked_up_stays(folder: Path) -> None:
    spec = check_folder(folder)
    weights = load_weights(spec, folder, dtype=torch.float32, device=CPU)
    names = set(weights)
    plain = {id(tensor) for tensor in weights.values()}
    pack_weights(weights)
    assert set(weights) == names | {HEAD}
    packed = {name for name, tensor in weights.items() if tensor.is_mkldnn}
    assert packed == {name for name in names if name.endswith("_proj.weight")} | {HEAD}
    assert all(id(weights[name]) in plain for name in set(weights) - packed), "biases and norms are as they were"
    assert not weights[EMBEDDING].is_mkldnn


def test_tied_embeddings_stay_in_the_file_and_the_head_alone_is_memory(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", tie=True)
    spec = check_folder(folder)
    read = load_weights(spec, folder, dtype=torch.float32, device=CPU)
    mapped = load_weights(spec, folder, dtype=torch.float32, device=CPU, map_tied=True)
    assert torch.equal(mapped[EMBEDDING], read[EMBEDDING]) and torch.equal(mapped[HEAD], read[EMBEDDING])
    assert str(folder) in Path("/proc/self/maps").read_text()
    pack_weights(mapped)
    del mapped[EMBEDDING]
    assert str(folder) not in Path("/proc/self/maps").read_text(), "packed weights need the file no more"
    cast = load_weights(spec, folder, dtype=torch.bfloat16, device=CPU, map_tied=True)
    assert torch.equal(cast[EMBEDDING], read[EMBEDDING].bfloat16()) and HEAD not in cast


def test_weights_on_a_gpu_and_of_a_dtype_that_does_not_pack_stay_plain() -> None:
    assert not packs(torch.device("cuda"), torch.float32)
    assert not packs(CPU, torch.float64)
    assert packs(CPU, torch.float32)
