"""How fast today's engine computes a step, eagerly, with random weights in the shapes of Qwen3; where its time goes.

Prefill of one prompt, decode of several rows at a context of 512. A decode step has to read the weights and the keys
and values of its rows; a prefill has to multiply: each is put beside what the device can do.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from ops.bench.gpu.pages import make_plan
from ops.bench.gpu.phase import Report, Scale, attempt
from ops.bench.gpu.profiled import profiled
from ops.bench.gpu.timing import copy_bytes_per_s, matmul_flops_per_s, median_s, step_times, wait
from ops.bench.models import SHAPE_8B, SHAPES, Shape, write_config
from pipeline.events import SamplingParams
from stages.generate.attention import AttentionShape
from stages.generate.batch import build_batch
from stages.generate.forward.engine import Engine
from stages.generate.model.checkpoint import EMBEDDING
from stages.generate.model.spec import ModelSpec, read_spec, tensor_shapes
from stages.generate.schedule.plan import BatchPlan, Sample
from stages.generate.setup.resolve import resolve_attention

PAGE_SIZE: Final = 16
GIB: Final = 2**30
MODELS: Final[Mapping[str, Mapping[str, Shape]]] = {
    "toy": {"tiny": Shape(64, 2, 4, 2, 16, 96, 512, 10_000.0, 4096)},
    "small": {"tiny": Shape(256, 4, 8, 2, 32, 512, 2000, 10_000.0, 4096)},
    "full": {"0.6b": SHAPES["0.6b"], "8b": SHAPE_8B},
}
DECODE_ROWS: Final = {"toy": (1, 3), "small": (1, 32), "full": (1, 32, 256)}
CONTEXT: Final = {"toy": 40, "small": 512, "full": 512}
PREFILL_TOKENS: Final = {"toy": 64, "small": 512, "full": 2048}
ROUNDS: Final = 5
NUM_LONGEST: Final = 10
GREEDY: Final = SamplingParams(temperature=0)


def run(scale: Scale, report: Report) -> None:
    """Report the limits of the device, then each model's steps."""
    device = torch.device(scale.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy_rate, matmul_rate = float("nan"), float("nan")
    with attempt(report, "limits"):
        copy_rate = copy_bytes_per_s(device, scale.size)
        matmul_rate = matmul_flops_per_s(device, scale.size, dtype)
        report("limits", copy_gb_per_s=copy_rate / 1e9, matmul_tflops=matmul_rate / 1e12)
    for name, shape in MODELS[scale.size].items():
        with attempt(report, name), tempfile.TemporaryDirectory() as folder:
            write_config(shape, Path(folder))
            _measure_model(name, Path(folder), scale, device, dtype, (copy_rate, matmul_rate), report)


def _measure_model(
    name: str,
    folder: Path,
    scale: Scale,
    device: torch.device,
    dtype: torch.dtype,
    rates: tuple[float, float],
    report: Report,
) -> None:
    """Report all steps with the best attention backend of the device, and decode steps with its graphs; of the first
    model then all steps with graphs, but with torch's operations beside the attention.
    """
    spec = read_spec(folder)
    context, num_prefill = CONTEXT[scale.size], PREFILL_TOKENS[scale.size]
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, spec.window, dtype, device)
    best = resolve_attention("auto", shape)
    rows_of = {f"decode of {rows} rows": ((context, 1),) * rows for rows in DECODE_ROWS[scale.size]}
    rows_of[f"prefill of {num_prefill} tokens"] = ((0, num_prefill),)
    decode = {step: rows for step, rows in rows_of.items() if step.startswith("decode")}
    tries = [(f"{name} {best}", 0, True, rows_of)]
    if best == "fi":
        most_rows = max(map(len, decode.values()))
        tries.append((f"{name} fi graphs", most_rows, True, decode))
        if name == next(iter(MODELS[scale.size])):
            tries.append((f"{name} fi graphs, layers in torch", most_rows, False, rows_of))
    for title, graph, fused, steps in tries:
        with attempt(report, f"{title} load"):
            how = {"attention": best, "graph": graph, "fused": fused}
            engine = _load(title, how, spec, folder, device, dtype, list(steps.values()), report)
            for step, rows in steps.items():
                with attempt(report, f"{title} {step}"):
                    _measure_step(f"{title} {step}", spec, engine, rows, rates, report)
            del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _load(
    title: str,
    how: Mapping[str, Any],
    spec: ModelSpec,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    all_rows: list[tuple[tuple[int, int], ...]],
    report: Report,
) -> Engine:
    """Return an engine with random weights and pages full of random numbers."""
    num_pages = max(make_plan(rows, PAGE_SIZE)[2] for rows in all_rows)
    began_s = time.perf_counter()
    engine = Engine(
        spec,
        folder,
        device=device,
        dtype=dtype,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_running_requests=max(map(len, all_rows)),
        max_seq_len=max(start + count for rows in all_rows for start, count in rows) + PAGE_SIZE,
        dummy=True,
        **how,
    )
    wait(device)
    seconds = time.perf_counter() - began_s
    engine.kv_L2PKSD.normal_()
    report(
        f"{title} load",
        seconds=seconds,
        weights_gib=_num_weights(spec) * dtype.itemsize / GIB,
        kv_gib=engine.kv_L2PKSD.nbytes / GIB,
        fused=list(engine.fused),
    )
    return engine


def _measure_step(
    item: str,
    spec: ModelSpec,
    engine: Engine,
    rows: tuple[tuple[int, int], ...],
    rates: tuple[float, float],
    report: Report,
) -> None:
    """Time a step with its tokens, then without them: the copy of the tokens to the host waits for the device."""
    plan, tables, _ = make_plan(rows, PAGE_SIZE, vocab_size=spec.vocab_size)
    tables.update(plan.rows)
    plan = sampling(plan)
    engine.forward(plan)
    plan = replace(plan, rows=tuple(replace(row, new_pages=()) for row in plan.rows))  # as in most steps
    step_s = step_times(lambda: engine.forward(plan), engine.device, rounds=ROUNDS).total_s
    logits = step_times(lambda: engine.logits(plan), engine.device, rounds=ROUNDS)
    build_s = median_s(lambda: build_batch(plan, tables, engine.device), engine.device)
    finite = bool(engine.logits(plan).isfinite().all())
    num_tokens = sum(count for _, count in rows)
    figures: dict[str, object] = {
        "tokens_per_s": num_tokens / step_s,
        "step_ms": 1e3 * step_s,
        "logits_ms": 1e3 * logits.total_s,
        "host_ms": 1e3 * logits.host_s,
        "build_ms": 1e3 * build_s,
    }
    copy_rate, matmul_rate = rates
    if plan.num_decode_rows:
        share = _bytes_read(spec, rows, engine.dtype) / step_s / copy_rate
        figures |= {"gb_read": _bytes_read(spec, rows, engine.dtype) / 1e9, "copy_bandwidth_share": _or_none(share)}
    else:
        figures["matmul_rate_share"] = _or_none(_operations(spec, num_tokens) / step_s / matmul_rate)
    report(item, ok=finite, **figures)
    with attempt(report, f"{item}, profile"):
        found = profiled(lambda: engine.logits(plan), engine.device)
        report(f"{item}, profile", ok=None, **found.figures(NUM_LONGEST))


def sampling(plan: BatchPlan) -> BatchPlan:
    """Return *plan* with rows that all sample."""
    rows = (replace(row, sample=Sample(GREEDY, row.start + len(row.token_ids), ())) for row in plan.rows)
    return replace(plan, rows=tuple(rows))


def _num_weights(spec: ModelSpec) -> int:
    return sum(map(math.prod, tensor_shapes(spec).values()))


def _num_multiplied(spec: ModelSpec) -> int:
    """Return how many weights a token is multiplied with: embeddings are looked up, unless they are the head too."""
    embedding = math.prod(tensor_shapes(spec)[EMBEDDING])
    return _num_weights(spec) - (0 if spec.tie_embeddings else embedding)


def _bytes_read(spec: ModelSpec, rows: tuple[tuple[int, int], ...], dtype: torch.dtype) -> int:
    """Return what a decode step has to read: the weights once, and the keys and values of each row."""
    num_kv_tokens = sum(start + count for start, count in rows)
    kv_numbers = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_kv_tokens
    return (_num_multiplied(spec) + kv_numbers) * dtype.itemsize


def _operations(spec: ModelSpec, num_tokens: int) -> float:
    """Return the operations of a prefill: two for each weight and token, the head for the last token alone; attention
    over half of the square."""
    head = spec.vocab_size * spec.hidden_size
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * num_tokens**2
    return 2 * (_num_multiplied(spec) - head) * num_tokens + 2 * head + attention


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
