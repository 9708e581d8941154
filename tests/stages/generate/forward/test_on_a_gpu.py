"""A whole engine on a device that is pretended: nothing waits for it, and graphs of decode steps change no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from support import triton_double
from support.calls import noted
from support.checkpoints import Family, make_checkpoint, make_engine
from support.devices import flashinfer_double
from support.flashinfer_double import Double
from support.plans import Request, plan, shuffled_pages
from support.pretend_cuda import CUDA, OnDevice, Pretended, pretend_cuda
from support.schedules import make_schedule, steps_ahead
from support.selection import rest_at_night
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.events import SamplingParams, TokenRow
from stages.generate.attention import flashinfer, fused
from stages.generate.attention.flashinfer import FlashInferAttention, Run
from stages.generate.batch import PageTables, on_device
from stages.generate.forward import graphs, step_graphs
from stages.generate.forward.engine import Engine
from stages.generate.forward.gpu_memory import REMEDY
from stages.generate.model.attention import Attend, places_of, write_pages
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample
from stages.generate.schedule.request import NewRequest

NUM_PAGES, PAGE_SIZE = 128, 4
SIZES: dict[str, Any] = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_running_requests": 5, "max_seq_len": 160}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in ("qwen3", "qwen3moe", "mistral")
    }
    return made | {"large heads": make_checkpoint(tmp_path_factory.mktemp("large"), "qwen3", head_dim=32)}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Double:
    monkeypatch.setattr(flashinfer, "DECODE_BYTES", 1024)
    return flashinfer_double(monkeypatch)


@pytest.fixture
def device(library: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretend_cuda(monkeypatch) as pretended:
        monkeypatch.setattr(library.stream, "launch", pretended.launch)
        monkeypatch.setattr(graphs, "record", pretended.record)
        yield pretended


def engine_on(
    device: Pretended,
    folder: Path,
    attention: str,
    graph: int = 0,
    **more: Any,
) -> Engine:
    device.may_wait = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.generate.forward.weights.can_group", lambda *_: True)
        how: dict[str, Any] = {"attention": attention, "graph": graph}
        engine = make_engine(folder, device=CUDA, kernels="torch", **how, **SIZES, **more)
    device.may_wait = False
    return engine


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    """Return what four requests get, up to three at a time; two have the same prompt."""
    schedule = make_schedule("radix", num_pages=NUM_PAGES, running=3)
    draw, found = random.Random(0), dict[str, list[int]]()
    prompts = [tuple(draw.choices(range(4, 480), k=3 + 9 * index)) for index in range(3)]
    for index, prompt in enumerate((*prompts, prompts[2])):
        params = SamplingParams(max_tokens=1 + index, temperature=index % 2, seed=index, ignore_eos=True)
        schedule.add(NewRequest(f"{index}", prompt, (), params))
    for _, _, rows in steps_ahead(schedule, engine):
        for row in rows:
            if isinstance(row, TokenRow):
                found.setdefault(row.uid, []).append(row.token)
    return found


@pytest.fixture
def new(device: Pretended, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is behind --gpu-new: prompts of up to 16 tokens are recorded."""
    monkeypatch.setattr(step_graphs, "PROMPT_STEP", 8)
    monkeypatch.setattr(step_graphs, "MOST_PROMPT_TOKENS", 16)
    monkeypatch.setattr(triton_double.Kernel, "enqueue", device.launch)
    with triton_double.triton():
        yield {"gpu_new": True}


@pytest.mark.parametrize(
    ("family", "attention", "graph"),
    [
        ("qwen3moe", "fi", 2),
        pytest.param("qwen3", "torch", 0, marks=pytest.mark.night),
        pytest.param("mistral", "fi", 2, marks=pytest.mark.night),
        pytest.param("qwen3moe", "fi", 0, marks=pytest.mark.night),
        pytest.param("qwen3moe", "fi", 3, marks=pytest.mark.night),
        pytest.param("qwen3", "fa,fi", 2, marks=pytest.mark.night),
    ],
)
def test_nothing_waits_for_the_device_and_the_tokens_are_those_of_a_cpu(
    folders: dict[str, Path], device: Pretended, family: str, attention: str, graph: int
) -> None:
    on_cpu = tokens_of(make_engine(folders[family], kernels="torch", attention="reference", **SIZES))
    assert tokens_of(engine_on(device, folders[family], attention, graph)) == on_cpu
    assert device.num_replays > 0 if graph else device.num_replays == 0


@pytest.mark.parametrize(
    "family", ["qwen3", "mistral", *rest_at_night(["llama3", "qwen2", "qwen3moe", "phi3", "smollm3"], first=0)]
)
def test_with_recorded_prompts_the_tokens_are_the_same(
    device: Pretended, new: dict[str, Any], family: Family, tmp_path: Path
) -> None:
    """Also where prompts are beside decode rows, longer than any recording, and begin on pages of another request."""
    folder = make_checkpoint(tmp_path, family, head_dim=None if family == "mistral" else 64)
    on_cpu = tokens_of(make_engine(folder, kernels="torch", attention="reference", **SIZES))
    engine = engine_on(device, folder, "fi", 2, **new)
    assert engine.fused == tuple(fused.MODULES)
    assert tokens_of(engine) == on_cpu
    replays = device.num_replays
    assert tokens_of(engine_on(device, folder, "fi", 2)) == on_cpu
    assert replays > 2 * (device.num_replays - replays), "a prompt has a replay for each layer, and one more"


def test_a_recorded_prompt_has_its_own_bits_and_leaves_other_pages_alone(
    folders: dict[str, Path], device: Pretended, new: dict[str, Any]
) -> None:
    """Whatever the recordings computed before: the rows that pad it are left out."""
    engine = engine_on(device, folders["large heads"], "fi", 2, **new)
    pages = shuffled_pages()
    requests = [Request(table, [*range(5, 5 + size)], pages, page_size=PAGE_SIZE) for table, size in enumerate((9, 16))]
    alone, other = ([engine.launch(plan(request.row(64)), None).x_TE] for request in requests)
    kv: Any = engine.kv_L2PKSD
    before = kv.held.nan_to_num().clone()
    again = Request(2, [*range(5, 14)], pages, page_size=PAGE_SIZE)
    x_TE: Any = engine.launch(plan(again.row(64)), None).x_TE
    assert torch.equal(x_TE.held, alone[0].held) and len(x_TE) == 9 and len(other[0]) == 16  # type: ignore[attr-defined]
    changed = (kv.held.nan_to_num() != before).any(dim=(0, 1, 3, 4, 5)).nonzero()[:, 0].tolist()
    assert set(again.pages) <= set(changed) <= {*again.pages, engine.num_pages}


def test_a_step_with_more_rows_than_any_recording_leaves_the_recordings_alone(
    folders: dict[str, Path], device: Pretended, new: dict[str, Any]
) -> None:
    """As one with drafts, which is computed without a recording: recorded kernels know where their indices are."""

    def tokens(num_drafts: int, graph: int) -> list[int]:
        engine = engine_on(device, folders["qwen3"], "fi", graph, most_drafts=num_drafts, **new)
        pages, greedy = shuffled_pages(), SamplingParams(temperature=0)
        requests = [Request(table, [5 + table, *range(6, 12)], pages, page_size=PAGE_SIZE) for table in range(3)]

        def step(num_requests: int) -> int:
            some = requests[:num_requests]
            token_ids = engine.wait(engine.launch(plan(*(each.row(64) for each in some)), None)).token_ids
            for request, token in zip(some, token_ids, strict=True):
                request.tokens.append(token)
            return token_ids[0]

        found, rows = [step(3), step(3)], list[PlanRow]()
        for request in requests:
            row = request.row(1)
            missing = -(-(row.start + 1 + num_drafts) // PAGE_SIZE) - len(request.pages)
            more = tuple(request.pool.pop() for _ in range(missing))
            request.pages += more
            rows.append(replace(row, new_pages=row.new_pages + more))
            for place in range(row.start + 1, row.start + 1 + num_drafts):
                rows.append(PlanRow(row.table, place, (7,), (), 0, Sample(greedy, place + 1, ()), is_draft=True))
        told = engine.wait(engine.launch(BatchPlan(0, tuple(rows), len(rows), 3 * num_drafts), None)).token_ids
        for request, token in zip(requests, told[:: 1 + num_drafts], strict=True):  # no draft was right
            request.tokens.append(token)
        return [*found, told[0], *(step(1) for _ in range(6))]

    assert tokens(8, graph=2) == tokens(0, graph=0)


def test_if_tritons_kernels_do_not_compile_the_flag_is_named(
    folders: dict[str, Path], device: Pretended, new: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(compute: object) -> None:
        raise RuntimeError("gcc: fatal error: Python.h: no such file")

    monkeypatch.setattr(triton_double.Kernel, "enqueue", broken)
    with pytest.raises(ConfigError, match=r"--gpu-new.*Python\.h.*leave it out"):
        engine_on(device, folders["qwen3"], "fi", 2, **new)


def test_a_decode_step_launches_little_beside_its_replay(
    folders: dict[str, Path], device: Pretended, new: dict[str, Any]
) -> None:
    def launched(**how: Any) -> int:
        engine = engine_on(device, folders["large heads"], "fi", 2, **how)
        request = Request(0, [5, 6, 7, 8, 9], shuffled_pages(), page_size=PAGE_SIZE)
        step, counts = None, []
        for token in (-1, -1, -1, -1):
            before = device.num_operations
            step = engine.launch(plan(request.row(64)), step)
            counts.append(device.num_operations - before)
            request.tokens.append(token)
        return counts[-1]

    assert 0 < launched(**new) <= launched() / 2


def test_a_recorded_layer_has_one_kernel_in_place_of_four(
    folders: dict[str, Path], device: Pretended, new: dict[str, Any], tmp_path: Path
) -> None:
    """Two norms, the rope and what writes pages."""
    one_layer = make_checkpoint(tmp_path, "qwen3", head_dim=32, num_layers=1)

    def kernels_of_a_layer(**how: Any) -> int:
        found = []
        for folder in (one_layer, folders["large heads"]):
            device.recorded.clear()
            engine_on(device, folder, "fi", 1, **how)
            found.append(device.recorded[0])  # a decode step of one row
        return found[1] - found[0]

    assert kernels_of_a_layer() - kernels_of_a_layer(fused=True, **new) == 3


def places_outside(attention: FlashInferAttention, run: Run, slots_T: Tensor) -> Attend:
    """Write to places that were computed before the recording."""
    outside = attention.__dict__.setdefault(f"places of {len(slots_T)}", places_of(slots_T, PAGE_SIZE))

    def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv_2PKSD: Tensor) -> Tensor:
        write_pages(kv_2PKSD, k_TKD, v_TKD, outside)
        return run(q_THD, (kv_2PKSD[0], kv_2PKSD[1]))

    return attend


def read_inside(attention: FlashInferAttention, run: Run, slots_T: Tensor) -> Attend:
    assert int(slots_T.max()) >= 0
    return right(attention, run, slots_T)


def pinned_inside(attention: FlashInferAttention, run: Run, slots_T: Tensor) -> Attend:
    torch.empty(3, pin_memory=True)
    return right(attention, run, slots_T)


def copied_inside(attention: FlashInferAttention, run: Run, slots_T: Tensor) -> Attend:
    return right(attention, run, slots_T + on_device(np.zeros(1, np.int32), CUDA))


right = FlashInferAttention.attending


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [(read_inside, "waits for the device"), (pinned_inside, "allocated in"), (copied_inside, "allocated in")],
)
def test_a_wait_and_memory_of_the_host_are_noticed_in_a_recording(
    folders: dict[str, Path], device: Pretended, monkeypatch: pytest.MonkeyPatch, wrong: Any, reason: str
) -> None:
    monkeypatch.setattr(FlashInferAttention, "attending", wrong)
    with pytest.raises(ConfigError, match=reason):
        engine_on(device, folders["qwen3"], "fi", 2)


@pytest.mark.night
def test_where_nothing_can_be_recorded_decode_steps_are_computed_without_and_a_line_says_so(
    folders: dict[str, Path], device: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(engine_on(device, folders["qwen3"], "fi"))

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\n" + "see the page " * 99)

    monkeypatch.setattr(graphs, "record", refuse)
    with capture_logs() as lines:
        engine = engine_on(device, folders["qwen3"], "fi", 2, needs_graph=False)
    (line,) = (line for line in lines if line["event"] == "graphs_unavailable")
    assert line["log_level"] == "warning" and len(line["reason"]) <= 300
    assert line["reason"].startswith("RuntimeError: CUDA error: operation not permitted when stream is capturing see")
    assert engine.graph == 0 and tokens_of(engine) == expected
    with pytest.raises(ConfigError, match="--graph 2"):
        engine_on(device, folders["qwen3"], "fi", 2)


@pytest.mark.night
def test_a_tensor_from_outside_of_a_recording_changes_the_tokens(
    folders: dict[str, Path], device: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(device, folders["qwen3"], "fi", 2)
    expected = logits_of(engine)
    monkeypatch.setattr(FlashInferAttention, "attending", places_outside)
    assert not torch.allclose(logits_of(engine_on(device, folders["qwen3"], "fi", 2)), expected, equal_nan=True)


@torch.inference_mode()
def logits_of(engine: Engine) -> Tensor:
    """Return x_BE of the second decode step of a request."""
    request = Request(0, [5, 6, 7, 8, 9, 10, 11], shuffled_pages(), page_size=PAGE_SIZE)
    for token in (20, 21, 22):
        x_TE = engine.launch(plan(request.row(64)), None).x_TE
        request.tokens.append(token)
    assert isinstance(x_TE, OnDevice)
    return x_TE.held


# memory

PAGE_BYTES = 2 * 2 * 2 * PAGE_SIZE * 24 * 4  # 2 layers, keys and values, 2 kv heads, page, head dim, float32


class Memory:
    """What the driver and torch say of a GPU: the steps take *steps_bytes*, the first the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, steps_bytes: tuple[int, ...]) -> None:
        peaks = iter(steps_bytes)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + next(peaks))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 2 * free_bytes))


@pytest.mark.parametrize(
    ("free_bytes", "graph", "is_new", "num_pages"),
    [
        (900_000 + 20 * PAGE_BYTES, 0, False, 10),
        (900_000 + 2000 + 20 * PAGE_BYTES, 2, False, 10),  # recordings take what a decode step takes
        (900_000 + 1999 + 20 * PAGE_BYTES, 2, False, 9),
        (900_000 + 2000 + 900_000 * 16 // 50 + 20 * PAGE_BYTES, 2, True, 10),  # and prompts their part of a prefill
        (900_000 + 1999 + 900_000 * 16 // 50 + 20 * PAGE_BYTES, 2, True, 9),
        (10**9, 0, False, NUM_PAGES),
    ],
)
def test_the_pages_are_what_fits_beside_the_largest_steps(
    folders: dict[str, Path],
    device: Pretended,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    graph: int,
    is_new: bool,
    num_pages: int,
    new: dict[str, Any],
) -> None:
    Memory(monkeypatch, free_bytes, (900_000, 2000))
    begun = noted(monkeypatch, PageTables, "update", lambda _, rows: rows)
    engine = engine_on(
        device, folders["qwen3"], "fi", graph, memory_ratio=0.5, max_prefill_length=50, **new if is_new else {}
    )
    assert engine.num_pages == num_pages and engine.kv_L2PKSD.shape[2] == num_pages + (graph > 0)
    assert [[len(row.token_ids) for row in rows] for rows in begun] == [[50], [1] * SIZES["max_running_requests"]]


def test_too_little_memory_is_told_with_the_numbers_and_what_to_do(
    folders: dict[str, Path], device: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(monkeypatch, 3 * 2**20, (2 * 2**20, 2**20))
    with pytest.raises(ConfigError) as refused:
        engine_on(device, folders["qwen3"], "fi", 2, memory_ratio=0.5, max_prefill_length=50)
    assert str(refused.value) == (
        "of 6 MiB of GPU memory 3.0 are free beside the weights; the largest step takes 2.0, CUDA graphs 1.0 and a "
        f"page 0.0: no page fits; {REMEDY}"
    )
    monkeypatch.setattr(Engine, "_draw", no_memory)
    with pytest.raises(ConfigError, match="CUDA out"):
        engine_on(device, folders["qwen3"], "fi", 2, memory_ratio=0.5, max_prefill_length=50)


def no_memory(engine: Engine, launched: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ..")
