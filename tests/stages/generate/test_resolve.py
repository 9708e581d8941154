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
from stages.generate.resolve import default_threads, resolve

CPU = EngineConfig(device="cpu")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", max_positions=512))


def test_auto_on_a_cpu(spec: ModelSpec) -> None:
    settings = resolve(CPU, spec)
    assert (settings.device.type, settings.dtype, settings.attention, settings.page_size) == (
        "cpu",
        torch.float32,
        "cpu",
        64,
    )
    limits = settings.limits
    assert (limits.context, limits.max_prefill_length, limits.mixed_prefill_length) == (512, 2048, 16)
    assert limits.mixed_prefill_per_request == 2
    assert limits.vocab_size == spec.vocab_size


def test_a_budget_beside_streams_that_was_given_does_not_grow_with_them(spec: ModelSpec) -> None:
    limits = resolve(replace(CPU, mixed_prefill_length=100), spec).limits
    assert (limits.mixed_prefill_length, limits.mixed_prefill_per_request) == (100, 0)


def test_a_small_budget_bounds_the_steps_beside_streams_too(spec: ModelSpec) -> None:
    limits = resolve(replace(CPU, max_prefill_length=8), spec).limits
    assert [limits.prefill_budget(streams, 9) for streams in (0, 1, 8)] == [8, 8, 8]


def test_the_served_context_is_what_model_flag_and_cache_allow_at_most(spec: ModelSpec) -> None:
    assert resolve(replace(CPU, max_seq_len=100), spec).limits.context == 100
    assert resolve(replace(CPU, num_pages=2, page_size=16), spec).limits.context == 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CPU, max_seq_len=513), "the model knows 512 positions"),
        (replace(CPU, num_pages=4, memory_ratio=0.5), "pass one of them"),
    ],
)
def test_what_does_not_go_together_is_refused(spec: ModelSpec, config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config, spec)


def test_cuda_without_cuda_is_refused(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        resolve(EngineConfig(device="cuda"), spec)


def test_attention_for_a_cpu_is_refused_on_cuda(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="--attn cpu computes on a CPU"):
        resolve(EngineConfig(device="cuda", attention="cpu", num_pages=4), spec)


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
