"""The phase `flashinfer` on a double that computes what it is told to, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import flashinfer_double
from support.reported import Reported
from torch import Tensor

from ops.bench.gpu import flashinfer, flashinfer_build
from ops.bench.gpu.capture import Captured
from ops.bench.gpu.phase import Scale, Skip
from stages.generate.attention import fused

TOY = Scale("cpu", "toy")


def fake_capture(call: Callable[[], object], device: torch.device) -> Captured:
    call()
    return Captured(call)


def test_without_a_gpu_it_is_skipped_with_the_reason() -> None:
    with pytest.raises(Skip, match="CUDA"):
        flashinfer.run(TOY, Reported())


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(Skip, match=r"flashinfer cannot be imported .ModuleNotFoundError.*missing: flashinfer"):
        flashinfer.import_library()


def test_right_attention_passes_and_a_cpu_skips_the_graphs() -> None:
    report = Reported()
    flashinfer.measure(flashinfer_double.Double(), flashinfer.BUILDS, TOY, report)
    assert not report.wrong
    assert set(report.skipped) == {"graph of decode, 1 rows", "graph of decode, 3 rows"}
    assert report.items["decode, head_dim 128, pages of 64"]["ok"] is True


@pytest.mark.night
def test_graphs_are_compared_with_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "capture", fake_capture)
    report = Reported()
    flashinfer.measure(flashinfer_double.Double(), flashinfer.BUILDS, TOY, report)
    assert not report.wrong and not report.skipped
    assert report.items["graph of decode, 3 rows"]["replay_is_eager_at_other_lengths"] is True


@pytest.mark.night
def test_a_graph_that_keeps_the_first_lengths_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(call: Callable[[], Tensor], device: torch.device) -> Captured:
        out = call()
        kept = out.clone()
        return Captured(lambda: out.copy_(kept))

    monkeypatch.setattr(flashinfer, "capture", frozen)
    report = Reported()
    flashinfer.measure(flashinfer_double.Double(), flashinfer.BUILDS, TOY, report)
    assert set(report.wrong) == {"graph of decode, 1 rows", "graph of decode, 3 rows"}


@pytest.mark.night
def test_a_window_that_is_one_token_too_wide_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attend: Callable[..., Tensor] = flashinfer_double._attend

    def wide(*arguments: Any) -> Tensor:
        *before, window_left, parts = arguments
        return attend(*before, window_left + 1 if window_left >= 0 else -1, parts)

    monkeypatch.setattr(flashinfer_double, "_attend", wide)
    report = Reported()
    flashinfer.check_all(flashinfer_double.Double(), [(64, True), (64, False)], [(64, True), (64, False)], TOY, report)
    assert report.wrong and all("windowed" in item for item in report.wrong)


def test_what_was_not_compiled_is_skipped_by_name() -> None:
    report = Reported()
    flashinfer.check_all(flashinfer_double.Double(), [(64, True)], [], TOY, report)
    assert set(report.skipped.values()) == {"the module for head_dim 64 with a window was not compiled"}
    report = Reported()
    flashinfer.measure(flashinfer_double.Double(), [], TOY, report)
    assert not report.wrong and "prefill of 48 tokens" in report.skipped


@pytest.mark.parametrize(("gib", "at_once"), [(125, 4), (64, 2), (8, 1)])
def test_as_many_modules_are_compiled_at_once_as_there_is_memory_for(
    gib: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"SC_PHYS_PAGES": gib * 2**18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", memory.__getitem__)
    assert flashinfer._builds_at_once(len(flashinfer.BUILDS)) == at_once


def test_a_module_that_does_not_compile_is_told_with_the_compilers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        head_dim = command[-2]
        if head_dim == "64":
            return subprocess.CompletedProcess(command, 0, 'noise\n{"seconds": 1.5}\n', "")
        return subprocess.CompletedProcess(command, 1, "", "x.cu(3): error: no such type\n" + "ninja\n" * 999)

    monkeypatch.setattr(subprocess, "run", broken)
    report = Reported()
    assert flashinfer.build_all(((64, False), (128, False)), report) == [(64, False)]
    assert report.items["jit head_dim 64"]["seconds"] == 1.5
    assert "no such type" in str(report.wrong["jit head_dim 128"]["error"])
    assert "no such type" in str(report.wrong["jit norm"]["error"])


@pytest.mark.night
def test_an_operation_whose_module_does_not_compile_is_skipped_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = flashinfer_double.Double()
    library.modules.broken["norm"] = "x.cu(3): error: cublasLt.h: No such file"
    said = flashinfer_build.build_operations(fused.descriptions(library))
    assert said["norm"] == {"ok": False, "error": library.modules.broken["norm"]} and said["rope"]["ok"] is True
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, json.dumps(said), "")
    )
    report = Reported()
    flashinfer.build_all((), report)
    assert set(report.wrong) == {"jit norm"}
    generate = library.jit.norm.gen_norm_module
    library.jit.norm.gen_norm_module = lambda: SimpleNamespace(**{**vars(generate()), "is_compiled": False})
    report = Reported()
    flashinfer.measure(library, flashinfer.BUILDS, TOY, report)
    skipped = {f"{name}, 3 tokens" for name in ("rmsnorm", "fused_add_rmsnorm", "rmsnorm of heads")}
    assert not report.wrong and skipped < set(report.skipped)
    rope = report.items["apply_rope_with_cos_sin_cache, 3 tokens"]
    assert rope["ok"] is True and float(str(rope["us"])) > 0 and float(str(rope["torch_us"])) > 0


@pytest.mark.night
def test_an_operation_that_is_wrong_is_found_out() -> None:
    def scaled(given: SimpleNamespace) -> None:
        given.input = given.input * 1.1

    library = flashinfer_double.Double()
    library.modules.changes["silu_and_mul"] = scaled
    report = Reported()
    flashinfer.measure(library, flashinfer.BUILDS, TOY, report)
    assert set(report.wrong) == {"silu_and_mul, 3 tokens"}
