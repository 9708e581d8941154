"""What computes, in which dtype, and what the bits of its results depend on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.checkpoints import make_checkpoint
from support.resolving import BOTH, CPU, LAST, NONE, TORCH, Kernels

from pipeline.errors import ConfigError
from pipeline.flags import parse_config
from stages.generate.kernels import VERSION
from stages.generate.loop import worker
from stages.generate.model.spec import ExpertsSpec, ModelSpec
from stages.generate.setup import loading
from stages.generate.setup.config import ON_GPU, EngineConfig, GenerateConfig
from stages.generate.setup.resolve import resolve


@pytest.mark.parametrize(
    ("variants", "options", "chosen", "attention"),
    [
        ((), {}, "torch", "torch"),
        (("avx2",), {}, "avx2", "kernels"),
        (BOTH, {}, "avx512", "kernels"),
        (BOTH, {"kernels": "avx512"}, "avx512", "kernels"),
        (BOTH, {"kernels": "avx2"}, "avx2", "kernels"),
        (BOTH, {"kernels": "avx2", "quantization": "int8"}, "avx2", "kernels"),
        (BOTH, {"quantization": "int8"}, "avx512", "kernels"),
        (("neon",), {}, "neon", "kernels"),
        (("neon",), {"kernels": "neon", "quantization": "int8"}, "neon", "kernels"),
        (BOTH, {"kernels": "torch"}, "torch", "torch"),
        (BOTH, {"kernels": "torch", "attention": "reference"}, "torch", "reference"),
        (BOTH, {"attention": "cpu"}, "torch", "torch"),
        (BOTH, {"attention": "torch"}, "torch", "torch"),
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
        ((), {"kernels": "avx2"}, "--kernels avx2: "),
        (("avx2",), {"kernels": "avx512"}, f"{AVX512}: "),
        ((), {"quantization": "int8"}, f"{INT8} "),
        (BOTH, {"quantization": "int8", "kernels": "torch"}, f"{INT8}.* --kernels torch"),
        (BOTH, {"quantization": "int8", "attention": "cpu"}, f"{INT8}.* --attn cpu"),
        (BOTH, {"kernels": "avx512", "attention": "reference"}, f"{AVX512}.* --attn reference"),
        (BOTH, {"kernels": "avx512", "device": "cuda"}, f"{AVX512}.*--device cpu"),
        (BOTH, {"quantization": "int8", "device": "auto"}, f"{INT8}.*--device cpu"),
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
    assert re.match(message, str(caught.value)) and "\n" not in str(caught.value)


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


def test_an_engine_says_why_torch_computes_and_in_another_dtype(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "Engine", lambda *arguments, **options: SimpleNamespace(graph=0, fused=()))
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


def test_the_numerics_of_kernels_are_what_their_bits_depend_on(spec: ModelSpec, kernels: Kernels) -> None:
    kernels(BOTH)
    wide = resolve(CPU, spec)
    assert wide.numerics == f"float32/none/avx512/{VERSION}/64/{TORCH}/{LAST}" and wide.batch_invariant
    other = resolve(replace(CPU, dtype="bfloat16", quantization="int8", kernels="avx2", page_size=16), spec)
    assert other.numerics == f"bfloat16/int8/avx2/{VERSION}/16/{TORCH}/{LAST}"


def test_the_numerics_of_torch_name_its_version_and_attention(spec: ModelSpec) -> None:
    assert resolve(CPU, spec).numerics == f"float32/none/{TORCH}/torch/{LAST}"
    other = resolve(replace(CPU, dtype="bfloat16", attention="reference"), spec)
    assert (other.batch_invariant, other.numerics) == (
        False,
        f"bfloat16/none/{TORCH}/reference/{LAST}",
    )


def test_the_number_of_ranks_is_part_of_the_numerics(spec: ModelSpec, kernels: Kernels) -> None:
    kernels(BOTH)
    alone, rank = resolve(CPU, spec), resolve(replace(CPU, tp=2), spec)
    assert rank.numerics == f"{alone.numerics}/ranks-2"
    assert rank.numerics in rank.of_all_ranks


DETERMINISTIC = EngineConfig(device="cuda", num_pages=4, deterministic=True)


@pytest.mark.usefixtures("gpu")
def test_deterministic_on_a_gpu_is_batch_invariant_and_its_numerics_name_what_its_bits_depend_on(
    spec: ModelSpec,
) -> None:
    by = f"torch-{torch.__version__}-cuda"
    how, last = "deterministic-128-pages-16-nvidia-h100-80gb-hbm3", LAST
    fused = "fused-1-norm-page-rope-silu_and_mul"
    settings = resolve(DETERMINISTIC, spec)
    assert (settings.batch_invariant, settings.deterministic, settings.targets) == (True, True, ON_GPU)
    assert settings.numerics == f"float32/none/{by}/fi/{last}/{how}-flashinfer-0.6.13"
    new = resolve(replace(DETERMINISTIC, gpu_new=True), spec)
    assert new.numerics == (
        f"float32/none/{by}/fi/{last}/{how.replace('128', 'fixed')}-flashinfer-0.6.13/{fused}/new-1"
    )
    with_experts = resolve(
        replace(DETERMINISTIC, gpu_new=True), replace(spec, experts=ExpertsSpec((0,), 4, 2, 40, True))
    )
    assert with_experts.numerics == f"{settings.numerics}/new-1"
    in_torch = resolve(replace(DETERMINISTIC, attention="torch"), spec)
    assert in_torch.numerics == f"float32/none/{by}/torch/{last}/{how}"
    plain = resolve(replace(DETERMINISTIC, deterministic=False), spec)
    assert plain.targets is None
    assert (plain.batch_invariant, plain.numerics) == (False, f"float32/none/{by}/fi/{last}/{fused}")
    assert plain.with_fused(()).numerics == f"float32/none/{by}/fi/{last}"
    assert replace(plain, gpu_new=True).numerics == f"float32/none/{by}/fi/{last}/{fused}/new-1"


def test_the_kernels_of_a_cpu_are_deterministic_with_the_flag_and_without(spec: ModelSpec, kernels: Kernels) -> None:
    kernels(BOTH)
    one, other = (resolve(replace(CPU, deterministic=each), spec) for each in (True, False))
    assert one.numerics == other.numerics and one.batch_invariant and other.batch_invariant


@pytest.mark.parametrize(
    ("variants", "options", "message"),
    [
        (BOTH, {"kernels": "torch"}, "--kernels torch"),
        (BOTH, {"attention": "reference"}, "--attn reference"),
        ((), {}, NONE),
        ((), {"device": "cuda", "attention": "reference"}, "--attn fi, or --attn torch"),
        ((), {"device": "cuda", "attention": "fa,fi"}, "--attn fi"),
        ((), {"device": "cuda", "tp": 2}, "--tp 2"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_deterministic_is_refused_where_nothing_computes_so(
    spec: ModelSpec, kernels: Kernels, variants: Sequence[str], options: dict[str, Any], message: str
) -> None:
    kernels(variants)
    with pytest.raises(ConfigError) as refused:
        resolve(replace(CPU, num_pages=4, deterministic=True, **options), spec)
    assert str(refused.value).startswith("--deterministic") and message in str(refused.value)
