"""Threads, memory and devices: how engines and ranks divide those of a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.resolving import BOTH, CPU, Kernels

from pipeline.errors import ConfigError
from pipeline.flags import parse_config
from stages.generate.forward.pool import page_bytes
from stages.generate.kernels import MOST_THREADS, build
from stages.generate.loop import worker
from stages.generate.model.spec import ModelSpec
from stages.generate.setup import loading
from stages.generate.setup import resolve as resolve_module
from stages.generate.setup.config import EngineConfig, GenerateConfig, ShareConfig
from stages.generate.setup.resolve import WHOLE, default_threads, resolve


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
    with pytest.raises(ConfigError, match="--max-prefill-length"):
        cache_bytes(max_prefill_length=20_000)


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
    with pytest.raises(ConfigError, match=r"--threads 257: .*256"):
        resolve(many, spec)
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert resolve(CPU, spec).threads == MOST_THREADS


@pytest.mark.parametrize("text", ["as torch understood it", "", "0"])
def test_torch_knows_what_else_the_usual_variable_means(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert default_threads() == torch.get_num_threads()


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
    monkeypatch.setattr(loading, "Engine", lambda *arguments, **options: SimpleNamespace(graph=0, fused=()))
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


def test_ranks_take_the_fewest_pages_of_all(spec: ModelSpec) -> None:
    settings = resolve(replace(CPU, page_size=16, num_pages=40), spec)
    fewer = settings.with_pages(3)
    assert (fewer.num_pages, fewer.limits.context, fewer.context_flag) == (3, 48, "--num-pages")
    assert settings.with_pages(40) == settings


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
