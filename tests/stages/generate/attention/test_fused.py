"""The decoder with FlashInfer's operations, on a double, computes what it computes with torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.checkpoints import Family, make_checkpoint, make_engine
from support.devices import DEVICES, need_flashinfer
from support.flashinfer_double import FUNCTIONS, Double
from support.flashinfer_signatures import VERSIONS
from support.plans import Request, plan, shuffled_pages
from support.pretend_cuda import CUDA, pretend_cuda
from support.ranks import Ranks
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.attention import AttentionShape, flashinfer, fused
from stages.generate.forward.engine import Engine

TOKENS = random.Random(3).choices(range(4, 480), k=60)
ALL = tuple(fused.MODULES)
CALLED = {function for functions in FUNCTIONS.values() for function in functions}
SHAPE = AttentionShape(8, 4, 64, 4, 0, torch.bfloat16, fused=True)

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    name: {"rope_type": name.partition(",")[0], "rope_theta": 1000.0, "factor": 4.0, **more}
    for name, more in {
        "default": dict[str, Any](),
        "linear": {},
        "dynamic": {},
        "llama3": LLAMA3,
        "yarn, mscale": {"original_max_position_embeddings": 16, "mscale": 1.4, "mscale_all_dim": 0.6},
    }.items()
}
FLOAT32 = 1e-5
"""The distance of logits, as a part of them, where only the order of sums differs."""


def engine_with(folder: Path, dtype: str, **more: Any) -> Engine:
    return make_engine(folder, dtype, attention="fi", kernels="torch", **more)


@torch.inference_mode()
def logits_of(engine: Engine | Ranks) -> Tensor:
    """Return the logits of a chunk that ends a prompt beside a decode row, and of decode rows."""
    pages = shuffled_pages()
    first, second = (Request(table, list(TOKENS[10 * table :]), pages) for table in range(2))
    engine.logits(plan(first.row(40)))
    engine.logits(plan(first.row(40)))
    found = []
    for step in range(4):
        first.tokens.append(7 + step)
        rows = [first.row(1)]
        if step:
            rows.append(second.row(1 if second.computed == len(second.tokens) - 1 else 30))
        found.append(engine.logits(plan(*rows)))
        if second.computed == len(second.tokens):
            second.tokens.append(30 + step)
    return torch.cat(found)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def in_float32(folder: Path) -> float:
    return distance(*(logits_of(engine_with(folder, "float32", fused=each)) for each in (True, False)))


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_every_rope_is_the_same_with_a_norm_of_heads_and_without(
    library: Double, tmp_path: Path, family: Family, kind: str
) -> None:
    folder = make_checkpoint(tmp_path, family, max_positions=40, rope=ROPES[kind])
    assert in_float32(folder) < FLOAT32
    assert set(library.modules.calls) == CALLED


@pytest.mark.parametrize("family", ["mistral", "odd", "qwen2", "qwen3", "qwen3moe"])
def test_windows_biases_and_experts_are_the_same(library: Double, tmp_path: Path, family: Family) -> None:
    """`odd` has rows that the kernel of the gate cannot read; torch computes it."""
    assert in_float32(make_checkpoint(tmp_path, family)) < FLOAT32
    assert set(library.modules.calls) == CALLED
    assert (library.modules.calls.count("silu_and_mul") > 1) is (family != "odd")  # one try


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["mistral", "qwen3", "qwen3moe"])
def test_in_a_narrow_dtype_it_is_as_near_to_float32_as_torch_is(
    library: Double, tmp_path: Path, family: Family, dtype: str
) -> None:
    folder = make_checkpoint(tmp_path, family)
    exact = logits_of(engine_with(folder, "float32", fused=False))
    ours, theirs = (distance(logits_of(engine_with(folder, dtype, fused=each)), exact) for each in (True, False))
    assert 1e-4 < ours < 1.5 * theirs < 0.15


def test_ranks_add_their_parts_before_the_norm(library: Double, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    alone = logits_of(engine_with(folder, "float32", fused=False))
    ranks = Ranks(2, folder, "float32", attention="fi", kernels="torch")
    assert [engine.fused for engine in ranks.engines] == [ALL, ALL]
    assert distance(logits_of(ranks), alone) < FLOAT32


@pytest.mark.parametrize("library", VERSIONS, indirect=True)
def test_every_version_takes_the_calls(library: Double) -> None:
    assert flashinfer.FlashInferAttention(SHAPE).beside.modules == ALL
    assert set(library.modules.calls) == CALLED


def test_a_step_in_which_no_row_samples_has_no_empty_grid(library: Double, tmp_path: Path) -> None:
    engine = engine_with(make_checkpoint(tmp_path, "qwen3"), "bfloat16")
    request = Request(0, list(TOKENS), shuffled_pages())
    assert engine.logits(plan(request.row(5))).shape[0] == 0
    assert engine.logits(plan(request.row(99))).isfinite().all()


def test_with_deterministic_and_where_it_is_not_wanted_torch_computes(library: Double, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    for how in ({"deterministic": True}, {"fused": False}):
        engine = engine_with(folder, "bfloat16", **how)
        logits_of(engine)
        assert (engine.fused, library.modules.calls) == ((), [])
    assert engine_with(folder, "bfloat16").fused == ALL
    assert make_engine(folder, kernels="torch", attention="torch").fused == ()


def test_the_modules_are_compiled_with_those_of_the_attention(library: Double) -> None:
    library.compiled = False
    with capture_logs() as lines:
        flashinfer.FlashInferAttention(SHAPE)
    (line,) = lines
    assert line["kernels"].split(", ")[-4:] == library.built[-4:] == list(ALL) and len(library.built) == 5


@pytest.mark.parametrize("name", ALL)
def test_a_module_that_does_not_compile_leaves_torch_in_its_place_and_one_line_says_so(
    library: Double, tmp_path: Path, name: str
) -> None:
    library.compiled, library.modules.broken[name] = False, "x.cu(3): error: cublasLt.h: No such file"
    folder = make_checkpoint(tmp_path, "qwen3")
    with capture_logs() as lines:
        engine = engine_with(folder, "float32")
    (line,) = (line for line in lines if line["log_level"] == "warning")
    assert (line["event"], line["reason"]) == (
        "operations_are_slow",
        f"{name}: x.cu(3): error: cublasLt.h: No such file",
    )
    assert engine.fused == tuple(each for each in ALL if each != name)
    assert in_float32(folder) < FLOAT32


@pytest.mark.parametrize("num_tokens", [1, 32, 2048])
@pytest.mark.parametrize("operation", fused.TRIES)
@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_an_operation_computes_what_torch_computes(
    device: torch.device, operation: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_flashinfer(device, monkeypatch, head_dim=128)
    heads = (32, 8, 128) if device.type == "cuda" else (4, 2, 64)  # those of Qwen3-8B
    sample = fused.make_sample(
        AttentionShape(*heads, 16, 0, torch.bfloat16, device),
        num_tokens=num_tokens,
        hidden_size=128 * heads[0],
        num_gates=384 * heads[0],
    )
    tried = fused.TRIES[operation]
    description = fused.descriptions(flashinfer.load_library())[tried.module]
    beside = fused.extended(fused.IN_TORCH, tried.module, description)
    ours, theirs = (tried.prepared(each, sample)() for each in (beside, fused.IN_TORCH))
    assert fused.distance(ours, theirs) <= fused.TOLERANCE


def test_kernels_begin_early_only_on_gpus_that_can_do_so(library: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double checks what each kernel is told."""
    described = fused.descriptions(library)
    on_gpu = replace(SHAPE, device=CUDA, new=True)
    for shape, capability, expected in (
        (on_gpu, (9, 0), True),
        (on_gpu, (10, 0), True),
        (on_gpu, (8, 9), False),
        (replace(on_gpu, new=False), (9, 0), False),
    ):
        library.modules.early = expected
        with pretend_cuda(monkeypatch) as device:
            monkeypatch.setattr(library.stream, "launch", device.launch)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, seen=capability: seen)
            device.may_wait = True  # each try is compared on the host
            assert fused.load(described, shape).modules == ALL
    library.modules.early = False
    assert fused.load(described, replace(SHAPE, new=True)).modules == ALL


def scaled(name: str) -> Callable[[SimpleNamespace], None]:
    def change(given: SimpleNamespace) -> None:
        given.__dict__[name] = given.__dict__[name] * 1.1

    return change


def shifted(given: SimpleNamespace) -> None:
    given.positions = given.positions ^ 1


@pytest.mark.parametrize(
    ("function", "change"),
    [
        ("rmsnorm", scaled("weight")),
        ("fused_add_rmsnorm", scaled("weight")),
        ("append_paged_kv_cache", shifted),
        ("apply_rope_pos_ids_cos_sin_cache", scaled("cos_sin_cache")),
        ("silu_and_mul", scaled("input")),
    ],
)
def test_a_kernel_that_computes_something_else_is_found_out_at_start(
    library: Double, function: str, change: Callable[[SimpleNamespace], None]
) -> None:
    library.modules.changes[function] = change
    (module,) = (name for name, functions in FUNCTIONS.items() if function in functions)
    with capture_logs() as lines:
        beside = flashinfer.FlashInferAttention(SHAPE).beside
    assert beside.modules == tuple(each for each in ALL if each != module)
    (line,) = lines
    assert line["event"] == "operations_are_slow" and line["reason"]


def test_a_version_with_other_modules_is_told_once(library: Double) -> None:
    del library.jit.rope
    with capture_logs() as lines:
        assert flashinfer.FlashInferAttention(SHAPE).beside is fused.IN_TORCH
    (line,) = lines
    assert line["event"] == "operations_are_slow" and "rope" in line["reason"]


def test_attention_that_does_not_compile_still_ends_the_start(library: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Ninja build failed: a.cu(3): error: no such type")

    library.compiled = False
    monkeypatch.setattr(library.jit, "build_jit_specs", broken)
    generate = library.jit.gen_batch_prefill_module

    def generated(*arguments: object) -> SimpleNamespace:
        found: SimpleNamespace = generate(*arguments)
        found.build_and_load = broken
        return found

    monkeypatch.setattr(library.jit, "gen_batch_prefill_module", generated)
    with pytest.raises(ConfigError, match=r"--attn fi: .*no such type"):
        flashinfer.FlashInferAttention(SHAPE)


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "calls"), [(64, 128, 1), (65, 128, 0), (33, 256, 0)])
def test_pages_of_more_heads_than_a_block_has_threads_for_are_written_by_torch(
    library: Double, num_kv_heads: int, head_dim: int, calls: int
) -> None:
    shape = AttentionShape(num_kv_heads, num_kv_heads, head_dim, 4, 0, torch.bfloat16, fused=True)
    beside = flashinfer.FlashInferAttention(shape).beside
    assert beside.modules == ALL
    assert library.modules.calls.count("append_paged_kv_cache") == calls
