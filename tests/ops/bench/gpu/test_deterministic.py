"""The phase `deterministic`, on a CPU and on a pretended device: the bits of a request are its own, or it says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import Family, make_checkpoint
from support.flashinfer_double import Double
from support.flashinfer_signatures import VERSIONS
from support.pretend_cuda import CUDA, Pretended, pretend_cuda
from support.reported import Reported
from torch import Tensor

from ops.bench.gpu import deterministic
from ops.bench.gpu.deterministic import COMPARED, differences, logits_of, ways
from ops.bench.gpu.phase import Scale
from ops.bench.models import write_config
from stages.generate.attention import flashinfer
from stages.generate.forward import engine as engine_module
from stages.generate.forward.engine import Engine
from stages.generate.model.layers import linear
from stages.generate.model.layers.blocks import BLOCK_ROWS
from stages.generate.model.spec import ModelSpec, read_spec

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double(VERSIONS[-1])
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    return double


@pytest.fixture
def device(library: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretend_cuda(monkeypatch) as pretended:
        pretended.may_wait = True  # the logits are compared on the host
        monkeypatch.setattr(library.stream, "launch", pretended.launch)
        yield pretended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    write_config(COMPARED["toy"], path)
    return path


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return read_spec(folder)


def test_it_compares_the_bits_and_tells_the_cost() -> None:
    report = Reported()
    deterministic.run(Scale("cpu", "toy"), report)
    assert not report.wrong and not report.skipped
    for item in ("bfloat16 torch", "float32 torch"):
        assert int(str(report.items[item]["rows"])) == 27
        assert float(str(report.items[item]["preempted"])) > 0
        assert int(str(report.items[item]["differ_without"])) > 0
    assert float(str(report.items["torch decode of 3 rows"]["times_as_long"])) > 0


@pytest.mark.night
def test_on_a_gpu_a_request_has_its_bits_in_any_company(
    device: Pretended, library: Double, folder: Path, spec: ModelSpec
) -> None:
    how = {"device": CUDA, "dtype": torch.bfloat16, "attention": "fi", "deterministic": True}
    found = differences(spec, folder, "toy", **how)
    assert (found.where, found.num_rows) == ([], 27)
    assert set(library.parts) == {1} and set(library.plans) == {"prefill"}


@pytest.mark.parametrize("broken", ["nothing", "splits", "chunks", "all"])
def test_the_bits_differ_without_any_part_of_it(
    library: Double, folder: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "splits":
        monkeypatch.setattr(library, "BatchPrefillWithPagedKVCacheWrapper", partial(splitting, library))
    elif broken == "chunks":
        monkeypatch.setattr(flashinfer, "indices_of_tokens", flashinfer.indices_of)
    how: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "attention": "fi"}
    found = differences(spec, folder, "toy", deterministic=broken != "all", **how)
    assert bool(found.where) is (broken != "nothing")


def splitting(library: Double, *arguments: Any, **named: Any) -> Any:
    """Return a wrapper that splits rows."""
    wrapper: Any = Double.BatchPrefillWithPagedKVCacheWrapper(library, *arguments, **named)
    plan = wrapper.plan
    wrapper.plan = lambda *given, **options: plan(*given, **options | {"disable_split_kv": False})
    return wrapper


@pytest.mark.parametrize("family", ["qwen3", "qwen3moe"])
def test_every_matrix_has_one_number_of_rows(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: set[int] = set()
    product = torch.nn.functional.linear

    def noting(x_TI: Tensor, *weights: Tensor) -> Tensor:
        rows.add(len(x_TI))
        return product(x_TI, *weights)

    monkeypatch.setattr(linear, "F", SimpleNamespace(linear=noting))
    monkeypatch.setattr(engine_module, "packs", lambda *_: False)
    folder = make_checkpoint(tmp_path, family)
    how: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "attention": "torch"}
    found = differences(read_spec(folder), folder, "toy", deterministic=True, **how)
    assert (found.where, rows - {0}) == ([], {BLOCK_ROWS})
    differences(read_spec(folder), folder, "toy", deterministic=False, **how)
    assert len(rows) > 3


def test_with_few_pages_a_request_is_preempted(folder: Path, spec: ModelSpec) -> None:
    lengths, num_tokens = deterministic.PROMPT_LENGTHS["toy"], deterministic.NUM_TOKENS["toy"]
    *others, few = ways(lengths, num_tokens)
    sizes: dict[str, Any] = {"page_size": 16, "max_running_requests": len(lengths), "max_seq_len": 64}
    how: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "attention": "torch", "dummy": True, **sizes}
    engine = Engine(spec, folder, num_pages=others[0].num_pages, **how)
    found = [logits_of(engine, spec, way, lengths, num_tokens) for way in (*others, few)]
    assert [len(rows) for rows, _ in found] == [num_tokens * len(lengths)] * len(found)
    assert [preempted > 0 for _, preempted in found] == [False] * len(others) + [True]
