"""When `fi` can be used, what it says when it cannot, and how it gets its kernels. Its output: test_attention.py."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import flashinfer_double
import pytest
import torch
from reported import Reported
from structlog.testing import capture_logs

from pipeline.errors import ConfigError
from stages.generate import resolve
from stages.generate.attention import AttentionShape, flashinfer
from stages.generate.attention.flashinfer import FlashInferAttention, compile_kernels, tools
from stages.generate.resolve import resolve_attention

CUDA = torch.device("cuda")
SHAPE = AttentionShape(16, 8, 128, 16, 0, torch.bfloat16, CUDA)


@dataclass(frozen=True)
class Machine:
    capability: tuple[int, int] = (9, 0)
    version: str | None = "0.6.13"
    missing: tuple[str, ...] = ()
    jit_cache: bool = False


H100 = Machine()


@pytest.mark.parametrize(
    ("machine", "shape", "reason"),
    [
        (H100, SHAPE, ""),
        (H100, replace(SHAPE, head_dim=64, dtype=torch.float16, window=100), ""),
        (H100, replace(SHAPE, head_dim=256), ""),
        (Machine((8, 0)), SHAPE, ""),
        (Machine((12, 0)), SHAPE, ""),
        (Machine(version="0.7.2"), SHAPE, ""),
        (Machine(version="1.0.0rc1"), SHAPE, ""),
        (Machine(missing=("nvcc",), jit_cache=True), SHAPE, ""),
        (Machine(missing=("nvcc", "ninja"), jit_cache=True), SHAPE, ""),
        (H100, replace(SHAPE, dtype=torch.float32), "the dtype is float32, and it computes in bfloat16 and float16"),
        (H100, replace(SHAPE, head_dim=24), "the model's head_dim is 24, and it supports 64, 128, 256"),
        (H100, replace(SHAPE, head_dim=80), "head_dim is 80"),
        (Machine((7, 5)), SHAPE, "the GPU has compute capability 7.5, and it needs 8.0"),
        (Machine((7, 0)), SHAPE, "compute capability 7.0"),
        (Machine(version=None), SHAPE, "flashinfer cannot be imported (ModuleNotFoundError"),
        (Machine(version="0.6.9"), SHAPE, "flashinfer is 0.6.9, and 0.6.13 or newer is needed"),
        (Machine(version="0.2.0.post1"), SHAPE, "flashinfer is 0.2.0.post1"),
        (Machine(missing=("nvcc",)), SHAPE, "nvcc not found, and it compiles its kernels: install nvcc"),
        (Machine(missing=("ninja",)), SHAPE, "ninja not found"),
        (Machine(missing=("nvcc", "ninja")), SHAPE, "nvcc and ninja not found"),
    ],
)
def test_auto_uses_it_where_it_can_and_else_says_why_it_is_slow(
    machine: Machine, shape: AttentionShape, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(__version__=machine.version) if machine.version else None
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
    found = {name: None if name in machine.missing else f"/usr/bin/{name}" for name in ("nvcc", "ninja")}
    monkeypatch.setattr(flashinfer, "tools", lambda: found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if machine.jit_cache else None)
    with capture_logs() as lines:
        assert resolve_attention("auto", shape) == ("reference" if reason else "fi")
    if not reason:
        assert lines == [] and resolve_attention("fi", shape) == "fi"
        return
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("attention_is_slow", "warning")
    assert reason in line["reason"]
    with pytest.raises(ConfigError) as refused:
        resolve_attention("fi", shape)
    assert str(refused.value).startswith("--attn fi: FlashInfer cannot be used here: ")
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_on_a_cpu_it_is_refused_and_auto_does_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"--attn fi: .*CUDA devices only.* pass --attn auto"):
        resolve_attention("fi", shape)
    monkeypatch.setattr(resolve, "why_not", None)
    assert resolve_attention("auto", shape) == "cpu"
    assert resolve_attention("reference", SHAPE) == "reference"


def test_kernels_are_compiled_at_start_for_dtype_head_dim_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_double)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    wanted = []

    def generate(*arguments: object) -> SimpleNamespace:
        return SimpleNamespace(name="kernels", is_compiled=False, build_and_load=lambda: wanted.append(arguments))

    monkeypatch.setattr(flashinfer_double.jit, "gen_batch_prefill_module", generate)
    for window in (0, 24):
        with capture_logs() as lines:
            FlashInferAttention(AttentionShape(4, 2, 64, 16, window, torch.float16))
        assert [line["event"] for line in lines] == ["attention_kernels_compile"]
    half = (torch.float16,) * 3
    assert wanted == [
        ("fa2", *half, torch.int32, 64, 64, 0, False, False, False),
        ("fa2", *half, torch.int32, 64, 64, 0, True, False, False),
    ]


def test_kernels_that_do_not_compile_end_the_start_with_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("Ninja build failed.\n" + "-I/x " * 2000 + "a.cu(3): error: no such type")

    kernels = SimpleNamespace(name="kernels", is_compiled=True, build_and_load=broken)
    library = SimpleNamespace(jit=SimpleNamespace(gen_batch_prefill_module=lambda *_: kernels))
    with pytest.raises(ConfigError) as refused:
        compile_kernels(library, SHAPE)
    assert str(refused.value).startswith("--attn fi: FlashInfer's kernels do not compile; ")
    assert str(refused.value).endswith("a.cu(3): error: no such type")
    assert "--attn reference" in str(refused.value) and len(str(refused.value)) < 1100


def test_ninja_beside_a_module_joins_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bin/ninja", "bin/nvcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    assert tools()["ninja"] is None
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tools() == {"nvcc": str(tmp_path / "bin/nvcc"), "ninja": str(tmp_path / "bin/ninja")}
    path = os.environ["PATH"]
    tools()
    assert os.environ["PATH"] == path == f"{tmp_path}/bin:/nowhere"


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_its_kernels_agree_with_float64_on_pages_amid_nan(page_size: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from ops.bench.gpu import parity

    report = Reported()
    parity.check_attention(report, "fi", "fi", torch.bfloat16, page_size, CUDA, "full")
    assert report.items["fi"]["ok"] is True
