"""In any company and under any setting, a request gets the tokens that transformers generates.

Engine and schedule show it in this process for every family under every setting. test_demo_model compares what a server
says with transformers.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import BOS, FAMILIES, TEXT, make_checkpoint, reference_logits
from support.selection import by_night, rest_at_night
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from pipeline.events import (
    Admitted,
    EventRow,
    Preempted,
    SamplingParams,
    Submitted,
    TokenRow,
)
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.model.checkpoint import check_folder
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits
from stages.tokenize.prompts import PromptEncoder

pytestmark = pytest.mark.slow

Body = Mapping[str, Any]

NUM_REQUESTS = 16
NUM_TOKENS = by_night(24, 64)
SMALLEST_GAP = 1e-3
"""Between the two best logits; rounding is a thousand times smaller."""
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
SETTINGS = {
    "as it comes": (),
    "prompts in chunks": ("--cache", "naive", "--page-size", "16", "--max-prefill-length", "32"),
    "few pages": ("--cache", "naive", "--page-size", "16", "--num-pages", "14"),
    "few shared pages": ("--page-size", "16", "--num-pages", "14"),
    "bfloat16": ("--dtype", "bfloat16", "--page-size", "16"),
}
AS_IT_COMES, IN_CHUNKS, FEW_PAGES, FEW_SHARED, IN_BFLOAT16 = SETTINGS


@dataclass(frozen=True)
class Asked:
    """Sixteen requests to one model, and what transformers makes of them."""

    folder: Path
    bodies: tuple[Body, ...]
    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[list[int], ...]


class Reference:
    """What transformers makes of a checkpoint, eager, on one thread: several wait longer than they compute."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")

    def greedy(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        """Return the tokens that follow *prompt*, and the smallest gap between the two best logits on the way."""
        tokens: list[int] = []
        smallest_gap = float("inf")
        todo, cache = list(prompt), DynamicCache(config=self._model.config)
        while len(tokens) < NUM_TOKENS:
            with one_thread(), torch.inference_mode():
                best = reference_logits(self._model, todo, cache)[-1].topk(2)
            smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            todo = tokens[-1:]
        return tokens, smallest_gap

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return logits_NV, float32: what transformers would choose each of *tokens* from."""
        with one_thread(), torch.inference_mode():
            logits_NV: Tensor = self._model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        return logits_NV.float()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def conversation(index: int, attempt: int) -> Body:
    """Return the request *index*: the later, the longer; every second one goes through the chat template."""
    begin = random.Random(100 * attempt + index).randrange(len(TEXT) // 2)
    said = TEXT[begin : begin + 3 + 22 * index]
    if index % 2 == 0:
        return {"prompt": said}
    if index % 4 == 1:
        return {"messages": [{"role": "user", "content": said}]}
    half = len(said) // 2
    roles, parts = ("system", "user", "assistant", "user"), ("Be brief.", said[:half], "你好", said[half:])
    return {"messages": [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]}


def prompt_ids(folder: Path, body: Body) -> tuple[int, ...]:
    """Return the token ids that transformers makes of a request."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if "prompt" in body:
        return tuple(tokenizer.encode(body["prompt"]))
    return tuple(tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False))


@pytest.fixture(scope="module", params=FAMILIES)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)
    reference = Reference(folder, torch.float32)
    bodies: list[Body] = []
    expected: list[list[int]] = []
    while len(bodies) < NUM_REQUESTS:
        for attempt in range(20):  # until one is found in which the two best logits are never close
            body = conversation(len(bodies), attempt)
            tokens, smallest_gap = reference.greedy(prompt_ids(folder, body))
            if smallest_gap > SMALLEST_GAP:
                break
        assert smallest_gap > SMALLEST_GAP, f"request {len(bodies)}: take a model with another seed"
        assert len(set(tokens)) > NUM_TOKENS // 4, "the model repeats itself: take another seed"
        bodies.append(body)
        expected.append(tokens)
    prompts = tuple(prompt_ids(folder, body) for body in bodies)
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) <= 4 and max(lengths) >= 140 and len(set(lengths)) >= 14, f"of different lengths: {lengths}"
    return Asked(folder, tuple(dict(body) | GREEDY for body in bodies), prompts, tuple(expected))


SHUFFLED = tuple(random.Random(7).sample(range(NUM_REQUESTS), NUM_REQUESTS))


def assert_best_but_for_rounding(asked: Asked, answers: Sequence[Sequence[int]]) -> None:
    rounded, exact = Reference(asked.folder, torch.bfloat16), Reference(asked.folder, torch.float32)
    rounding, shortfall, num_second_best = 0.0, 0.0, 0
    for prompt, tokens in zip(asked.prompts, answers, strict=True):
        logits_NV = rounded.logits(prompt, tokens)
        rounding = max(rounding, float((logits_NV - exact.logits(prompt, tokens)).abs().max()))
        missing_N = logits_NV.max(1).values - logits_NV[torch.arange(NUM_TOKENS), torch.tensor(tokens)]
        shortfall = max(shortfall, float(missing_N.max()))
        num_second_best += int((missing_N > 0).sum())
    assert shortfall < 2 * rounding, "bfloat16 moves the best logit and that of the token, and no further than that"
    assert num_second_best < NUM_REQUESTS * NUM_TOKENS // 10


def assert_begins_once(asked: Asked) -> None:
    bos = AutoTokenizer.from_pretrained(asked.folder).get_vocab().get(BOS)
    if bos is not None:
        assert all(prompt[0] == bos and Counter(prompt)[bos] == 1 for prompt in asked.prompts)


first_family = pytest.mark.parametrize("asked", rest_at_night(FAMILIES), indirect=True)


@dataclass(frozen=True)
class Ran:
    """What engine and schedule made of some prompts."""

    tokens: list[list[int]]
    steps: list[list[TokenRow]]
    marks: list[EventRow]

    @property
    def chunks(self) -> list[list[int]]:
        """For each step the `chunks` of its rows that made a token: 0 is a decode row."""
        return [[row.chunks for row in rows] for rows in self.steps if rows]


def run_here(
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    flags: Sequence[str],
    *,
    sampled: Sequence[Mapping[str, Any]] = (),
    order: Sequence[int] = (),
) -> Ran:
    """Compute *prompts* under *flags*.

    *order*: each request joins when the one before it has its first token; by default all are there from the start.
    """
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    page_size = int(options.get("--page-size", "64"))
    num_pages = int(options.get("--num-pages", str(NUM_REQUESTS * 256 // page_size)))
    context = min(256, num_pages * page_size)
    spec = check_folder(asked.folder)
    engine = Engine(
        spec,
        asked.folder,
        device=torch.device("cpu"),
        dtype=getattr(torch, options.get("--dtype", "float32")),
        num_pages=num_pages,
        page_size=page_size,
        max_running_requests=NUM_REQUESTS,
        max_seq_len=context,
        threads=1,
    )
    engine.kv_L2PKSD.zero_()  # a wrong page is a page of somebody else, not whatever the memory held
    limits = ScheduleLimits(
        context,
        max_prefill_length=int(options.get("--max-prefill-length", "2048")),
        mixed_prefill_length=16,
        max_running_requests=NUM_REQUESTS,
        vocab_size=spec.vocab_size,
    )
    cache = make_cache(options.get("--cache", "radix"), num_pages, page_size)
    schedule = Schedule(cache, limits, spec.eos_ids, Identity("generate-0", 1, ""))
    fields = sampled or [GREEDY] * len(prompts)
    coming = [
        NewRequest(str(index), tuple(prompts[index]), (), SamplingParams(**fields[index]))
        for index in order or range(len(prompts))
    ]
    ran = Ran([[] for _ in prompts], [], [])
    while coming or schedule.num_running or schedule.num_waiting:
        while coming:
            assert schedule.add(coming.pop(0)) is None
            if order:
                break
        num_begun = sum(map(bool, ran.tokens))
        while (planned := schedule.plan()) is not None:
            ran.marks.extend(row for row in planned[1] if isinstance(row, EventRow))
            ran.steps.append(schedule.complete(engine.forward(planned[0]).token_ids))
            for row in ran.steps[-1]:
                ran.tokens[int(row.uid)].append(row.token)
            if coming and sum(map(bool, ran.tokens)) > num_begun:
                break
    assert schedule.problems() == []
    return ran


@pytest.mark.parametrize(
    "order",
    rest_at_night([(), SHUFFLED, range(NUM_REQUESTS)[::-1]], first=2),
    ids=["at once", "shuffled", "longest first"],
)
def test_engine_and_schedule_give_the_tokens_of_transformers(asked: Asked, order: Sequence[int]) -> None:
    ran = run_here(asked, asked.prompts, SETTINGS[AS_IT_COMES], order=order)
    assert ran.tokens == list(asked.expected)
    assert any(min(rows) == 0 and max(rows) > 0 for rows in ran.chunks) is bool(order)


def run_under(asked: Asked, setting: str) -> tuple[Ran, list[str]]:
    """Compute all prompts, and see that the tokens are right; return who was preempted, too."""
    ran = run_here(asked, asked.prompts, SETTINGS[setting])
    assert ran.tokens == list(asked.expected)
    preempted = [mark.uid for mark in ran.marks if isinstance(mark.event, Preempted)]
    admitted = [mark.uid for mark in ran.marks if isinstance(mark.event, Admitted)]
    assert Counter(admitted) == Counter(preempted) + Counter(map(str, range(NUM_REQUESTS)))
    return ran, preempted


def test_engine_and_schedule_give_the_tokens_of_transformers_in_chunks(asked: Asked) -> None:
    ran, _ = run_under(asked, IN_CHUNKS)
    assert max(map(max, ran.chunks)) >= 3
    assert any(min(rows) == 0 and max(rows) > 0 for rows in ran.chunks)


@first_family
@pytest.mark.parametrize("setting", [FEW_PAGES, FEW_SHARED])
def test_engine_and_schedule_give_the_tokens_of_transformers_with_few_pages(asked: Asked, setting: str) -> None:
    _, preempted = run_under(asked, setting)
    assert preempted


def test_a_prompt_that_comes_again_is_found_in_the_cache_and_answered_the_same(asked: Asked) -> None:
    prompts = [asked.prompts[-1]] * 2
    ran = run_here(asked, prompts, SETTINGS[FEW_SHARED], order=range(2))
    assert ran.tokens == [asked.expected[-1]] * 2
    first, second, *_ = (mark.event.cached_tokens for mark in ran.marks if isinstance(mark.event, Admitted))
    assert first == 0 and second >= 16


@first_family
def test_engine_and_schedule_in_bfloat16_give_the_best_token_but_for_rounding(asked: Asked) -> None:
    assert_best_but_for_rounding(asked, run_here(asked, asked.prompts, SETTINGS[IN_BFLOAT16]).tokens)


@first_family
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(asked: Asked) -> None:
    sampled = [GREEDY | SAMPLED | {"seed": index} for index in range(NUM_REQUESTS)]
    together = run_here(asked, asked.prompts, SETTINGS[IN_CHUNKS], sampled=sampled)
    assert max(map(len, together.steps)) > NUM_REQUESTS // 2
    for index in range(0, NUM_REQUESTS, by_night(5, 3)):
        alone = run_here(asked, asked.prompts[index : index + 1], SETTINGS[IN_CHUNKS], sampled=sampled[index:])
        assert alone.tokens == [together.tokens[index]]
    assert all(mine != greedy for mine, greedy in zip(together.tokens, asked.expected, strict=True))
    other_seed = run_here(asked, asked.prompts[:1], SETTINGS[IN_CHUNKS], sampled=[sampled[0] | {"seed": 99}])
    assert other_seed.tokens != together.tokens[:1]


def test_the_encoder_gives_the_token_ids_of_transformers(asked: Asked) -> None:
    encoder = PromptEncoder(asked.folder)
    asks = [
        Submitted(
            endpoint="chat",
            frontend="web-0",
            sampling=SamplingParams(),
            **{name: body[name] for name in ("prompt", "messages") if name in body},
        )
        for body in asked.bodies
    ]
    assert encoder.encode([encoder.render(event) for event in asks]) == list(asked.prompts)
    assert_begins_once(asked)
