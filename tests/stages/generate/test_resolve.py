"""`auto` becomes a value in one place, and what does not go together is refused with the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import make_checkpoint

from pipeline.errors import ConfigError
from stages.generate import resolve as resolve_module
from stages.generate.config import EngineConfig
from stages.generate.model.spec import ModelSpec, read_spec
from stages.generate.resolve import Settings, default_threads, resolve, resolve_dtype
from stages.generate.schedule.schedule import ScheduleLimits

CPU = EngineConfig(device="cpu")


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


def test_dtype_and_device_are_the_numerics(spec: ModelSpec) -> None:
    assert resolve(replace(CPU, dtype="bfloat16"), spec).numerics == "bfloat16/cpu"
    assert resolve(replace(CPU, dtype="float32"), spec).numerics == "float32/cpu"


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
    monkeypatch.setattr(resolve_module, "available_cores", lambda: cores)
    assert default_threads() == threads


def test_the_usual_variable_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "as torch understood it")
    assert default_threads() == torch.get_num_threads()
