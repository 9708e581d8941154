"""Phase `overlap`: does a step that is launched before the last one has landed change a token, and how much time of the
host does it hide?

The same requests run with overlap and without, some of them preempted and some cancelled. Then decode steps are timed
both ways, beside what the device needs for one.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from ops.bench.gpu.engine import sampling
from ops.bench.gpu.pages import make_plan
from ops.bench.gpu.phase import Report, Scale, Skip, attempt
from ops.bench.gpu.profiled import profiled
from ops.bench.models import SHAPES, Shape, write_config
from pipeline.events import EventRow, Preempted, SamplingParams
from stages.generate.attention import AttentionShape
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.model.spec import ModelSpec, read_spec
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits
from stages.generate.setup.resolve import resolve_attention

PAGE_SIZE: Final = 16
COMPARED: Final = Shape(64, 2, 4, 2, 64, 96, 512, 10_000.0, 4096)
PROMPT_LENGTHS: Final = (5, 31, 32, 15, 46)
NUM_TOKENS: Final = {"toy": 6, "small": 12, "full": 40}
CANCELLED: Final = {"3": 2}
"""Request -> the number of tokens after which it is cancelled."""
TIMED: Final = {"toy": COMPARED, "small": Shape(256, 4, 8, 2, 64, 512, 2000, 10_000.0, 4096), "full": SHAPES["0.6b"]}
TIMED_ROWS: Final = {"toy": (1, 3), "small": (1, 8), "full": (1, 256)}
TIMED_CONTEXT: Final = {"toy": 20, "small": 64, "full": 256}
TIMED_STEPS: Final = {"toy": 4, "small": 8, "full": 40}


@dataclass(slots=True)
class Driven:
    """What became of some requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    preempted: int = 0
    steps: int = 0
    landed_s: list[float] = field(default_factory=list)
    """When each step had landed."""


def driven(
    schedule: Schedule,
    engine: Engine,
    *,
    overlap: bool,
    cancelled: Mapping[str, int] = {},
    after_each: Callable[[], object] = lambda: None,
) -> Driven:
    """Run a schedule to its end; with *overlap* each step is launched before the one before has landed.

    *cancelled* requests are dropped once they have so many tokens.
    """
    found, flights = Driven(), deque[Any]()
    while True:
        planned = schedule.plan()
        if planned is not None:
            plan, marks = planned
            found.preempted += sum(isinstance(mark, EventRow) and isinstance(mark.event, Preempted) for mark in marks)
            flights.append(engine.launch(plan, flights[-1] if flights else None))
        elif not flights:
            return found
        if planned is None or not overlap or len(flights) == 2:
            computed = engine.wait(flights.popleft())
            for row in schedule.complete(computed.token_ids, computed.scores):
                tokens = found.tokens.setdefault(row.uid, [])
                tokens.append(row.token)
                if len(tokens) == cancelled.get(row.uid):
                    schedule.drop(row.uid)
            found.steps += 1
            found.landed_s.append(time.perf_counter())
            after_each()


def run(scale: Scale, report: Report) -> None:
    """Report whether the tokens are the same, then what the steps take."""
    device = torch.device(scale.device)
    with tempfile.TemporaryDirectory() as folder:
        write_config(COMPARED, Path(folder))
        spec = read_spec(Path(folder))
        for name, dtype, attention, deterministic in (
            ("float32 torch", torch.float32, "torch", False),
            ("bfloat16 deterministic", torch.bfloat16, "fi", True),
        ):
            with attempt(report, name):
                if attention == "fi" and (device.type != "cuda" or best_attention(spec, dtype, device) != "fi"):
                    raise Skip("FlashInfer cannot be used here")
                how: dict[str, Any] = {"dtype": dtype, "attention": attention, "deterministic": deterministic}
                _compare(report, name, spec, Path(folder), scale.size, device=device, **how)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with attempt(report, "time"), tempfile.TemporaryDirectory() as folder:
        write_config(TIMED[scale.size], Path(folder))
        _time(report, read_spec(Path(folder)), Path(folder), dtype, device, scale.size)


def best_attention(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Return the backend that an engine would take."""
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, spec.window, dtype, device)
    return resolve_attention("auto", shape)


def make_schedule(
    spec: ModelSpec, lengths: Sequence[int], num_pages: int, params: Callable[[int], SamplingParams], *, budget: int
) -> Schedule:
    """Return a schedule with random prompts of these *lengths*, whose uids count up."""
    context = min(spec.max_positions, num_pages * PAGE_SIZE)
    limits = ScheduleLimits(context, budget, budget, len(lengths), vocab_size=spec.vocab_size)
    schedule = Schedule(make_cache("radix", num_pages, PAGE_SIZE), limits, [], Identity("generate-0", 1, "f"))
    for number, length in enumerate(lengths):
        prompt = tuple(random.Random(number).choices(range(spec.vocab_size), k=length))
        refused = schedule.add(NewRequest(str(number), prompt, (), params(number)))
        assert refused is None, refused
    return schedule


def _compare(report: Report, item: str, spec: ModelSpec, folder: Path, size: str, **how: Any) -> None:
    """Report whether each request has the same tokens both ways; a cancelled one those that it has both ways."""
    num_tokens = NUM_TOKENS[size]
    num_pages = sum(-(-length // PAGE_SIZE) for length in PROMPT_LENGTHS) + 1
    sizes: dict[str, Any] = {"num_pages": num_pages, "page_size": PAGE_SIZE, "max_seq_len": 160}
    engine = Engine(spec, folder, max_running_requests=len(PROMPT_LENGTHS), dummy=True, **sizes, **how)

    def params(number: int) -> SamplingParams:
        temperature = float(number % 2)
        return SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=number, ignore_eos=True)

    none, ahead = (
        driven(
            make_schedule(spec, PROMPT_LENGTHS, num_pages, params, budget=1024),
            engine,
            overlap=overlap,
            cancelled=CANCELLED,
        )
        for overlap in (False, True)
    )
    differ = [uid for uid, tokens in none.tokens.items() if not _same(tokens, ahead.tokens.get(uid, []))]
    whole = [uid for uid, tokens in ahead.tokens.items() if uid not in CANCELLED and len(tokens) != num_tokens]
    report(
        item,
        ok=not differ and not whole,
        differ=len(differ),
        tokens=sum(map(len, none.tokens.values())),
        preempted=none.preempted,
        preempted_with_overlap=ahead.preempted,
        cancelled=len(CANCELLED),
    )


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether they are equal as far as both go, which is at least one token."""
    both = min(len(one), len(other))
    return both > 0 and list(one[:both]) == list(other[:both])


def _time(report: Report, spec: ModelSpec, folder: Path, dtype: torch.dtype, device: torch.device, size: str) -> None:
    """Report decode steps both ways, and the share of the host's time that overlap hides."""
    attention = best_attention(spec, dtype, device)
    context, num_steps, most = TIMED_CONTEXT[size], TIMED_STEPS[size], max(TIMED_ROWS[size])
    num_pages = most * (-(-(context + num_steps) // PAGE_SIZE) + 1)
    engine = Engine(
        spec,
        folder,
        device=device,
        dtype=dtype,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_running_requests=most,
        max_seq_len=context + num_steps + PAGE_SIZE,
        attention=attention,
        graph=most if attention == "fi" else 0,
        dummy=True,
    )
    engine.kv_L2PKSD.normal_()
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    for rows in TIMED_ROWS[size]:
        with attempt(report, f"decode of {rows} rows"):
            device_s = _device_s(engine, spec, rows, context)
            times = {}
            for overlap in (False, False, True):  # the first run warms up
                schedule = make_schedule(spec, [context] * rows, num_pages, lambda _: params, budget=context * rows)
                landed_s = driven(schedule, engine, overlap=overlap).landed_s[2:]
                times[overlap] = (landed_s[-1] - landed_s[0]) / (len(landed_s) - 1)
            host_s, is_apart = times[False] - device_s, device.type == "cuda"
            report(
                f"decode of {rows} rows",
                ok=None,
                step_ms=1e3 * times[False],
                step_with_overlap_ms=1e3 * times[True],
                device_ms=1e3 * device_s,
                hidden_share_of_host=(times[False] - times[True]) / host_s if is_apart and host_s > 0 else None,
            )


def _device_s(engine: Engine, spec: ModelSpec, rows: int, context: int) -> float:
    """Return how long the device is busy in a decode step."""
    plan, _, _ = make_plan(((context, 1),) * rows, PAGE_SIZE, vocab_size=spec.vocab_size)
    plan = sampling(plan)
    engine.forward(plan)
    return profiled(lambda: engine.forward(plan), engine.device).busy_s
