"""CUDA graphs and overlap change no token: on a CPU, with doubles of FlashInfer and of graphs, and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_checkpoint, make_engine
from support.devices import DEVICES, need_flashinfer, need_triton
from support.plans import Request, plan, shuffled_pages
from support.schedules import Step, make_schedule, marked, steps, steps_ahead

from pipeline.events import SamplingParams
from stages.generate.attention.flashinfer import padded_rows
from stages.generate.forward import engine as engine_module
from stages.generate.forward import step_graphs
from stages.generate.forward.engine import Engine
from stages.generate.schedule.request import NewRequest

PAGE_SIZE = 16
PADDED = 2e-2
"""The distance of logits in bfloat16: a step that is padded may be multiplied by another kernel."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=64)


def engine_on(device: torch.device, folder: Path, dtype: str = "bfloat16", **more: Any) -> Engine:
    sizes = {"page_size": PAGE_SIZE, "max_running_requests": 8, "max_seq_len": 160}
    return make_engine(folder, dtype, device=device, kernels="torch", **sizes | more)


@pytest.mark.parametrize("gpu_new", [False, True], ids=["", "new"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_decode_step_is_the_eager_step(
    device: torch.device, gpu_new: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit if no row pads it; also at other lengths than it was recorded with, and beside a chunk."""
    need_flashinfer(device, monkeypatch)
    if gpu_new:
        need_triton(device, monkeypatch)
        if device.type == "cpu":
            monkeypatch.setattr(step_graphs, "MOST_PROMPT_TOKENS", 256)
    how: dict[str, Any] = {"attention": "fi", "gpu_new": gpu_new}
    how["dtype"] = "float16" if gpu_new and device.type == "cpu" else "bfloat16"  # numpy has no bfloat16
    eager, recorded = (engine_on(device, folder, graph=graph, **how) for graph in (0, 8))
    assert recorded.graph == 8 and recorded.fused == eager.fused
    draw, pool = random.Random(0), shuffled_pages()
    requests = [
        Request(table, draw.choices(range(4, 480), k=3 + 13 * table), pool, page_size=PAGE_SIZE) for table in range(8)
    ]

    def both(*counts: int) -> tuple[torch.Tensor, torch.Tensor]:
        step = plan(*(request.row(count) for request, count in zip(requests, counts, strict=False)))
        eager_RV, recorded_RV = (engine.logits(step).clone() for engine in (eager, recorded))
        for request in requests:
            request.tokens += [draw.randrange(4, 480)] * (request.computed == len(request.tokens))
        return recorded_RV, eager_RV

    def distance(recorded_RV: torch.Tensor, eager_RV: torch.Tensor) -> float:
        return float((recorded_RV - eager_RV).norm() / eager_RV.norm())

    assert distance(*both(*[160] * 7, 20)) <= PADDED
    assert distance(*both(*[1] * 7, 160)) <= PADDED
    for num_rows in (1, 2, 4, 8, 3, 7, 8, 1):
        recorded_RV, eager_RV = both(*[1] * num_rows)
        assert len(eager_RV) == num_rows
        if not gpu_new and padded_rows(num_rows) == num_rows:  # prompts that were padded are in other pages
            assert torch.equal(recorded_RV, eager_RV), num_rows
        assert distance(recorded_RV, eager_RV) <= PADDED, num_rows


LENGTHS = (5, 31, 32, 15, 46)
CANCELLED = "3"


@pytest.mark.parametrize(
    ("dtype", "attention", "graph", "deterministic", "gpu_new"),
    [
        ("float32", "torch", 0, False, False),
        ("bfloat16", "fi", 0, True, False),
        ("bfloat16", "fi", 8, False, False),
        pytest.param("bfloat16", "fi", 8, True, True, id="new"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_preempted_and_cancelled_requests_get_the_same_tokens_with_overlap_and_without(
    device: torch.device,
    dtype: str,
    attention: str,
    graph: int,
    deterministic: bool,
    gpu_new: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With graphs and in bfloat16 a step of another size may round in another way; there, only that all tokens come."""
    if attention == "fi":
        need_flashinfer(device, monkeypatch)
    num_tokens = 40 if device.type == "cuda" else 12
    num_pages = sum(-(-length // PAGE_SIZE) for length in LENGTHS) + 1
    how: dict[str, Any] = {"attention": attention, "graph": graph, "deterministic": deterministic}
    if gpu_new:
        need_triton(device, monkeypatch)
        how |= {"gpu_new": True, "fixed_products": True}
        if device.type == "cpu":
            monkeypatch.setattr(step_graphs, "PROMPT_STEP", 16)
            monkeypatch.setattr(step_graphs, "MOST_PROMPT_TOKENS", 64)
            monkeypatch.setattr(engine_module, "packs", lambda *_: False)
            dtype = "float16"  # numpy has no bfloat16
    engine = engine_on(device, folder, dtype, num_pages=num_pages, **how)
    assert engine.device.type == device.type and engine.graph == graph

    def tokens_of(ahead: bool) -> dict[str, list[int]]:
        schedule = make_schedule(
            "radix", num_pages=num_pages, page_size=PAGE_SIZE, context=160, prefill=160, vocab_size=512
        )
        for number, length in enumerate(LENGTHS):
            prompt = random.Random(number).choices(range(4, 480), k=length)
            params = SamplingParams(max_tokens=num_tokens, temperature=number % 2, seed=number, ignore_eos=True)
            assert schedule.add(NewRequest(str(number), tuple(prompt), (), params)) is None
        found, preempted = dict[str, list[int]](), 0
        run: Iterable[Step] = steps_ahead(schedule, engine) if ahead else steps(schedule, engine.forward)
        for _, marks, rows in run:
            preempted += len(marked(marks, "preempted"))
            for row in rows:
                found.setdefault(row.uid, []).append(row.token)
                if row.uid == CANCELLED and len(found[CANCELLED]) == 2:
                    schedule.drop(CANCELLED)
        assert preempted
        return found

    without, ahead = tokens_of(ahead=False), tokens_of(ahead=True)
    counts = {uid: 2 if uid == CANCELLED else num_tokens for uid in without}
    assert {uid: len(tokens) for uid, tokens in ahead.items()} == counts == {u: len(t) for u, t in without.items()}
    if dtype == "float32" or deterministic:
        assert ahead == without
