"""`auto` becomes a value in one place, and what does not go together is refused with the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.resolving import BOTH, CPU, Kernels

from pipeline.errors import ConfigError
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, LocalLayers
from stages.generate.model.spec import ExpertsSpec, LayerKind, ModelSpec
from stages.generate.schedule.schedule import ScheduleLimits
from stages.generate.setup import resolve as resolve_module
from stages.generate.setup.config import EngineConfig, Targets
from stages.generate.setup.resolve import resolve, resolve_device, resolve_dtype


@pytest.mark.parametrize(
    ("device", "flags", "name", "expected"),
    [
        ("cpu", {"overlap": "auto"}, "overlap", False),
        ("cpu", {"overlap": "on"}, "overlap", True),
        ("cuda", {"overlap": "auto"}, "overlap", True),
        ("cuda", {"overlap": "off"}, "overlap", False),
        ("cpu", {"commit_interval_ms": -1}, "commit_interval_s", 0.025),
        ("cuda", {"commit_interval_ms": -1}, "commit_interval_s", 0.002),
        ("cpu", {"commit_interval_ms": 0}, "commit_interval_s", 0.0),
        ("cuda", {"commit_interval_ms": 10}, "commit_interval_s", 0.01),
    ],
)
def test_overlap_and_commits_suit_the_device_unless_a_flag_says_otherwise(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, device: str, flags: dict[str, Any], name: str, expected: float
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: 2**30)
    config = replace(CPU, device=device, attention="reference", **flags)
    assert getattr(resolve(config, spec), name) == expected


def test_auto_on_a_cpu(spec: ModelSpec) -> None:
    settings = resolve(CPU, spec)
    found = (settings.device.type, settings.dtype, settings.attention, settings.page_size)
    assert found == ("cpu", torch.float32, "torch", 64)
    assert settings.limits == ScheduleLimits(512, 2048, 16, 256, spec.vocab_size, mixed_prefill_per_request=2)


def test_the_dtype_of_the_checkpoint_is_the_default(spec: ModelSpec) -> None:
    narrow = replace(spec, dtype="bfloat16")
    assert [resolve_dtype(narrow, name) for name in ("auto", "float32")] == [torch.bfloat16, torch.float32]


def test_a_budget_beside_streams_that_was_given_does_not_grow_with_them(spec: ModelSpec) -> None:
    limits = resolve(replace(CPU, mixed_prefill_length=100), spec).limits
    assert (limits.mixed_prefill_length, limits.mixed_prefill_per_request) == (100, 0)


@pytest.mark.parametrize(
    ("variants", "flags", "targets"),
    [
        (BOTH, {}, Targets()),
        (BOTH, {"target_itl_ms": 60}, Targets.exactly(0.06)),
        (BOTH, {"mixed_prefill_length": 16}, None),
        (BOTH, {"kernels": "torch"}, None),
        ((), {}, None),
    ],
)
def test_measured_times_decide_only_where_chunks_change_no_token_and_no_length_was_given(
    spec: ModelSpec, kernels: Kernels, variants: tuple[str, ...], flags: dict[str, Any], targets: Targets | None
) -> None:
    kernels(variants)
    assert resolve(replace(CPU, **flags), spec).targets == targets


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
    ("config", "has_cuda", "message"),
    [
        (replace(CPU, max_seq_len=513), False, "the model knows 512 positions"),
        (replace(CPU, num_pages=4, memory_ratio=0.5), False, "pass one of them"),
        (replace(CPU, commit_interval_ms=1001), False, "pass at most that"),
        (replace(CPU, target_itl_ms=60), False, "--target-itl 60: with torch"),
        (replace(CPU, gpu_new=True), False, "--gpu-new: this engine computes on a CPU"),
        (
            replace(CPU, target_itl_ms=60, mixed_prefill_length=16),
            False,
            "--target-itl 60 and --mixed-prefill-length 16",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    spec: ModelSpec, config: EngineConfig, has_cuda: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    with pytest.raises(ConfigError, match=message):
        resolve(config, spec)


@pytest.mark.parametrize(
    ("cuda", "seen", "remedy"),
    [
        (None, "is built without CUDA", "install its CUDA build"),
        ("13.0", "finds no NVIDIA driver with a GPU", "check nvidia-smi"),
    ],
)
def test_a_device_that_torch_does_not_see_is_refused_with_what_is_missing(
    cuda: str | None, seen: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=f"--device cuda: torch .* {seen}; {remedy}.* --device cpu$"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp": 3}, "--tp 3: the model has .* query heads"),
        ({"tp": 2, "device": "cuda"}, "--tp: 2 ranks on this machine need 2 GPUs, but torch sees 1; pass .*--nnodes"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=reason):
        resolve(replace(CPU, **options), spec)


FI = EngineConfig(device="cuda", attention="fi", num_pages=4)
LOOP = ExpertsSpec((0,), 4, 2, 40, True)


@pytest.mark.parametrize(
    ("config", "experts", "expected"),
    [
        (FI, None, 256),
        (replace(FI, max_running_requests=20), None, 20),
        (replace(FI, max_running_requests=1000), None, 256),
        (replace(FI, graph=0), None, 0),
        (replace(FI, graph=256), None, 256),
        (replace(FI, graph=300, max_running_requests=300), None, 300),
        (
            replace(FI, graph=257),
            None,
            "only 256 requests run at once; pass at most that, or raise --max-running-requests",
        ),
        (replace(FI, attention="torch"), None, 0),
        (replace(FI, attention="torch", graph=8), None, "only --attn fi and fa,fi on CUDA can be recorded"),
        (replace(FI, tp=2), None, 0),
        (replace(FI, tp=2, graph=8), None, "several ranks (--tp) compute without graphs"),
        (replace(FI, deterministic=True), None, 0),
        (replace(FI, deterministic=True, graph=8), None, "--deterministic computes without graphs"),
        (replace(FI, deterministic=True, gpu_new=True), None, 256),
        (replace(FI, deterministic=True, gpu_new=True), LOOP, 0),
        (CPU, None, 0),
        (replace(CPU, graph=8), None, "only --attn fi and fa,fi on CUDA can be recorded"),
        (FI, LOOP, 0),
        (replace(FI, graph=8), LOOP, "experts in float32 wait for the device here, which cannot be recorded"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_decode_steps_are_recorded_where_they_can_be(
    spec: ModelSpec, config: EngineConfig, experts: ExpertsSpec | None, expected: int | str
) -> None:
    spec = spec if experts is None else replace(spec, experts=experts)
    if isinstance(expected, int):
        assert resolve(config, spec).graph == expected
        return
    with pytest.raises(ConfigError) as refused:
        resolve(config, spec)
    remedy = "" if "; " in expected else "; leave it out, or pass --graph 0"
    assert str(refused.value) == f"--graph {config.graph}: {expected}{remedy}"


def test_local_layers_have_parts_of_pages_where_the_kernels_compute_and_the_context_is_longer(
    spec: ModelSpec, kernels: Kernels
) -> None:
    kernels(BOTH)
    rope = spec.kinds[0].rope
    kinds = LayerKind(rope, 0), LayerKind(rope, 32)
    mixed = replace(spec, num_layers=6, kinds=kinds, kind_of=(0, 1, 1, 1, 1, 0))
    few = replace(CPU, kernels="auto", max_prefill_length=32, page_size=16, num_pages=12)
    settings = resolve(few, mixed)
    assert settings.local == LocalLayers(2, 32, 32)
    at_once = (31 + 32) // 16 + 2
    assert settings.limits.context == (12 * 3 - 2 * at_once) * 16 > 12 * 16
    assert settings.with_pages(6).limits.context == (6 * 3 - 2 * at_once) * 16
    assert resolve(replace(few, kernels="torch"), mixed).limits.context == 12 * 16
    assert resolve(replace(few, max_prefill_length=2048), mixed).local == NO_LOCAL_LAYERS
    assert resolve(few, replace(mixed, kind_of=(1,) * 6)).local == NO_LOCAL_LAYERS
    assert resolve(few, replace(mixed, kind_of=(0, 0, 0, 0, 0, 1))).local == NO_LOCAL_LAYERS, "its part would be empty"
    longer = resolve(replace(few, max_prefill_length=96), mixed)
    assert longer.local.num_parts and longer.of_all_ranks != settings.of_all_ranks, "its pages are others"
    whole = resolve(replace(few, num_pages=0, max_running_requests=3), mixed)
    assert whole.num_pages == 3 * -(-(32 + 2 * at_once) // 3), "enough for three requests of 512 tokens"
