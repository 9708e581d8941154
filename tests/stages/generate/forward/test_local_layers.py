"""Pages whose local layers have parts of their own: a model with them computes the bits of one without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import WINDOW, make_checkpoint, make_engine
from support.kernel_variants import VARIANTS
from support.plans import Request, generate
from support.schedules import steps

from pipeline.events import Admitted, EventRow, Preempted, SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.forward.pool import page_bytes
from stages.generate.kvcache import make_cache
from stages.generate.kvcache.base import LocalLayers
from stages.generate.model.config import read_spec
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

PAGE_SIZE = 4
NUM_PAGES = 26
"""Whole ones. A request alone is longer than their tokens."""
CONTEXT = 160
LIMITS = ScheduleLimits(CONTEXT, 16, 6, max_running_requests=4, vocab_size=90)
SHARED = [5 + (7 * number) % 71 for number in range(60)]
PROMPTS = [SHARED + [3 + which] * 3 + SHARED[: 11 * which] for which in range(5)]
NUM_TOKENS = 40
KINDS = {
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3": {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = KINDS[request.param]
    made = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(
        made, request.param, num_layers=len(sizes["layer_types"]), max_positions=CONTEXT, sizes=sizes
    )


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(folder: Path, variant: str, **more: Any) -> Engine:
    sizes = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_seq_len": CONTEXT} | more
    return make_engine(folder, "bfloat16", kernels=variant, **sizes)


def alone(folder: Path, variant: str, prompt: list[int]) -> list[int]:
    """Return the tokens of a request in pages that hold everything."""
    num_pages = CONTEXT // PAGE_SIZE
    engine = opened(folder, variant, num_pages=num_pages)
    return generate(engine, Request(0, list(prompt), list(range(num_pages))), NUM_TOKENS, 64)


def lived(schedule: Schedule, engine: Engine, *, rounds: int) -> Iterator[tuple[list[EventRow], dict[str, list[int]]]]:
    """Compute all prompts, several times; yield the marks and the tokens of each round."""
    for _ in range(rounds):
        marks: list[EventRow] = []
        tokens: dict[str, list[int]] = {str(which): [] for which in range(len(PROMPTS))}
        for which, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert schedule.add(NewRequest(str(which), tuple(prompt), (), sampling)) is None
        for _, said, rows in steps(schedule, engine.forward):
            marks += [mark for mark in said if isinstance(mark, EventRow)]
            for row in rows:
                tokens[row.uid].append(row.token)
        yield marks, tokens


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_requests_in_few_pages_get_the_tokens_of_those_alone(folder: Path, variant: str, cache: str) -> None:
    spec = read_spec(folder)
    local = LocalLayers(len(spec.page_parts()) - 1, WINDOW, LIMITS.largest_chunk)
    assert local.num_parts == {"gemma2": 1, "gemma3": 3}[folder.name[:6]] and spec.window == WINDOW
    engine = opened(folder, variant, has_parts=True)
    schedule = Schedule(make_cache(cache, NUM_PAGES, PAGE_SIZE, local), LIMITS, (), Identity("generate-0", 1, ""))
    expected = {str(which): alone(folder, variant, prompt) for which, prompt in enumerate(PROMPTS)}
    assert len(set(map(tuple, expected.values()))) == len(PROMPTS)
    cached: list[int] = []
    preempted = 0
    for marks, tokens in lived(schedule, engine, rounds=2):
        assert tokens == expected
        cached += [mark.event.cached_tokens for mark in marks if isinstance(mark.event, Admitted)]
        preempted += sum(isinstance(mark.event, Preempted) for mark in marks)
    assert preempted > 0
    assert max(cached) > (2 * WINDOW if cache == "radix" else -1)


def test_a_page_has_room_for_all_layers(folder: Path) -> None:
    spec = read_spec(folder)
    parts = spec.page_parts()
    assert sorted(layer for part in parts for layer in part) == list(range(spec.num_layers))
    assert all(spec.kinds[spec.kind_of[layer]].window == 0 for layer in parts[0])
    assert all(spec.kinds[spec.kind_of[layer]].window == WINDOW for part in parts[1:] for layer in part)
    engine = opened(folder, VARIANTS[0], has_parts=True)
    assert engine.kv_L2PKSD.nbytes == NUM_PAGES * page_bytes(spec, PAGE_SIZE, torch.bfloat16, parts)
