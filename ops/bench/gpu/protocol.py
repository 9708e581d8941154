"""Phase `protocol`: the benchmark of nano-vllm, 256 sequences of 100 to 1,024 tokens in and out, in four ways: decode
steps launched one operation at a time or as CUDA graphs, each with overlap and without. There is no log.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from ops.bench.datasets import Span
from ops.bench.gpu.overlap import PAGE_SIZE, best_attention, driven
from ops.bench.gpu.phase import Report, Scale, Skip, attempt
from ops.bench.models import SHAPES, Shape, write_config
from ops.bench.offline import PRESETS, TEMPERATURE, Preset, Workload, draw
from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.model.spec import ModelSpec, read_spec
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits
from stages.generate.setup.resolve import MOST_GRAPH_ROWS

SEED: Final = 0
LOADS: Final = {
    "toy": Preset(4, Span(5, 20), Span(3, 8)),
    "small": Preset(8, Span(20, 60), Span(10, 20)),
    "full": PRESETS["nano"],
}
MODELS: Final = {
    "toy": Shape(64, 2, 4, 2, 64, 96, 512, 10_000.0, 4096),
    "small": Shape(256, 4, 8, 2, 64, 512, 2000, 10_000.0, 4096),
    "full": SHAPES["0.6b"],
}
BUDGET: Final = 8192
"""Prompt tokens of a step, beside streams too: no client waits for these."""


def run(scale: Scale, report: Report) -> None:
    """Report the speed of each way."""
    device = torch.device(scale.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        write_config(MODELS[scale.size], Path(folder))
        spec = read_spec(Path(folder))
        workload = draw(LOADS[scale.size], SEED, spec.vocab_size)
        attention = best_attention(spec, dtype, device)
        report(
            "workload",
            attention=attention,
            sequences=len(workload.prompts),
            input_tokens=workload.input_tokens,
            output_tokens=workload.output_tokens,
        )
        for graph in (min(len(workload.prompts), MOST_GRAPH_ROWS), 0):
            names = {True: "graphs and overlap", False: "graphs"} if graph else {True: "overlap", False: "eager"}
            with attempt(report, " and ".join(names.values())):
                engine = _engine(spec, Path(folder), workload, device, dtype, attention, graph)
                for overlap, name in names.items():
                    with attempt(report, name):
                        _measure(report, name, engine, spec, workload, overlap=overlap)
                del engine
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _engine(
    spec: ModelSpec,
    folder: Path,
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    graph: int,
) -> Engine:
    """Return an engine with room for all sequences at once.

    Raises:
        Skip: It shall have graphs, and cannot.
    """
    if graph and attention != "fi":
        raise Skip(f"attention {attention} cannot be recorded in a CUDA graph")
    sizes: dict[str, Any] = {"num_pages": _num_pages(workload), "page_size": PAGE_SIZE}
    sizes |= {"max_running_requests": len(workload.prompts), "max_seq_len": workload.longest + PAGE_SIZE}
    return Engine(spec, folder, device=device, dtype=dtype, attention=attention, graph=graph, dummy=True, **sizes)


def _num_pages(workload: Workload) -> int:
    pairs = zip(workload.prompts, workload.output_lengths, strict=True)
    return sum(-(-(len(prompt) + length) // PAGE_SIZE) + 1 for prompt, length in pairs)


def _measure(report: Report, name: str, engine: Engine, spec: ModelSpec, workload: Workload, *, overlap: bool) -> None:
    """Report one run of all sequences, after a short one that warms up."""
    warm = Workload(workload.prompts[:2], [2, 2])
    driven(_schedule(spec, warm, engine.num_pages), engine, overlap=overlap)
    schedule = _schedule(spec, workload, engine.num_pages)
    began_s = time.perf_counter()
    found = driven(schedule, engine, overlap=overlap)
    seconds = time.perf_counter() - began_s
    lengths = [len(found.tokens.get(str(number), ())) for number in range(len(workload.prompts))]
    report(
        name,
        ok=lengths == list(workload.output_lengths),
        output_tokens_per_s=workload.output_tokens / seconds,
        seconds=seconds,
        steps=found.steps,
        preempted=found.preempted,
    )


def _schedule(spec: ModelSpec, workload: Workload, num_pages: int) -> Schedule:
    context = min(spec.max_positions, num_pages * PAGE_SIZE)
    limits = ScheduleLimits(context, BUDGET, BUDGET, len(workload.prompts), vocab_size=spec.vocab_size)
    schedule = Schedule(make_cache("radix", num_pages, PAGE_SIZE), limits, [], Identity("generate-0", 1, "f"))
    for number, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lengths, strict=True)):
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=length, seed=number, ignore_eos=True)
        refused = schedule.add(NewRequest(str(number), tuple(prompt), (), params))
        assert refused is None, refused
    return schedule
