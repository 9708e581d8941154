"""`auto` becomes a value in one place, and what does not go together is refused with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from structlog.testing import capture_logs

from pipeline.errors import ConfigError
from pipeline.flags import parse_config
from stages.generate import resolve as resolve_module
from stages.generate import worker
from stages.generate.config import EngineConfig, GenerateConfig
from stages.generate.kernels import VERSION, library
from stages.generate.model.spec import ModelSpec, read_spec
from stages.generate.resolve import Settings, default_threads, resolve, resolve_dtype
from stages.generate.schedule.schedule import ScheduleLimits

CPU = EngineConfig(device="cpu")
NONE = "this build has no kernels"
BOTH = ("avx512", "avx2")
TORCH = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability().lower()}"


class Kernels:
    """A machine on which *variants* of the kernels run, and on which torch multiplies bfloat16 slowly or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self(())

    def __call__(self, variants: Sequence[str], *, slow: bool = False) -> None:
        self._monkeypatch.setattr(library, "available", lambda: tuple(variants))
        self._monkeypatch.setattr(library, "reason", lambda name="": "the CPU lacks it" if variants else NONE)
        self._monkeypatch.setattr(resolve_module, "bfloat16_is_slow", lambda: slow)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """None unless a test says which."""
    return Kernels(monkeypatch)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", max_positions=512))


def test_auto_on_a_cpu(spec: ModelSpec) -> None:
    settings = resolve(CPU, spec)
    found = (settings.device.type, settings.dtype, settings.attention, settings.page_size)
    assert found == ("cpu", torch.float32, "cpu", 64)
    assert settings.limits == ScheduleLimits(512, 2048, 16, 256, spec.vocab_size, mixed_prefill_per_request=2)


def test_the_dtype_of_the_checkpoint_is_the_default(spec: ModelSpec) -> None:
    narrow = replace(spec, dtype="bfloat16")
    assert [resolve_dtype(narrow, name) for name in ("auto", "float32")] == [torch.bfloat16, torch.float32]


def test_a_budget_beside_streams_that_was_given_does_not_grow_with_them(spec: ModelSpec) -> None:
    limits = resolve(replace(CPU, mixed_prefill_length=100), spec).limits
    assert (limits.mixed_prefill_length, limits.mixed_prefill_per_request) == (100, 0)


@pytest.mark.parametrize(("invariant", "given", "paced"), [(True, 0, True), (True, 16, False), (False, 0, False)])
def test_measured_times_decide_only_where_chunks_change_no_token_and_no_length_was_given(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, *, invariant: bool, given: int, paced: bool
) -> None:
    monkeypatch.setattr(Settings, "batch_invariant", invariant)
    assert resolve(replace(CPU, mixed_prefill_length=given), spec).paced is paced


def test_a_small_budget_bounds_the_steps_beside_streams_too(spec: ModelSpec) -> None:
    limits = resolve(replace(CPU, max_prefill_length=8), spec).limits
    assert [limits.prefill_budget(streams, 9) for streams in (0, 1, 8)] == [8, 8, 8]


def test_the_served_context_is_what_model_flag_and_cache_allow_at_most(spec: ModelSpec) -> None:
    assert resolve(replace(CPU, max_seq_len=100), spec).limits.context == 100
    assert resolve(replace(CPU, num_pages=2, page_size=16), spec).limits.context == 32


def test_the_flag_that_bounds_the_served_context_is_known(spec: ModelSpec) -> None:
    assert resolve(replace(CPU, max_seq_len=100), spec).context_flag == "--max-seq-len"
    assert resolve(replace(CPU, num_pages=2, page_size=16), spec).context_flag == "--num-pages"


@pytest.mark.parametrize(
    ("variants", "options", "chosen", "attention"),
    [
        ((), {}, "torch", "cpu"),
        (("avx2",), {}, "avx2", "kernels"),
        (BOTH, {}, "avx512", "kernels"),
        (BOTH, {"kernels": "avx512"}, "avx512", "kernels"),
        (BOTH, {"kernels": "avx2"}, "avx2", "kernels"),
        (BOTH, {"kernels": "avx2", "quantization": "int8"}, "avx2", "kernels"),
        (BOTH, {"quantization": "int8"}, "avx512", "kernels"),
        (BOTH, {"kernels": "torch"}, "torch", "cpu"),
        (BOTH, {"kernels": "torch", "attention": "reference"}, "torch", "reference"),
        (BOTH, {"attention": "cpu"}, "torch", "cpu"),
        (BOTH, {"attention": "reference"}, "torch", "reference"),
    ],
    ids=str,
)
def test_the_kernels_compute_unless_a_flag_names_torch_or_its_attention(
    variants: Sequence[str], options: dict[str, Any], chosen: str, attention: str, spec: ModelSpec, kernels: Kernels
) -> None:
    kernels(variants)
    settings = resolve(replace(CPU, **options), spec)
    assert (settings.kernels, settings.attention) == (chosen, attention)
    assert settings.quantization == options.get("quantization", "none")
    assert settings.batch_invariant is (chosen != "torch")
    assert settings.why_torch == ("" if variants else NONE)


def test_a_gpu_needs_no_kernels(spec: ModelSpec, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels(BOTH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = resolve(EngineConfig(attention="reference", num_pages=4), spec)
    assert (settings.kernels, settings.why_torch, settings.batch_invariant) == ("torch", "", False)


INT8, AVX512 = "--quantization int8", "--kernels avx512"


@pytest.mark.parametrize(
    ("variants", "options", "message"),
    [
        ((), {"kernels": "avx2"}, f"--kernels avx2: these kernels cannot run here: {NONE}; pass --kernels auto"),
        (
            ("avx2",),
            {"kernels": "avx512"},
            f"{AVX512}: these kernels cannot run here: the CPU lacks it; pass --kernels auto",
        ),
        ((), {"quantization": "int8"}, f"{INT8} needs the CPU kernels, and none can run here ({NONE}); leave it out"),
        (
            BOTH,
            {"quantization": "int8", "kernels": "torch"},
            f"{INT8} needs the CPU kernels, but with --kernels torch torch computes; leave one of them out",
        ),
        (
            BOTH,
            {"quantization": "int8", "attention": "cpu"},
            f"{INT8} needs the CPU kernels, but with --attn cpu torch computes; leave one of them out",
        ),
        (
            BOTH,
            {"kernels": "avx512", "attention": "reference"},
            f"{AVX512} needs the CPU kernels, but with --attn reference torch computes; leave one of them out",
        ),
        (
            BOTH,
            {"kernels": "avx512", "device": "cuda"},
            f"{AVX512} is for CPUs, and this engine computes on a GPU; pass --device cpu",
        ),
        (
            BOTH,
            {"quantization": "int8", "device": "auto"},
            f"{INT8} is for CPUs, and this engine computes on a GPU; pass --device cpu",
        ),
    ],
    ids=str,
)
def test_kernels_that_cannot_compute_are_refused_in_one_line(
    variants: Sequence[str],
    options: dict[str, Any],
    message: str,
    spec: ModelSpec,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels(variants)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError) as caught:
        resolve(replace(CPU, **options), spec)
    assert str(caught.value) == message


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float16"])
def test_where_torch_is_slow_with_the_dtype_of_the_checkpoint_auto_is_float32(
    checkpoint: Any, spec: ModelSpec, kernels: Kernels
) -> None:
    narrow = replace(spec, dtype=checkpoint)

    def chosen(**options: Any) -> str:
        return resolve(replace(CPU, **options), narrow).numerics.partition("/")[0]

    kernels((), slow=False)
    assert chosen() == checkpoint
    kernels((), slow=True)
    assert (chosen(), chosen(dtype="bfloat16"), chosen(dtype="float16")) == ("float32", "bfloat16", "float16")
    kernels(BOTH, slow=True)
    assert (chosen(), chosen(kernels="torch"), chosen(attention="cpu")) == (checkpoint, "float32", "float32")


def test_the_numerics_of_kernels_are_what_their_bits_depend_on(spec: ModelSpec, kernels: Kernels) -> None:
    kernels(BOTH)
    wide = resolve(CPU, spec)
    assert (wide.batch_invariant, wide.numerics) == (True, f"float32/none/avx512/{VERSION}/64/{TORCH}")
    other = resolve(replace(CPU, dtype="bfloat16", quantization="int8", kernels="avx2", page_size=16), spec)
    assert other.numerics == f"bfloat16/int8/avx2/{VERSION}/16/{TORCH}"


def test_the_numerics_of_torch_name_its_version_and_attention(spec: ModelSpec) -> None:
    assert resolve(CPU, spec).numerics == f"float32/none/{TORCH}/cpu"
    other = resolve(replace(CPU, dtype="bfloat16", attention="reference"), spec)
    assert (other.batch_invariant, other.numerics) == (False, f"bfloat16/none/{TORCH}/reference")


def test_int8_leaves_more_memory_to_the_cache(
    spec: ModelSpec, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(BOTH)
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: 2**20)
    wide, narrow = (resolve(replace(CPU, quantization=name, page_size=1), spec).num_pages for name in ("none", "int8"))
    assert narrow > wide


@pytest.mark.parametrize(
    ("config", "has_cuda", "message"),
    [
        (replace(CPU, max_seq_len=513), False, "the model knows 512 positions"),
        (replace(CPU, num_pages=4, memory_ratio=0.5), False, "pass one of them"),
        (EngineConfig(device="cuda"), False, "torch sees no CUDA device"),
        (EngineConfig(device="cuda", attention="cpu", num_pages=4), True, "--attn cpu computes on a CPU"),
    ],
)
def test_what_does_not_go_together_is_refused(
    spec: ModelSpec, config: EngineConfig, has_cuda: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    with pytest.raises(ConfigError, match=message):
        resolve(config, spec)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (16, 12)])
def test_one_core_in_four_is_left_to_the_other_processes(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(resolve_module, "usable_cores", lambda cpus: cores)
    assert default_threads() == threads


@pytest.mark.parametrize(("text", "threads"), [("5", 5), ("6,2", 6), (" 7 ", 7)])
def test_the_usual_variable_says_how_many_threads(text: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of the same process may have set torch's own number to something else."""
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert default_threads() == threads


@pytest.mark.parametrize("text", ["as torch understood it", "", "0"])
def test_torch_knows_what_else_the_usual_variable_means(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert default_threads() == torch.get_num_threads()


def test_an_engine_says_why_torch_computes_and_in_another_dtype(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "Engine", lambda *arguments, **options: None)
    folder = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")

    def said(*flags: str) -> list[tuple[str, str]]:
        config = parse_config("stage generate", GenerateConfig, ["--device", "cpu", *flags], {})
        with capture_logs() as lines:
            loaded = worker.load(config, folder, lambda progress: None)
        assert lines[-1]["numerics"] == loaded.settings.numerics
        return [(line["event"], line["reason"]) for line in lines if "reason" in line]

    slow = "torch multiplies bfloat16 slowly on this CPU; --dtype bfloat16 takes half the memory"
    kernels((), slow=True)
    assert said() == [("kernels_unavailable", NONE), ("dtype_is_float32", slow)]
    assert said("--dtype", "bfloat16") == [("kernels_unavailable", NONE)]
    kernels(BOTH, slow=True)
    assert said() == []
    assert said("--kernels", "torch") == [("dtype_is_float32", slow)]
