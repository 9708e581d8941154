"""When `fi` can be used, what it says when it cannot, and how it gets its kernels. Its output: test_attention.py."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import zipfile
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.attention_cases import make_case
from support.flashinfer_double import Double
from support.flashinfer_signatures import EXPORTED, FOLDER, PHRASES, RECORDED, VERSIONS, read, signatures
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.attention import AttentionShape, flashinfer
from stages.generate.attention.flashinfer import FlashInferAttention, Indices, compile_kernels, tools
from stages.generate.setup import resolve
from stages.generate.setup.resolve import resolve_attention

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
        assert resolve_attention("auto", shape) == ("torch" if reason else "fi")
    if not reason and machine.capability[0] != 9:
        with pytest.raises(ConfigError, match="--attn fa,fi"):
            resolve_attention("fa,fi", shape)
    if not reason:
        assert lines == [] and resolve_attention("fi", shape) == "fi"
        assert machine.capability[0] != 9 or resolve_attention("fa,fi", shape) == "fa,fi"
        return
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("attention_is_slow", "warning")
    assert reason in line["reason"]
    for name in ("fi", "fa,fi"):
        with pytest.raises(ConfigError) as refused:
            resolve_attention(name, shape)
        assert str(refused.value).startswith(f"--attn {name}: FlashInfer cannot be used here: ")
        assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_on_a_cpu_it_is_refused_and_auto_does_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="--attn auto"):
        resolve_attention("fi", shape)
    monkeypatch.setattr(resolve, "why_not", None)
    assert [resolve_attention(name, shape) for name in ("auto", "cpu", "torch")] == ["torch"] * 3
    assert [resolve_attention(name, SHAPE) for name in ("reference", "torch", "cpu")] == ["reference", "torch", "torch"]


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
def test_kernels_are_compiled_at_start_for_dtype_head_dim_and_window(library: Double, prefill: str) -> None:
    library.compiled = False
    for window in (0, 24):
        with capture_logs() as lines:
            FlashInferAttention(AttentionShape(4, 2, 64, 16, window, torch.float16), prefill)
        assert [line["event"] for line in lines] == ["attention_kernels_compile"]
    half = (torch.float16,) * 3
    wanted = {
        (backend, *half, torch.int32, 64, 64, 0, windowed, False, False)
        for backend in ("fa2", prefill)
        for windowed in (False, True)
    }
    assert library.loaded == wanted
    assert set(library.built) == {f"kernels {kernels}" for kernels in wanted}


def test_kernels_that_are_in_the_cache_are_only_loaded(library: Double) -> None:
    with capture_logs() as lines:
        FlashInferAttention(AttentionShape(4, 2, 64, 16))
    assert (lines, library.built, len(library.loaded)) == ([], [], 1)


def test_compilation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flashinfer, "PROGRESS_S", 0.001)
    (tmp_path / "there.o").touch()
    told = threading.Event()

    def build(specs: list[object]) -> None:
        assert told.wait(30)

    def said(logger: Any, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if "done" in line:
            told.set()
        return line

    objects = [tmp_path / "there.o", tmp_path / "missing.o"]
    kernels = SimpleNamespace(
        name="kernels", is_compiled=False, get_object_paths=lambda: objects, build_and_load=lambda: None
    )
    jit = SimpleNamespace(gen_batch_prefill_module=lambda *_: kernels, build_jit_specs=build)
    with capture_logs(processors=[said]) as lines:
        compile_kernels(SimpleNamespace(jit=jit), SHAPE)
    assert (lines[1]["event"], lines[1]["done"], lines[1]["of"]) == ("attention_kernels_compile", 1, 2)


def test_kernels_that_do_not_compile_end_the_start_with_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("Ninja build failed.\n" + "-I/x " * 2000 + "a.cu(3): error: no such type")

    kernels = SimpleNamespace(name="kernels", is_compiled=True, build_and_load=broken)
    library = SimpleNamespace(jit=SimpleNamespace(gen_batch_prefill_module=lambda *_: kernels))
    with pytest.raises(ConfigError) as refused:
        compile_kernels(library, SHAPE)
    assert str(refused.value).startswith("--attn fi: FlashInfer's kernels do not compile; ")
    assert str(refused.value).endswith("a.cu(3): error: no such type")
    assert "--attn torch" in str(refused.value) and len(str(refused.value)) < 1100


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


# its calls


def make_attention(window: int = 0) -> FlashInferAttention:
    return FlashInferAttention(AttentionShape(6, 2, 20, 4, window))


def attend(attention: FlashInferAttention, rows: Sequence[tuple[int, int]], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return what is computed for random *rows* of (start, number of new tokens), and what should be."""
    case = make_case(attention._shape, rows, torch.float32, torch.device("cpu"), seed)
    output = attention.plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, case.kv_2PKSD)
    return output, case.expected()


def agrees(attention: FlashInferAttention, rows: Sequence[tuple[int, int]]) -> bool:
    output, expected = attend(attention, rows)
    return torch.allclose(output.double(), expected, atol=1e-5)


DECODE, CHUNK = [(5, 1), (9, 1), (0, 1)], [(5, 1), (2, 6)]
SIX = [(7 * row, 1) for row in range(6)]


def test_the_long_plan_is_made_once_for_each_number_of_rows_and_set_of_memory(library: Double) -> None:
    attention = make_attention()
    for rows in (SIX, SIX, SIX, [*SIX, (3, 1)], CHUNK, SIX[:4]):
        assert agrees(attention, rows)
    assert library.plans == [*["decode"] * 2, *["fast_decode_plan"] * 2, "prefill", "decode"]


@pytest.mark.parametrize("rows", [DECODE, CHUNK], ids=["decode", "prefill"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["window_left", "sm_scale", "logits_soft_cap", "q_data_type", "kv_data_type"])
def test_an_argument_with_another_name_is_refused(
    library: Double, monkeypatch: pytest.MonkeyPatch, name: str, version: str, rows: list[tuple[int, int]]
) -> None:
    library.signatures = signatures(version)
    options = flashinfer.options

    def renamed(shape: AttentionShape) -> dict[str, object]:
        given = options(shape)
        return {**given, f"{name}_": given.pop(name)}

    attention = make_attention()
    assert agrees(attention, rows) and agrees(attention, rows)  # the next step has the short plan
    for _ in range(2):
        monkeypatch.setattr(flashinfer, "options", renamed)
        with pytest.raises(TypeError, match=f"{name}_"):
            attend(attention, rows)
        attention = make_attention()


@pytest.mark.parametrize("name", Indices._fields)
@pytest.mark.parametrize("rows", [DECODE, CHUNK], ids=["decode", "prefill"])
@pytest.mark.parametrize("short", [False, True])
def test_a_wrong_index_is_noticed(
    library: Double, monkeypatch: pytest.MonkeyPatch, name: str, rows: list[tuple[int, int]], short: bool
) -> None:
    if rows is DECODE and name == "qo_indptr":
        pytest.skip("decode rows have one token each")
    attention = make_attention()
    if short:
        assert agrees(attention, rows) and agrees(attention, rows)
    right = flashinfer.indices_of

    def wrong(*arguments: Any) -> Indices:
        indices = right(*arguments)
        array = getattr(indices, name).clone()
        array[1] += 1 if name != "last_page_len" else -1
        return indices._replace(**{name: array})

    monkeypatch.setattr(flashinfer, "indices_of", wrong)
    try:
        same = agrees(attention, rows)
    except (AssertionError, IndexError, RuntimeError):  # FlashInfer or its kernels would refuse it
        return
    assert not same


def test_a_step_keeps_its_plan_while_the_next_one_is_planned(library: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = library.stream.launch
    right = flashinfer.send
    monkeypatch.setattr(flashinfer, "send", lambda *given: launch(lambda: right(*given)))
    attention = make_attention()
    for rows in (SIX, SIX, CHUNK):
        attend(attention, rows)
    for first, second in ((SIX, SIX), (SIX, DECODE), (SIX, CHUNK), (CHUNK, SIX), (CHUNK, CHUNK)):
        library.stream.is_held = True
        steps = attend(attention, first, seed=1), attend(attention, second, seed=2)
        library.stream.release()
        for output, expected in steps:
            torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_workspace_that_is_too_small_is_doubled_until_it_is_not(library: Double) -> None:
    attention = make_attention()
    library.needed_bytes = 3000
    with capture_logs() as lines:
        for rows in (DECODE, CHUNK, DECODE, CHUNK, SIX):
            assert agrees(attention, rows)
    assert [line["float_mib"] * 2**20 for line in lines] == [2048, 4096]
    library.error = "another error"
    with pytest.raises(RuntimeError, match="another error"):
        attend(attention, DECODE)


def test_the_records_are_made_from_a_wheel_with_what_a_plan_forwards_to(tmp_path: Path) -> None:
    recorded = json.loads((FOLDER / "flashinfer-0.7.2.json").read_text())
    wheel = tmp_path / "flashinfer_python-0.7.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for path, phrase in PHRASES.items():
            files.writestr(f"flashinfer/{path}", f"// {phrase}")
        for path in dict.fromkeys([*RECORDED, *EXPORTED]):
            lines = []
            for name, called in EXPORTED.get(path, {}).items():
                parameters = ", ".join(f"TensorView {each}" for each in recorded[name].split(", "))
                lines.append(f"# void {called}({parameters});")
            for name in RECORDED.get(path, ()):
                owner, _, method = name.rpartition(".")
                if owner and f"class {owner}:" not in lines:
                    lines.append(f"class {owner}:")
                inner = "    " * bool(owner)
                if method == "plan":
                    lines.append(f"{inner}def plan(self, indptr, **kwargs): return self._impl(indptr, **kwargs)")
                    method = "_impl"
                lines.append(f"{inner}def {method}({recorded[name]}) -> None: ...")
            files.writestr(f"flashinfer/{path}", "\n".join(lines))
    assert read(wheel) == recorded
