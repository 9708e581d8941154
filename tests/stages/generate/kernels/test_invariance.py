"""Every bit that an engine computes for a request is the same alone and in any batch, in any chunks, on any threads.

The tokens are given, not drawn, so that two ways to compute them can be compared to their end even where they differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from support.checkpoints import FAMILIES, Family, make_checkpoint, make_engine
from support.gemm import DTYPES as FORMATS
from support.gguf_files import ARCHITECTURES, WIDE, make_gguf, mixed
from support.kernel_variants import DTYPES, VARIANTS
from support.plans import Request, plan
from support.quantized import KINDS, quantize
from support.selection import by_night, rest_at_night
from torch import Tensor

from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.model.folder import model_folder
from stages.generate.schedule.plan import PlanRow, RowScores, Scoring

# L = layers, P = pages, K = kv heads, S = slots of a page, D = head dim, V = vocabulary

PAGE_SIZE = 16
MOST_ROWS = 64
LENGTH = 141
"""Tokens of the longest request but one: more than tiles, pages and windows hold, and no multiple of any."""
LONG = by_night(1100, 2300)
"""Tokens of the longest one, whose attention may be shared between threads even in a decode row."""
PROMPT = 61
NUM_PAGES = 2 * MOST_ROWS * -(-LENGTH // PAGE_SIZE)
CHUNKS = (1, 3, 16, 64, LENGTH)
THREADS = (1, 2, 3)
Open = Callable[[int], Engine]

pytestmark = pytest.mark.usefixtures("torch_threads")


@dataclass(frozen=True)
class Mode:
    """Which model is computed how."""

    family: Family
    kernels: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.family}-{self.kernels}-{self.dtype}"


def torch_modes() -> list[object]:
    """Return those that show that a test can fail, at night."""
    fails = pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="torch's sums depend on the batch")
    families = [family for family in FAMILIES if family != "gemma2"]  # a cap takes another way through torch
    return [pytest.param(Mode(family, "torch", "bfloat16"), marks=[fails, pytest.mark.night]) for family in families]


def kernel_modes() -> list[object]:
    """Return every family in bfloat16 and one in every way; at night every family in every way."""
    best = (VARIANTS[-1:], "bfloat16")
    of_checkpoints: list[object] = [
        pytest.param(
            Mode(family, kernels, dtype),
            marks=[] if family == "odd" or ((kernels,), dtype) == best else pytest.mark.night,
        )
        for family in FAMILIES
        for kernels in VARIANTS
        for dtype in DTYPES
    ]
    of_files: list[object] = [
        pytest.param(
            Mode(family, kernels, "gguf"),
            marks=[] if (family, kernels) == ("qwen3moe", VARIANTS[-1]) else pytest.mark.night,
        )
        for family in ARCHITECTURES
        for kernels in VARIANTS
    ]
    quantizers: tuple[tuple[Family, str], ...] = (
        ("qwen3moe", "awq-64"),
        ("qwen3", "gptq-order"),
        ("llama3", "packed-32-zeros"),
    )
    of_quantizers: list[object] = [
        pytest.param(
            Mode(family, kernels, kind), marks=[] if (kernels, kind) == (VARIANTS[-1], "awq-64") else pytest.mark.night
        )
        for family, kind in quantizers
        for kernels in VARIANTS
    ]
    return of_checkpoints + of_files + of_quantizers


@pytest.fixture(scope="module", params=[*torch_modes(), *kernel_modes()], ids=str)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture(scope="module")
def open_engine(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Return a function that makes an engine with so many threads."""
    folder = tmp_path_factory.mktemp(str(mode))
    if mode.dtype == "gguf":
        make_gguf(folder / "model.gguf", mode.family, mixed, max_positions=LONG)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            folder = model_folder(str(folder / "model.gguf"))
    elif mode.dtype in KINDS:
        make_checkpoint(folder / "plain", mode.family, num_layers=3, max_positions=LONG, sizes=WIDE)
        quantize(folder / "plain", KINDS[mode.dtype], folder / "quantized", folder / "meant")
        folder = folder / "quantized"
    else:
        make_checkpoint(folder, mode.family, max_positions=LONG)
    is_quantized = mode.dtype in ("int8", "gguf") or mode.dtype in KINDS
    options: dict[str, Any] = {"quantization": mode.dtype} if is_quantized else {}
    options |= {"attention": "torch"} if mode.kernels == "torch" else {}
    sizes: dict[str, Any] = {
        "num_pages": NUM_PAGES,
        "page_size": PAGE_SIZE,
        "max_running_requests": 2 * MOST_ROWS,
        "max_seq_len": LONG,
    }
    dtype = mode.dtype if mode.dtype in FORMATS else "bfloat16"
    return lambda threads: make_engine(folder, dtype, threads=threads, kernels=mode.kernels, **sizes, **options)


@pytest.fixture
def engine(open_engine: Open) -> Engine:
    return open_engine(1)


class Requests:
    """Takes page table rows and pages in a shuffled order."""

    def __init__(self) -> None:
        self.draw = random.Random(0)
        self._pool = self.draw.sample(range(NUM_PAGES), NUM_PAGES)
        self._tables = self.draw.sample(range(2 * MOST_ROWS), 2 * MOST_ROWS)

    def new(self, tokens: Sequence[int]) -> Request:
        return Request(self._tables.pop(), list(tokens), self._pool, page_size=PAGE_SIZE)

    def any(self, length: int) -> Request:
        return self.new(self.draw.choices(range(4, 400), k=length))


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def in_order_of_tokens(k_PKSD: Tensor) -> Tensor:
    """Return keys [page, head, slot, dimension], which lie as `Pages` in kernels.h says."""
    num_pages, num_heads, page_size, head_dim = k_PKSD.shape
    if page_size < 16:
        return k_PKSD
    word = 2 if k_PKSD.dtype == torch.bfloat16 else 1
    k_PKGDSW = k_PKSD.reshape(num_pages, num_heads, page_size // 16, head_dim // word, 16, word)
    return k_PKGDSW.transpose(3, 4).reshape(k_PKSD.shape)


def kv_of(engine: Engine, request: Request) -> Tensor:
    """Return the bits of a request's keys and values, in the order of its tokens."""
    kv_L2PKSD = engine.kv_L2PKSD[:, :, request.pages]
    keys = [in_order_of_tokens(k_PKSD) for k_PKSD in kv_L2PKSD[:, 0]]
    kv_L2KPSD = torch.stack([torch.stack(keys), kv_L2PKSD[:, 1]], 1).movedim(2, 3)
    return bits(kv_L2KPSD.flatten(3, 4)[..., : request.computed, :])


def is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def alone(engine: Engine, request: Request, chunk: int = LONG) -> Tensor:
    """Return the logits after the request's last token, computed in chunks; those of other requests are not there."""
    while request.computed < len(request.tokens) - chunk:
        engine.logits(plan(request.row(chunk)))
    return engine.logits(plan(request.row(chunk)))[0]


def again(request: Request) -> PlanRow:
    """Return a decode row of the request's last token, which was computed before."""
    request.computed -= 1
    return request.row(1)


def assert_none_differ(differing: Sequence[object]) -> None:
    """Fail as nothing else does, since a mark says where that is expected."""
    if differing:
        pytest.fail(f"other bits: {differing}")


def test_a_decode_row_has_the_logits_and_kv_of_its_prompt_in_any_batch(engine: Engine) -> None:
    requests = Requests()
    rows = [requests.any(requests.draw.randrange(2, LENGTH)) for _ in range(MOST_ROWS)]
    expected = [alone(engine, request) for request in rows]
    kv_before = bits(engine.kv_L2PKSD).clone()
    differing: list[object] = []
    for num_rows in range(1, MOST_ROWS + 1):
        chosen = requests.draw.sample(range(MOST_ROWS), num_rows)
        logits_RV = engine.logits(plan(*(again(rows[index]) for index in chosen)))
        if not is_same(logits_RV, torch.stack([expected[index] for index in chosen])):
            differing.append(num_rows)
    if not torch.equal(bits(engine.kv_L2PKSD), kv_before):
        differing.append("kv")
    assert_none_differ(differing)


@pytest.mark.parametrize("company", rest_at_night([True, False]))
def test_a_prompt_has_the_same_logits_and_kv_in_any_chunks(engine: Engine, company: bool) -> None:
    """In company there are decode rows and chunks beside each of its chunks."""
    requests = Requests()
    whole, decoding = requests.any(LENGTH), [requests.any(20 + index) for index in range(9)]
    expected, *_ = [alone(engine, request) for request in (whole, *decoding)]
    differing = []
    for chunk in CHUNKS:
        one, arriving = requests.new(whole.tokens), requests.any(LENGTH)
        while one.computed < LENGTH:
            others = [again(other) for other in decoding if company and requests.draw.random() < 0.5]
            chunks = [arriving.row(2)] if company and arriving.computed < LENGTH - 2 else []
            rows = [*others, one.row(chunk), *chunks]
            logits_RV = engine.logits(plan(*rows))
        if not is_same(logits_RV[-1], expected) or not torch.equal(kv_of(engine, one), kv_of(engine, whole)):
            differing.append(chunk)
    assert_none_differ(differing)


def test_output_that_is_computed_again_as_a_prompt_has_the_same_logits_and_kv(engine: Engine) -> None:
    """As after a preemption and a takeover."""
    requests = Requests()
    tokens = requests.draw.choices(range(4, 400), k=LENGTH)
    first = requests.new(tokens[:PROMPT])
    expected = {PROMPT: alone(engine, first)}
    for token in tokens[PROMPT:]:
        first.tokens.append(token)
        expected[len(first.tokens)] = alone(engine, first)
    differing = []
    for length in [*range(PROMPT, LENGTH, by_night(10, 3)), LENGTH]:
        second = requests.new(tokens[:length])
        same = is_same(alone(engine, second), expected[length])
        if not same or not torch.equal(kv_of(engine, second), kv_of(engine, first)[..., :length, :]):
            differing.append(length)
    assert_none_differ(differing)


def test_drawn_tokens_and_all_scores_are_the_same_in_any_batch(engine: Engine) -> None:
    """Each prompt alone and whole; then all of them at once, their last tokens in a second step."""
    requests = Requests()
    ones = [requests.any(requests.draw.randrange(9, LENGTH)) for _ in range(9)]
    twins = [requests.new(one.tokens) for one in ones]
    for index, (one, twin) in enumerate(zip(ones, twins, strict=True)):
        one.params = twin.params = SamplingParams(seed=index, top_p=(0.5, 1)[index % 2], logprobs=2)

    def scored(request: Request, count: int) -> PlanRow:
        return replace(request.row(count), scoring=Scoring(tuple(request.tokens[1:]), 2))

    expected = [engine.forward(plan(scored(one, LENGTH))) for one in ones]
    prompts = engine.forward(plan(*(scored(twin, len(twin.tokens) - 1) for twin in twins)))
    drawn = engine.forward(plan(*(twin.row(1) for twin in twins)))
    differing = []
    for index, (one, twin) in enumerate(zip(ones, twins, strict=True)):
        scores = RowScores(drawn.scores[twin.table].tokens, prompts.scores[twin.table].prompt)
        if expected[index].token_ids != [drawn.token_ids[index]] or expected[index].scores != {one.table: scores}:
            differing.append(index)
    assert_none_differ(differing)


@pytest.mark.parametrize("mode", kernel_modes(), indirect=True, ids=str)
def test_a_long_row_has_the_same_logits_and_kv_in_any_chunks_on_any_threads(open_engine: Open) -> None:
    expected: list[tuple[Tensor, Tensor]] = []
    differing: list[object] = []
    chunks = (LONG, LONG - 1, 100)
    for threads, chunk in by_night(zip(THREADS, chunks, strict=True), product(THREADS, chunks)):
        engine, requests = open_engine(threads), Requests()
        one = requests.any(LONG)
        found = alone(engine, one, chunk), kv_of(engine, one)
        expected = expected or [found]
        if not is_same(found[0], expected[0][0]) or not torch.equal(found[1], expected[0][1]):
            differing.append((threads, chunk))
    assert_none_differ(differing)
