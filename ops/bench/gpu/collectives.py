"""Phase `collectives`: NCCL with one rank, and two processes over gloo on one device: whether an engine of these ranks
computes what one process computes, and what they would pay a step.

Run as a program it is one rank: `python -m ops.bench.gpu.collectives BACKEND DEVICE SIZE RANK RANKS FILE`, a line of
JSON for each measurement of rank 0 on stdout.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ops.bench.gpu.engine import sampling
from ops.bench.gpu.pages import make_plan
from ops.bench.gpu.phase import Report, Scale, Skip, attempt
from ops.bench.models import Shape, write_config
from stages.generate.collectives import ALONE, GlooCollectives, NcclCollectives
from stages.generate.forward.engine import Engine
from stages.generate.model.spec import read_spec

GROUPS: Final = (("nccl x1", "nccl", "cuda", 1), ("gloo x2 GPU", "gloo", "cuda", 2), ("gloo x2 CPU", "gloo", "cpu", 2))
FRAME_NUMBERS: Final = 1024
"""int32: the 4 KB of a batch plan."""
HIDDEN: Final = (1024, 4096)
ROWS: Final = (1, 256)
ROUNDS: Final = {"toy": 3, "small": 20, "full": 50}
TIMEOUT_S: Final = 60.0
MODEL: Final = Shape(64, 2, 4, 2, 16, 96, 512, 10_000.0, 4096)
PAGE_SIZE: Final = 16
STEP: Final = ((40, 1), (3, 1), (0, 20), (16, 9))
"""(start, number of new tokens) of the rows that the ranks compute together."""
MOST_DISTANCE: Final = 1e-4
"""In float32, of all logits together: ranks add in another order."""


def run(scale: Scale, report: Report) -> None:
    """Measure each backend where it can run. Beside a GPU, ranks on the CPU would tell nothing more."""
    for name, backend, device, ranks in GROUPS:
        if device == "cpu" and scale.device == "cuda":
            continue
        with attempt(report, name):
            if device == "cuda" and scale.device != "cuda":
                raise Skip("needs a GPU")
            _measure(scale, report, name, backend, device, ranks)


def _measure(scale: Scale, report: Report, name: str, backend: str, device: str, ranks: int) -> None:
    """Start *ranks* processes and report what rank 0 says, each item behind *name*.

    Raises:
        RuntimeError: One of them failed; the message has the last it said.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        meeting = Path(folder) / "ranks"
        processes = [
            stack.enter_context(_started(backend, device, scale.size, rank, ranks, meeting)) for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    for rank, (process, (_, said)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode:
            last = (said.strip().splitlines() or ["nothing"])[-1]
            raise RuntimeError(f"rank {rank} ended with {process.returncode}; the last it said: {last}")
    for line in outputs[0][0].splitlines():
        if line.startswith('{"what"'):
            figures = json.loads(line)
            report(f"{name}: {figures.pop('what')}", ok=figures.pop("ok"), **figures)


@contextlib.contextmanager
def _started(
    backend: str, device: str, size: str, rank: int, ranks: int, meeting: Path
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, backend, device, size, str(rank), str(ranks), str(meeting)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    """Be one rank."""
    backend, device_name, size, rank_text, ranks_text, meeting = arguments
    rank, ranks, rounds = int(rank_text), int(ranks_text), ROUNDS[size]
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def tell(what: str, *, ok: bool | None, **figures: float) -> None:
        if rank == 0:
            print(json.dumps({"what": what, "ok": ok, **figures}), flush=True)

    def median_us(action: Callable[[], object]) -> float:
        took = []
        for _ in range(3 + rounds):
            dist.barrier()
            wait()
            began_s = time.perf_counter()
            action()
            wait()
            took.append(time.perf_counter() - began_s)
        return statistics.median(took[3:]) * 1e6

    torch.ones(1, device=device)  # CUDA's own start is not that of the group
    wait()
    began_s = time.perf_counter()
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    first = torch.full((4,), float(rank + 1), device=device)
    dist.all_reduce(first)  # the first of NCCL builds its communicator
    wait()
    expected = float(ranks * (ranks + 1) // 2)
    tell("start", ok=bool((first == expected).all()), s=time.perf_counter() - began_s)

    frame = torch.arange(FRAME_NUMBERS, dtype=torch.int32, device=device) * (rank == 0)
    dist.broadcast(frame, 0)
    same = torch.equal(frame.cpu(), torch.arange(FRAME_NUMBERS, dtype=torch.int32))
    tell("broadcast of 4 KB", ok=same, us=median_us(lambda: dist.broadcast(frame, 0)))

    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        for hidden in HIDDEN[: 1 if size == "toy" else None]:
            figures = {}
            for rows in ROWS:
                values = torch.zeros(rows, hidden, dtype=dtype, device=device)
                figures[f"rows_{rows}_us"] = median_us(lambda values=values: dist.all_reduce(values))  # type: ignore[misc]
            tell(f"all-reduce {name} x {hidden}", ok=None, **figures)
    distance = distance_of_ranks(rank, device, nccl=backend == "nccl")
    tell("engine", ok=distance <= MOST_DISTANCE, distance=distance)
    dist.destroy_process_group()
    return 0


def distance_of_ranks(rank: int, device: torch.device, *, nccl: bool) -> float:
    """Return how far the logits of an engine with all ranks are from those of one process, on rank 0; 0 on others."""
    group = dist.group.WORLD
    assert group is not None, "the group has been made"
    ours = (NcclCollectives if nccl else GlooCollectives)(group)
    with tempfile.TemporaryDirectory() as folder:
        write_config(MODEL, Path(folder))
        spec = read_spec(Path(folder))
        engines = []
        for collectives in (ours, ALONE) if rank == 0 else (ours,):
            plan, tables, num_pages = make_plan(STEP, PAGE_SIZE, vocab_size=spec.vocab_size)
            sizes: dict[str, Any] = {"num_pages": num_pages, "page_size": PAGE_SIZE, "max_running_requests": len(STEP)}
            how: dict[str, Any] = {"device": device, "dtype": torch.float32, "attention": "torch", "dummy": True}
            length = tables.pages_AN.shape[1] * PAGE_SIZE
            engine = Engine(spec, Path(folder), max_seq_len=length, collectives=collectives, **sizes, **how)
            engine.kv_L2PKSD.zero_()
            engines.append(engine)
    plan = sampling(plan)
    if rank:
        engines[0].follow(plan)
        return 0.0
    found_RV, expected_RV = (engine.logits(plan) for engine in engines)
    return float((found_RV - expected_RV).norm() / expected_RV.norm())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
