"""`auto` becomes a value in one place, and what does not go together is refused with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from structlog.testing import capture_logs

from pipeline.errors import ConfigError
from pipeline.flags import parse_config
from stages.generate import loading, worker
from stages.generate import resolve as resolve_module
from stages.generate.config import EngineConfig, GenerateConfig, ShareConfig
from stages.generate.forward.sampler import VERSION as SAMPLER
from stages.generate.kernels import MOST_THREADS, VERSION, build, library
from stages.generate.kvcache.pool import page_bytes
from stages.generate.model.spec import ExpertsSpec, ModelSpec, read_spec
from stages.generate.resolve import WHOLE, Settings, default_threads, resolve, resolve_dtype
from stages.generate.schedule.schedule import ScheduleLimits

CPU = EngineConfig(device="cpu")
NONE = "this build has no kernels"
BOTH = ("avx512", "avx2")
LAST = f"sampler-{SAMPLER}/llguidance-{metadata.version('llguidance')}"
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


@pytest.mark.parametrize(
    ("device", "overlap", "expected"),
    [("cpu", "auto", False), ("cpu", "on", True), ("cuda", "auto", True), ("cuda", "off", False)],
)
def test_steps_overlap_on_a_gpu_unless_a_flag_says_otherwise(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, device: str, overlap: str, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: 2**30)
    config = replace(CPU, device=device, overlap=overlap, attention="reference")
    assert resolve(config, spec).overlap == expected


@pytest.mark.parametrize(
    ("device", "flag_ms", "expected_s"), [("cpu", -1, 0.010), ("cuda", -1, 0.002), ("cpu", 0, 0.0), ("cuda", 25, 0.025)]
)
def test_short_steps_are_committed_together_for_as_long_as_suits_the_device(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, device: str, flag_ms: int, expected_s: float
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: 2**30)
    config = replace(CPU, device=device, commit_interval_ms=flag_ms, attention="reference")
    assert resolve(config, spec).commit_interval_s == expected_s


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
    assert wide.numerics == f"float32/none/avx512/{VERSION}/64/{TORCH}/{LAST}" and wide.batch_invariant
    other = resolve(replace(CPU, dtype="bfloat16", quantization="int8", kernels="avx2", page_size=16), spec)
    assert other.numerics == f"bfloat16/int8/avx2/{VERSION}/16/{TORCH}/{LAST}"


H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 with FlashInfer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(resolve_module, "why_not", lambda shape, prefill: "")
    monkeypatch.setattr(resolve_module, "load_library", lambda: SimpleNamespace(__version__="0.6.13"))


DETERMINISTIC = EngineConfig(device="cuda", num_pages=4, deterministic=True)


@pytest.mark.usefixtures("gpu")
def test_deterministic_on_a_gpu_is_batch_invariant_and_its_numerics_name_what_its_bits_depend_on(
    spec: ModelSpec,
) -> None:
    by = f"torch-{torch.__version__}-cuda"
    how, last = "deterministic-128-pages-16-nvidia-h100-80gb-hbm3", LAST
    settings = resolve(DETERMINISTIC, spec)
    assert (settings.batch_invariant, settings.deterministic, settings.paced) == (True, True, False)
    assert settings.numerics == f"float32/none/{by}/fi/{last}/{how}-flashinfer-0.6.13"
    in_torch = resolve(replace(DETERMINISTIC, attention="torch"), spec)
    assert in_torch.numerics == f"float32/none/{by}/torch/{last}/{how}"
    plain = resolve(replace(DETERMINISTIC, deterministic=False), spec)
    assert (plain.batch_invariant, plain.numerics) == (False, f"float32/none/{by}/fi/{last}")


def test_the_kernels_of_a_cpu_are_deterministic_with_the_flag_and_without(spec: ModelSpec, kernels: Kernels) -> None:
    kernels(BOTH)
    one, other = (resolve(replace(CPU, deterministic=each), spec) for each in (True, False))
    assert one.numerics == other.numerics and one.batch_invariant and other.batch_invariant


@pytest.mark.parametrize(
    ("variants", "options", "message"),
    [
        (BOTH, {"kernels": "torch"}, "needs the CPU kernels, but with --kernels torch torch computes; leave one of"),
        (BOTH, {"attention": "reference"}, "needs the CPU kernels, but with --attn reference torch computes"),
        ((), {}, f"needs the CPU kernels, and none can run here ({NONE}); leave it out"),
        (
            (),
            {"device": "cuda", "attention": "reference"},
            "attention by reference depends on the batch; pass --attn fi, or --attn torch",
        ),
        ((), {"device": "cuda", "attention": "fa,fi"}, "attention by fa,fi depends on the batch; pass --attn fi"),
        ((), {"device": "cuda", "tp": 2}, "with --tp 2: the ranks on GPUs add in an order that depends on the batch"),
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


def test_the_numerics_of_torch_name_its_version_and_attention(spec: ModelSpec) -> None:
    assert resolve(CPU, spec).numerics == f"float32/none/{TORCH}/torch/{LAST}"
    other = resolve(replace(CPU, dtype="bfloat16", attention="reference"), spec)
    assert (other.batch_invariant, other.numerics) == (
        False,
        f"bfloat16/none/{TORCH}/reference/{LAST}",
    )


def test_int8_leaves_more_memory_to_the_cache(
    spec: ModelSpec, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(BOTH)
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: 2**22)
    small = replace(CPU, page_size=1, max_prefill_length=100, max_running_requests=100, threads=1)
    wide, narrow = (resolve(replace(small, quantization=name), spec).num_pages for name in ("none", "int8"))
    assert narrow > wide


def test_the_memory_of_a_step_is_not_given_to_the_cache(
    spec: ModelSpec, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: 2**24)

    def cache_bytes(**more: Any) -> int:
        settings = resolve(replace(CPU, threads=1, max_running_requests=1000, **more), spec)
        return settings.num_pages * page_bytes(spec, settings.page_size, settings.dtype)

    by_torch = cache_bytes()
    kernels(BOTH)
    short, long = cache_bytes(max_prefill_length=100), cache_bytes(max_prefill_length=1100)
    assert by_torch > short > long
    of_token = 4 * spec.hidden_size  # as much of the hidden states alone
    assert short - long > 1000 * of_token
    with pytest.raises(ConfigError, match=r"a step 0\.0[1-9] and a page .* lower --max-prefill-length"):
        cache_bytes(max_prefill_length=20_000)


@pytest.mark.parametrize(
    ("config", "has_cuda", "message"),
    [
        (replace(CPU, max_seq_len=513), False, "the model knows 512 positions"),
        (replace(CPU, num_pages=4, memory_ratio=0.5), False, "pass one of them"),
        (replace(CPU, commit_interval_ms=1001), False, "pass at most that"),
        (EngineConfig(device="cuda"), False, "torch sees no CUDA device"),
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


def test_more_threads_than_the_kernels_can_use_are_refused(
    spec: ModelSpec, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"#define MOST_THREADS {MOST_THREADS}\n" in (build.HERE / "pool.h").read_text()
    many = replace(CPU, threads=MOST_THREADS + 1)
    assert resolve(many, spec).threads == MOST_THREADS + 1
    kernels(BOTH)
    assert resolve(replace(CPU, threads=MOST_THREADS), spec).threads == MOST_THREADS
    with pytest.raises(ConfigError, match="--threads 257: the CPU kernels use at most 256; pass at most that, or"):
        resolve(many, spec)
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert resolve(CPU, spec).threads == MOST_THREADS


@pytest.mark.parametrize("text", ["as torch understood it", "", "0"])
def test_torch_knows_what_else_the_usual_variable_means(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert default_threads() == torch.get_num_threads()


def test_an_engine_says_why_torch_computes_and_in_another_dtype(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "Engine", lambda *arguments, **options: SimpleNamespace(graph=0))
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


def test_ranks_divide_the_threads_and_the_memory_of_a_machine(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    kernels(BOTH)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: 256 << 20)
    many = replace(CPU, max_running_requests=10_000)
    alone, rank = resolve(many, spec), resolve(replace(many, tp=2), spec, 1)
    assert (alone.threads, rank.threads) == (5, 2)
    assert resolve(replace(many, tp=2, threads=3), spec).threads == 3
    sizes = [spec.sharded(0, each.num_ranks) for each in (alone, rank)]
    taken = [
        page_bytes(size, each.page_size, each.dtype) * each.num_pages
        for size, each in zip(sizes, (alone, rank), strict=True)
    ]
    assert 0.3 * taken[0] < taken[1] < 0.6 * taken[0]
    half_here, all_here = (resolve(replace(many, tp=2), spec, 1, ranks_here=number) for number in (1, 2))
    assert (half_here.threads, all_here) == (5, rank)
    assert 1.5 * rank.num_pages < half_here.num_pages < 3 * rank.num_pages


def test_engines_divide_the_threads_of_their_numa_node_and_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine has a node of 16 cores for the engines 0 and 2, and one of 8 for engine 1."""
    nodes = {0: (set(range(8, 24)), 2), 1: (set(range(8)), 1)}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(resolve_module, "cpus_of", lambda engine, num_engines, cpus: nodes[engine % 2])
    monkeypatch.setattr(resolve_module, "usable_cores", len)

    def threads(quota: int, num_ranks: int = 1) -> list[int]:
        monkeypatch.setattr(resolve_module, "quota_cores", lambda: quota)
        return [default_threads(num_ranks, ShareConfig(engine, 3)) for engine in range(3)]

    assert threads(1000) == [6, 6, 6]
    assert threads(1000, num_ranks=2) == [3, 3, 3]
    assert threads(12) == [3, 3, 3]
    assert threads(1) == [1, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(1000) == [2, 2, 2]


def test_an_engine_that_starts_again_has_as_many_pages_as_before(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have their part of the memory then. The rest is not divided once more."""
    many, share = replace(CPU, max_running_requests=10**6, threads=1), ShareConfig(1, 4, 400 << 20)

    def num_pages(free_mib: int, share: ShareConfig = WHOLE, **more: Any) -> int:
        monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: free_mib << 20)
        return resolve(replace(many, **more), spec, share=share).num_pages

    assert num_pages(400, share) == num_pages(120, share) == num_pages(100)
    assert num_pages(60, share) == num_pages(60) < num_pages(100)
    assert num_pages(400, share, tp=2) < num_pages(400, tp=2)
    large = ShareConfig(0, 4, 400 << 30)
    assert num_pages(400 << 10, large) == pytest.approx(num_pages(400 << 10) / 4, abs=1), "of 4 GiB in all"


def test_an_engine_keeps_to_its_numa_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(loading, "Engine", lambda *arguments, **options: SimpleNamespace(graph=0))
    monkeypatch.setattr("os.sched_setaffinity", lambda *arguments: kept.append(arguments))
    monkeypatch.setattr(resolve_module, "cpus_of", lambda engine, *_: (frozenset({engine, 99}), 1))
    folder = make_checkpoint(tmp_path, "qwen3")

    def keeps_to(*flags: str) -> list[Any]:
        kept.clear()
        worker.load(parse_config("stage generate", GenerateConfig, flags, {}), folder, lambda progress: None)
        return kept[:]

    assert keeps_to("--engine", "1", "--engines", "2") == [(0, {1, 99})]
    monkeypatch.setattr(resolve_module, "cpus_of", lambda engine, num_engines, cpus: (cpus, num_engines))
    assert keeps_to("--engine", "1", "--engines", "2") == keeps_to() == []


def test_the_number_of_ranks_is_part_of_the_numerics(spec: ModelSpec, kernels: Kernels) -> None:
    kernels(BOTH)
    alone, rank = resolve(CPU, spec), resolve(replace(CPU, tp=2), spec)
    assert rank.numerics == f"{alone.numerics}/ranks-2"
    assert rank.numerics in rank.of_all_ranks


def test_ranks_take_the_fewest_pages_of_all(spec: ModelSpec) -> None:
    settings = resolve(replace(CPU, page_size=16, num_pages=40), spec)
    fewer = settings.with_pages(3)
    assert (fewer.num_pages, fewer.limits.context, fewer.context_flag) == (3, 48, "--num-pages")
    assert settings.with_pages(40) == settings


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
        (replace(FI, graph=257), None, "only 256 requests run at once (--max-running-requests)"),
        (replace(FI, attention="torch"), None, 0),
        (replace(FI, attention="torch", graph=8), None, "only --attn fi and fa,fi on CUDA can be recorded"),
        (replace(FI, tp=2), None, 0),
        (replace(FI, tp=2, graph=8), None, "several ranks (--tp) compute without graphs"),
        (replace(FI, deterministic=True), None, 0),
        (replace(FI, deterministic=True, graph=8), None, "--deterministic computes without graphs"),
        (CPU, None, 0),
        (replace(CPU, graph=8), None, "only --attn fi and fa,fi on CUDA can be recorded"),
        (FI, LOOP, 0),
        (replace(FI, graph=8), LOOP, "experts in float32 wait for the device here, which cannot be recorded"),
    ],
)
def test_decode_steps_are_recorded_where_they_can_be(
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    config: EngineConfig,
    experts: ExpertsSpec | None,
    expected: int | str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(resolve_module, "why_not", lambda shape, prefill: "")
    monkeypatch.setattr(resolve_module, "load_library", lambda: SimpleNamespace(__version__="0.6.13"))
    spec = spec if experts is None else replace(spec, experts=experts)
    if isinstance(expected, int):
        assert resolve(config, spec).graph == expected
        return
    with pytest.raises(ConfigError) as refused:
        resolve(config, spec)
    assert str(refused.value) == f"--graph {config.graph}: {expected}; leave it out, or pass --graph 0"


def test_each_rank_of_a_machine_has_a_gpu_of_its_own(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {torch.device("cuda", 0): 1 << 30, torch.device("cuda", 1): 1 << 28}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda device: free[device])
    config = EngineConfig(device="cuda", attention="reference", tp=2, max_running_requests=100_000)
    here = [resolve(config, spec, rank) for rank in (0, 1)]
    far = resolve(replace(config, tp=4), spec, 3, ranks_here=2)
    assert [settings.device.index for settings in (*here, far)] == [0, 1, 1]
    assert 3.5 < here[0].num_pages / here[1].num_pages < 4.5, "a rank has the memory of its GPU"
    assert here[0].of_all_ranks == here[1].of_all_ranks and not here[0].overlap
