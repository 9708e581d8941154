"""With `--deterministic` the bits of a request are its own: alone, in batches, in chunks and after a preemption."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import Family, make_checkpoint
from support.devices import CPU, DEVICES, flashinfer_double, need_flashinfer, need_triton
from support.flashinfer_double import Double
from support.flashinfer_signatures import VERSIONS
from support.pretend_cuda import CUDA, Pretended, pretend_cuda
from support.schedules import make_schedule, marked
from torch import Tensor

from ops.bench.models import Shape, write_config
from pipeline.events import SamplingParams
from stages.generate.attention import flashinfer
from stages.generate.forward import engine as engine_module
from stages.generate.forward import step_graphs
from stages.generate.forward.engine import Engine
from stages.generate.forward.weights import load_weights
from stages.generate.model.config import read_spec
from stages.generate.model.decoder import Decoder
from stages.generate.model.layers import linear
from stages.generate.model.layers.blocks import BLOCK_ROWS
from stages.generate.model.layers.operations import Operations
from stages.generate.model.spec import Loading
from stages.generate.schedule.request import NewRequest

PAGE_SIZE, CONTEXT = 16, 1024
SMALL = Shape(64, 1, 4, 2, 64, 96, 512, 10_000.0, 4096)
LARGE = Shape(1024, 4, 16, 8, 128, 3072, 8000, 10_000.0, 4096)
Rows = dict[tuple[int, int], Tensor]
"""The logits of a request at a position, on the host."""


def differences(
    folder: Path, *, lengths: tuple[int, ...] = (5, 31, 32), num_tokens: int = 3, **how: Any
) -> tuple[int, list[str]]:
    """Compare all logits of some requests with those that they have alone: together, in chunks, and with so few pages
    that some are preempted. Return how many there are, and where they differ.
    """
    spec = read_spec(folder)
    many = sum(-(-(length + num_tokens) // PAGE_SIZE) + 1 for length in lengths)
    few = sum(-(-length // PAGE_SIZE) for length in lengths) + 1
    sizes: dict[str, Any] = {"num_pages": many, "page_size": PAGE_SIZE, "max_running_requests": len(lengths)}
    engine = Engine(spec, folder, max_seq_len=CONTEXT, loading=Loading(dummy=True), **sizes, **how)

    def logits_of(running: int, budget: int, num_pages: int) -> tuple[Rows, int]:
        """Return the logits from which each token was chosen, and how often a request was preempted."""
        schedule = make_schedule(
            "radix",
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            context=min(CONTEXT, num_pages * PAGE_SIZE),
            prefill=budget,
            mixed=budget,
            running=running,
            vocab_size=spec.vocab_size,
        )
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for number, length in enumerate(lengths):
            prompt = tuple(random.Random(number).choices(range(spec.vocab_size), k=length))
            assert schedule.add(NewRequest(str(number), prompt, (), params)) is None
        found, produced, preempted = Rows(), [0] * len(lengths), 0
        while (planned := schedule.plan()) is not None:
            preempted += len(marked(planned[1], "preempted"))
            logits_RV = engine.logits(planned[0]).cpu()
            for row, logits_V in zip(schedule.complete(logits_RV.argmax(-1).tolist()), logits_RV, strict=True):
                number = int(row.uid)
                found[number, produced[number]] = logits_V
                produced[number] += 1
        return found, preempted

    alone, _ = logits_of(1, CONTEXT, many)
    running = len(lengths)
    ways = {"together": (running, CONTEXT, many), "chunks": (running, 7, many), "few pages": (running, CONTEXT, few)}
    found = {way: logits_of(*given) for way, given in ways.items()}
    assert [preempted > 0 for _, preempted in found.values()] == [False, False, True]
    assert all(rows.keys() == alone.keys() for rows, _ in found.values())
    differ = [
        f"{way}: {place}"
        for way, (rows, _) in found.items()
        for place, expected_V in alone.items()
        if not torch.equal(rows[place], expected_V)
    ]
    return len(alone) * len(found), differ


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_config(SMALL, path)
    return path


@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.bfloat16, "fi"), (torch.bfloat16, "torch"), (torch.float32, "torch")], ids=str
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_request_has_its_bits_in_any_company(
    device: torch.device, dtype: torch.dtype, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "fi":
        need_flashinfer(device, monkeypatch, head_dim=128)
    on_gpu = device.type == "cuda"
    write_config(LARGE if on_gpu else SMALL, tmp_path)
    load: dict[str, Any] = {"lengths": (5, 700, 40, 301, 64, 17, 129, 1), "num_tokens": 16} if on_gpu else {}
    how: dict[str, Any] = {"device": device, "dtype": dtype, "attention": attention}
    compared, differ = differences(tmp_path, deterministic=True, **load, **how)
    assert (compared, differ) == (3 * 8 * 16 if on_gpu else 27, [])
    _, differ_without = differences(tmp_path, deterministic=False, **load, **how)
    assert differ_without or (attention == "fi" and not on_gpu), "it could not fail"


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_has_its_bits_with_products_of_fixed_shapes_in_graphs(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --gpu-new does: also with recorded steps, where few rows and prompts are padded."""
    need_flashinfer(device, monkeypatch, head_dim=128)
    need_triton(device, monkeypatch)
    if on_cpu := device.type == "cpu":
        monkeypatch.setattr(step_graphs, "PROMPT_STEP", 8)
        monkeypatch.setattr(step_graphs, "MOST_PROMPT_TOKENS", 32)
        monkeypatch.setattr(engine_module, "packs", lambda *_: False)
    write_config(SMALL if on_cpu else LARGE, tmp_path)
    load: dict[str, Any] = {} if on_cpu else {"lengths": (5, 700, 40, 301, 64, 17, 129, 1), "num_tokens": 16}
    dtype = torch.float16 if on_cpu else torch.bfloat16  # numpy has no bfloat16
    how: dict[str, Any] = {"device": device, "dtype": dtype, "attention": "fi", "graph": 2}
    compared, differ = differences(tmp_path, deterministic=True, gpu_new=True, fixed_products=True, **load, **how)
    assert (compared, differ) == (27 if on_cpu else 3 * 8 * 16, [])


@pytest.mark.parametrize("family", ["qwen3", "qwen3moe"])
def test_models_with_experts_keep_blocks_of_rows(family: Family, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    spec = read_spec(folder)
    weights = load_weights(spec, folder, dtype=torch.float32, device=CPU)
    calls: list[int] = []

    def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        calls.append(len(x_TI))
        return torch.nn.functional.linear(x_TI, weight_OI, bias_O)

    decoder = Decoder(spec, weights, block_rows=BLOCK_ROWS, operations=Operations(product=product))
    assert decoder.logits(torch.ones(3, spec.hidden_size)).shape == (3, spec.vocab_size)
    assert calls == ([3] if family == "qwen3" else [])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Double:
    return flashinfer_double(monkeypatch, VERSIONS[-1])


@pytest.fixture
def pretended(library: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretend_cuda(monkeypatch) as device:
        device.may_wait = True  # the logits are compared on the host
        monkeypatch.setattr(library.stream, "launch", device.launch)
        yield device


@pytest.mark.night
def test_on_a_pretended_gpu_a_request_has_its_bits_in_any_company(
    pretended: Pretended, library: Double, folder: Path
) -> None:
    how: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16, "attention": "fi"}
    assert differences(folder, deterministic=True, **how) == (27, [])
    assert set(library.parts) == {1} and set(library.plans) == {"prefill"}


@pytest.mark.parametrize("broken", ["nothing", "splits", "chunks", "all"])
def test_the_bits_differ_without_any_part_of_it(
    library: Double, folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "splits":
        monkeypatch.setattr(library, "BatchPrefillWithPagedKVCacheWrapper", partial(splitting, library))
    elif broken == "chunks":
        monkeypatch.setattr(flashinfer, "indices_of_tokens", flashinfer.indices_of)
    how: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "attention": "fi"}
    _, differ = differences(folder, deterministic=broken != "all", **how)
    assert bool(differ) is (broken != "nothing")


def splitting(library: Double, *arguments: Any, **named: Any) -> Any:
    """Return a wrapper that splits rows."""
    wrapper: Any = Double.BatchPrefillWithPagedKVCacheWrapper(library, *arguments, **named)
    plan = wrapper.plan
    wrapper.plan = lambda *given, **options: plan(*given, **options | {"disable_split_kv": False})
    return wrapper


@pytest.mark.parametrize("family", ["qwen3", "qwen3moe"])
def test_every_matrix_has_one_number_of_rows(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: set[int] = set()
    product = torch.nn.functional.linear

    def noting(x_TI: Tensor, *weights: Tensor) -> Tensor:
        rows.add(len(x_TI))
        return product(x_TI, *weights)

    monkeypatch.setattr(linear, "F", SimpleNamespace(linear=noting))
    monkeypatch.setattr(engine_module, "packs", lambda *_: False)
    folder = make_checkpoint(tmp_path, family)
    how: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "attention": "torch"}
    _, differ = differences(folder, deterministic=True, **how)
    assert (differ, rows - {0}) == ([], {BLOCK_ROWS})
    differences(folder, deterministic=False, **how)
    assert len(rows) > 3
