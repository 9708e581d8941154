"""What a step of a model of one layer costs one rank, and two. As a program, this file is the other rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from ops.bench.models import SHAPES, write_config
from ops.bench.processes import started
from pipeline.events import SamplingParams
from stages.generate.collectives import ALONE, Collectives
from stages.generate.forward.engine import Engine
from stages.generate.model.spec import read_spec
from stages.generate.ranks.channel import Follower, Leader, file_store
from stages.generate.ranks.links import RankLinks, connect_links
from stages.generate.ranks.steps import FollowingEngine, LeadingEngine
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample
from stages.generate.setup.config import EngineConfig
from stages.generate.setup.resolve import resolve, resolve_device

LAYER: Final = replace(SHAPES["95m"], num_layers=1)
PAGE_SIZE: Final = 64
"""Tokens of a page, and the longest context."""
NUM_RANKS: Final = 2

Compute: TypeAlias = Callable[[int, int], list[float]]
"""Computes steps of so many decode rows, so many; returns microseconds."""


@contextlib.contextmanager
def one_rank(folder: Path, most_rows: int) -> Iterator[Compute]:
    """Compute in this process, with as many threads as `serve` takes."""
    engine = _engine(folder, most_rows, ALONE)

    yield _computing(engine.forward)


@contextlib.contextmanager
def two_ranks(folder: Path, most_rows: int) -> Iterator[Compute]:
    """Compute with another process until the block ends. The two divide the threads of one rank."""
    meeting = folder / "ranks"
    command = [sys.executable, "-m", "ops.bench.pipeline_ranks", str(folder), str(most_rows)]
    with started(command, None):
        links = _connected(meeting, 0)
        collectives = links.collectives()
        leader = Leader(links.frames, lambda error: None)
        engine = LeadingEngine(_engine(folder, most_rows, collectives), leader, collectives, LAYER.vocab_size)
        yield _computing(engine.forward)
        leader.leave()


def write_layer(folder: Path) -> Path:
    """Write what engines with random weights need into a new *folder*, and return it."""
    folder.mkdir()
    write_config(LAYER, folder)
    return folder


def decodes(num_rows: int, num_steps: int) -> Iterator[BatchPlan]:
    """Yield plans in which each row has one more token. After a page it begins anew."""
    for step in range(num_steps):
        start = step % PAGE_SIZE
        sample = Sample(SamplingParams(temperature=0), start + 1, ())
        pages = range(num_rows)
        rows = (PlanRow(row, start, (row,), () if start else (row,), int(start > 0), sample) for row in pages)
        yield BatchPlan(step, tuple(rows), num_rows)


def follow(folder: Path, most_rows: int) -> None:
    """Compute with rank 0 until it leaves."""
    links = _connected(folder / "ranks", 1)
    engine = _engine(folder, most_rows, links.collectives())
    following = FollowingEngine(engine, Follower(links.frames))
    while following.follow():
        pass


def _connected(meeting: Path, rank: int) -> RankLinks:
    return connect_links(file_store(meeting, NUM_RANKS), rank, NUM_RANKS, device=resolve_device("cpu"))


def _engine(folder: Path, most_rows: int, collectives: Collectives) -> Engine:
    spec = read_spec(folder)
    config = EngineConfig(
        device="cpu",
        dummy_weight=True,
        tp=collectives.size,
        page_size=PAGE_SIZE,
        num_pages=most_rows,
        max_seq_len=PAGE_SIZE,
        max_running_requests=most_rows,
    )
    settings = resolve(config, spec, collectives.rank)
    return Engine(
        spec,
        folder,
        device=settings.device,
        dtype=settings.dtype,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        max_running_requests=most_rows,
        max_seq_len=settings.limits.context,
        attention=settings.attention,
        kernels=settings.kernels,
        threads=settings.threads,
        dummy=True,
        collectives=collectives,
    )


def _computing(step: Callable[[BatchPlan], object]) -> Compute:
    def compute(num_rows: int, num_steps: int) -> list[float]:
        times_us = []
        for plan in decodes(num_rows, num_steps):
            began_ns = time.perf_counter_ns()
            step(plan)
            times_us.append((time.perf_counter_ns() - began_ns) / 1000)
        return times_us

    return compute


def main(arguments: Sequence[str]) -> None:
    """Be the other rank."""
    follow(Path(arguments[0]), int(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
