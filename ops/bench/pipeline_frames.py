"""How long a plan is on its way from rank 0 to another rank. As a program, this file is that other rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from ops.bench.pipeline_way import PAGE_SIZE, PipelineStuck
from ops.bench.processes import started
from pipeline.events import SamplingParams
from stages.generate.ranks.channel import Follower, Leader, connect, file_store
from stages.generate.ranks.frame import Kind
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

PAUSE_S: Final = 0.001
"""Between two plans: a follower waits for the next one before it comes."""


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """One number for each plan, from the moment at which rank 0 begins to write the frame."""

    sent_us: list[float] = field(default_factory=list)
    """Until rank 0 may compute, while the frame is under way."""
    known_us: list[float] = field(default_factory=list)
    """Until the other rank has the rows of the plan, on the same clock."""


Send: TypeAlias = Callable[[int, int], FrameTimes]
"""Sends plans of so many decode rows, so many times."""


@contextlib.contextmanager
def other_rank(folder: Path) -> Iterator[Send]:
    """Run another rank until the block ends; they meet in *folder*."""
    path = folder / "ranks"
    with started([sys.executable, "-m", "ops.bench.pipeline_frames", str(path)], None) as process:
        assert process.stdout is not None
        said = process.stdout
        leader = Leader(connect(file_store(path, 2), 0, 2), lambda error: None)

        def send(num_rows: int, num_plans: int) -> FrameTimes:
            times = FrameTimes()
            for step in range(num_plans):
                plan = decodes(step, num_rows)
                time.sleep(PAUSE_S)
                began_ns = time.perf_counter_ns()
                with leader.computing(plan):
                    sent_ns = time.perf_counter_ns()
                line = said.readline()
                if not line:
                    raise PipelineStuck("the other rank has ended")
                times.sent_us.append((sent_ns - began_ns) / 1000)
                times.known_us.append((int(line) - began_ns) / 1000)
            return times

        yield send
        leader.leave()


def decodes(step: int, num_rows: int) -> BatchPlan:
    """Return a plan of decode rows. Each needs a new page every PAGE_SIZE steps, not all in the same one."""
    sample, rows = Sample(SamplingParams(temperature=0), 0, ()), []
    for table in range(num_rows):
        start = step + table
        new_pages = () if start % PAGE_SIZE else (table,)
        rows.append(PlanRow(table, start, (65,), new_pages, start // PAGE_SIZE, sample))
    return BatchPlan(step, tuple(rows), num_rows)


def follow(path: Path) -> None:
    """Receive plans until rank 0 leaves, and say when each came."""
    follower = Follower(connect(file_store(path, 2), 1, 2))
    while follower.receive()[0] is not Kind.STOP:
        print(time.perf_counter_ns(), flush=True)


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
