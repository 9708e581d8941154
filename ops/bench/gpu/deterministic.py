"""Phase `deterministic`: does `--deterministic` give a request the same bits in any company, and what does it cost?

Some requests run alone, together, in chunks of other lengths and with so few pages that some are preempted. The logits
of every position are compared bit for bit.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ops.bench.gpu.engine import GREEDY, sampling
from ops.bench.gpu.pages import make_plan
from ops.bench.gpu.phase import Report, Scale, attempt
from ops.bench.gpu.timing import step_times, wait
from ops.bench.models import SHAPES, Shape, write_config
from pipeline.events import EventRow, Preempted
from stages.generate.attention import AttentionShape
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.model.spec import ModelSpec, read_spec
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits
from stages.generate.setup.resolve import resolve_attention

PAGE_SIZE: Final = 16
COMPARED: Final = {
    "toy": Shape(64, 1, 4, 2, 64, 96, 512, 10_000.0, 4096),
    "small": Shape(128, 2, 4, 2, 64, 256, 2000, 10_000.0, 4096),
    "full": Shape(1024, 4, 16, 8, 128, 3072, 8000, 10_000.0, 4096),
}
TIMED: Final = {"toy": COMPARED["toy"], "small": COMPARED["small"], "full": SHAPES["0.6b"]}
PROMPT_LENGTHS: Final = {"toy": (5, 31, 32), "small": (5, 63, 47), "full": (5, 700, 40, 301, 64, 17, 129, 1)}
NUM_TOKENS: Final = {"toy": 3, "small": 4, "full": 16}
CONTEXT: Final = 1024
TIMED_ROWS: Final = {"toy": (1, 3), "small": (1, 8), "full": (1, 32, 256)}
TIMED_CONTEXT: Final = {"toy": 40, "small": 256, "full": 512}
PREFILL_TOKENS: Final = {"toy": 64, "small": 256, "full": 2048}
ROUNDS: Final = 3
SHOWN: Final = 3

Rows = dict[tuple[int, int], Tensor]
"""The logits of a request at a position, on the host."""


@dataclass(frozen=True, slots=True)
class Way:
    """How some requests run."""

    name: str
    running: int
    budget: int
    """Prompt tokens of a step."""
    num_pages: int


@dataclass(frozen=True, slots=True)
class Differences:
    """What a comparison found."""

    where: Sequence[str]
    num_rows: int
    """Rows of logits that were compared."""
    preempted: int


def ways(lengths: tuple[int, ...], num_tokens: int) -> list[Way]:
    """Return each request alone, and all of them together in three ways. With the last one they have no room to grow:
    some are preempted.
    """
    pages = [-(-(length + num_tokens) // PAGE_SIZE) for length in lengths]
    many = sum(pages) + len(pages)
    few = sum(-(-length // PAGE_SIZE) for length in lengths) + 1
    return [
        Way("alone", 1, CONTEXT, many),
        Way("together", len(lengths), CONTEXT, many),
        Way("in chunks of 7", len(lengths), 7, many),
        Way("with few pages", len(lengths), CONTEXT, few),
    ]


def run(scale: Scale, report: Report) -> None:
    """Report whether the bits are the same, of each attention that can give them, then the times of steps."""
    device = torch.device(scale.device)
    for dtype in (torch.bfloat16, torch.float32):
        with attempt(report, f"{_short(dtype)}"), tempfile.TemporaryDirectory() as folder:
            write_config(COMPARED[scale.size], Path(folder))
            spec = read_spec(Path(folder))
            names = dict.fromkeys((_attention(spec, dtype, device), "torch"))
            for name in names:
                _compare(report, f"{_short(dtype)} {name}", name, spec, Path(folder), dtype, device, scale.size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with attempt(report, "cost"), tempfile.TemporaryDirectory() as folder:
        write_config(TIMED[scale.size], Path(folder))
        _cost(report, read_spec(Path(folder)), Path(folder), dtype, device, scale.size)


def _attention(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str:
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, spec.window, dtype, device)
    return resolve_attention("auto", shape)


def _compare(
    report: Report,
    item: str,
    attention: str,
    spec: ModelSpec,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    size: str,
) -> None:
    """Report whether a request has the same bits in every way; the same without the flag is a mere figure."""
    how = {"device": device, "dtype": dtype, "attention": attention}
    with attempt(report, item):
        found = differences(spec, folder, size, deterministic=True, **how)
        without = differences(spec, folder, size, deterministic=False, **how)
        figures = {"rows": found.num_rows, "preempted": found.preempted, "differ": len(found.where)}
        figures["differ_without"] = len(without.where)
        report(item, ok=not found.where, **figures, shown="; ".join(found.where[:SHOWN]))


def differences(spec: ModelSpec, folder: Path, size: str, **how: Any) -> Differences:
    """Compare the logits of some requests with those that they have alone."""
    lengths, num_tokens = PROMPT_LENGTHS[size], NUM_TOKENS[size]
    alone, *others = ways(lengths, num_tokens)
    sizes: dict[str, Any] = {"num_pages": alone.num_pages, "page_size": PAGE_SIZE, "max_running_requests": len(lengths)}
    engine = Engine(spec, folder, max_seq_len=CONTEXT, dummy=True, **sizes, **how)
    expected, _ = logits_of(engine, spec, alone, lengths, num_tokens)
    found = {way.name: logits_of(engine, spec, way, lengths, num_tokens) for way in others}
    differ = [
        f"{name}: request {request} position {position}"
        for name, (rows, _) in found.items()
        for (request, position), row_V in expected.items()
        if not torch.equal(rows.get((request, position), torch.empty(0)), row_V)
    ]
    return Differences(differ, len(expected) * len(found), sum(times for _, times in found.values()))


def logits_of(engine: Engine, spec: ModelSpec, way: Way, lengths: tuple[int, ...], num_tokens: int) -> tuple[Rows, int]:
    """Return the logits from which each token of some requests was chosen, the one with the largest logit, and how
    often a request was preempted.
    """
    context = min(CONTEXT, way.num_pages * PAGE_SIZE)
    limits = ScheduleLimits(context, way.budget, way.budget, way.running, vocab_size=spec.vocab_size)
    cache = make_cache("radix", way.num_pages, PAGE_SIZE)
    schedule = Schedule(cache, limits, [], Identity("generate-0", 1, "f"))
    params = GREEDY.model_copy(update={"max_tokens": num_tokens, "ignore_eos": True})
    for number, length in enumerate(lengths):
        prompt = tuple(random.Random(number).choices(range(spec.vocab_size), k=length))
        refused = schedule.add(NewRequest(str(number), prompt, (), params))
        assert refused is None, refused
    found: Rows = {}
    produced, preempted = [0] * len(lengths), 0
    while (planned := schedule.plan()) is not None:
        plan, marks = planned
        preempted += sum(isinstance(mark, EventRow) and isinstance(mark.event, Preempted) for mark in marks)
        logits_RV = engine.logits(plan).cpu()
        for row, logits_V in zip(schedule.complete(logits_RV.argmax(-1).tolist()), logits_RV, strict=True):
            number = int(row.uid)
            found[number, lengths[number] + produced[number]] = logits_V
            produced[number] += 1
    return found, preempted


def _cost(report: Report, spec: ModelSpec, folder: Path, dtype: torch.dtype, device: torch.device, size: str) -> None:
    """Report the time of each step with the flag and without."""
    context = TIMED_CONTEXT[size]
    steps = {f"decode of {rows} rows": ((context, 1),) * rows for rows in TIMED_ROWS[size]}
    steps[f"prefill of {PREFILL_TOKENS[size]} tokens"] = ((0, PREFILL_TOKENS[size]),)
    attention = _attention(spec, dtype, device)
    graph = max(TIMED_ROWS[size]) if attention == "fi" else 0
    times: dict[bool, Mapping[str, float]] = {}
    for deterministic in (False, True):
        engine = Engine(
            spec,
            folder,
            device=device,
            dtype=dtype,
            num_pages=max(make_plan(rows, PAGE_SIZE)[2] for rows in steps.values()),
            page_size=PAGE_SIZE,
            max_running_requests=max(map(len, steps.values())),
            max_seq_len=max(start + count for rows in steps.values() for start, count in rows) + PAGE_SIZE,
            attention=attention,
            graph=0 if deterministic else graph,
            deterministic=deterministic,
            dummy=True,
        )
        engine.kv_L2PKSD.normal_()
        times[deterministic] = {step: _step_s(engine, spec, rows) for step, rows in steps.items()}
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for step in steps:
        without_s, with_s = times[False][step], times[True][step]
        figures = {"without_ms": 1e3 * without_s, "with_ms": 1e3 * with_s, "times_as_long": with_s / without_s}
        report(f"{attention} {step}", ok=None, **figures)


def _step_s(engine: Engine, spec: ModelSpec, rows: tuple[tuple[int, int], ...]) -> float:
    plan, _, _ = make_plan(rows, PAGE_SIZE, vocab_size=spec.vocab_size)
    plan = sampling(plan)
    engine.forward(plan)
    wait(engine.device)
    plan = replace(plan, rows=tuple(replace(row, new_pages=()) for row in plan.rows))  # as in most steps
    return step_times(lambda: engine.forward(plan), engine.device, rounds=ROUNDS).total_s


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
