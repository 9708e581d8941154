"""In any company and under any setting, a request gets the tokens that transformers generates.

Engine and schedule show it in this process under every setting, for two families by day and for all at night, and then
servers, too. By day test_demo_model compares what a server says with transformers.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.checkpoints import BOS, FAMILIES, TEXT, make_checkpoint, reference_logits
from support.selection import by_night, rest_at_night
from support.servers import Server, eventually, serve
from support.streams import Stream
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import stages.generate.forward.engine as engine_module
from pipeline.events import (
    Admitted,
    AnyEvent,
    EventRow,
    Finished,
    Preempted,
    SamplingParams,
    Submitted,
    Tokenized,
    TokenRow,
    TokensProduced,
    decode,
    new_uid,
)
from pipeline.names import SEAL, sibling_uids
from stages.generate.batch import ForwardBatch, copied
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.model.checkpoint import check_folder
from stages.generate.schedule.plan import BatchPlan
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
HARD = ("--page-size", "16", "--num-pages", "14", "--max-prefill-length", "32")
"""Prompts in chunks, and few shared pages."""
SETTINGS = {
    "as it comes": (),
    "prompts in chunks": ("--cache", "naive", "--page-size", "16", "--max-prefill-length", "32"),
    "few pages": ("--cache", "naive", "--page-size", "16", "--num-pages", "14"),
    "few shared pages": ("--page-size", "16", "--num-pages", "14"),
    "bfloat16": ("--dtype", "bfloat16", "--page-size", "16"),
    "two ranks": ("--tp", "2", *HARD),
    "four ranks, steps ahead": ("--tp", "4", "--overlap", "on", *HARD),
}
AS_IT_COMES, IN_CHUNKS, FEW_PAGES, FEW_SHARED, IN_BFLOAT16, TWO_RANKS, FOUR_RANKS = SETTINGS
IMPOSSIBLE = {("odd", FOUR_RANKS)}
"""Its six heads cannot be divided by four."""


def over_http(*settings: str) -> pytest.MarkDecorator:
    """Ask each family's server under each of *settings*."""
    pairs = [(family, setting) for family in FAMILIES for setting in settings if (family, setting) not in IMPOSSIBLE]
    params = [pytest.param(*pair, marks=pytest.mark.night) for pair in pairs]
    return pytest.mark.parametrize(("asked", "setting"), params, indirect=True)


@dataclass(frozen=True)
class Asked:
    """Sixteen requests to one model, and what transformers makes of them."""

    folder: Path
    bodies: tuple[Body, ...]
    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[list[int], ...]

    @cached_property
    def texts(self) -> list[str]:
        tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in self.expected]


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


@dataclass(frozen=True)
class Answer:
    """What a client was told, and what the log holds of it."""

    uid: str
    text: str
    history: tuple[AnyEvent, ...]

    @property
    def produced(self) -> list[TokensProduced]:
        return [event for event in self.history if isinstance(event, TokensProduced)]

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.produced for token in event.tokens]

    @property
    def cached_tokens(self) -> int:
        return sum(event.usage.cached_tokens for event in self.history if isinstance(event, Finished))

    def count(self, kind: type[AnyEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.history)


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


@pytest.fixture(scope="module", params=rest_at_night(FAMILIES, first=2))
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


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def server(asked: Asked, setting: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("parity"), "--model", str(asked.folder), *SETTINGS[setting]) as server:
        yield server


def ask_whole(server: Server, body: Body) -> tuple[str, str]:
    """Send one request; return its uid and its text."""
    response = server.post(body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    return response.headers["x-minisgl-uid"], choice["message"]["content"]


def ask_streamed(server: Server, body: Body, begun: threading.Event) -> tuple[str, str]:
    """As `ask_whole`, streamed; set *begun* at the first words."""
    texts: list[str] = []
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=dict(body) | {"stream": True}, timeout=120
        ) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                    texts.append(delta.get("content", ""))
                    if texts[-1]:
                        begun.set()
            return response.headers["x-minisgl-uid"], "".join(texts)
    finally:
        begun.set()


def with_histories(server: Server, answered: Sequence[tuple[str, str]]) -> list[Answer]:
    with server.log() as log:
        histories = log.histories([uid for uid, _ in answered])
    assert all(history[-1].id == SEAL for history in histories)
    return [
        Answer(uid, text, tuple(decode(entry.fields) for entry in history))
        for (uid, text), history in zip(answered, histories, strict=True)
    ]


def ask_at_once(server: Server, bodies: Sequence[Body], order: Sequence[int]) -> list[Answer]:
    """Send all requests at the same time, the threads started in *order*; return the answers in the bodies' order."""
    gate = threading.Barrier(len(order))

    def ask(index: int) -> tuple[str, str]:
        gate.wait(60)
        return ask_whole(server, bodies[index])

    with ThreadPoolExecutor(len(order)) as threads:
        running = {index: threads.submit(ask, index) for index in order}
    return with_histories(server, [running[index].result() for index in sorted(order)])


def ask_in_turn(server: Server, bodies: Sequence[Body], order: Sequence[int]) -> list[Answer]:
    """Send each request in *order* when the one before it has its first words, so that each joins running ones."""
    begun = {index: threading.Event() for index in order}

    def ask(index: int, before: int | None) -> tuple[str, str]:
        assert before is None or begun[before].wait(60)
        return ask_streamed(server, bodies[index], begun[index])

    with ThreadPoolExecutor(len(order)) as threads:
        running = {
            index: threads.submit(ask, index, before) for index, before in zip(order, (None, *order[:-1]), strict=True)
        }
    return with_histories(server, [running[index].result() for index in sorted(order)])


def rows_by_step(answers: Sequence[Answer]) -> dict[str, list[int]]:
    """Return for each step of the engine the `chunks` of its rows that made a token: 0 is a decode row."""
    steps: dict[str, list[int]] = defaultdict(list)
    for answer in answers:
        for event in answer.produced:
            steps[event.step].append(event.chunks)
    return steps


def has_mixed_step(answers: Sequence[Answer]) -> bool:
    return any(min(rows) == 0 and max(rows) > 0 for rows in rows_by_step(answers).values())


SHUFFLED = tuple(random.Random(7).sample(range(NUM_REQUESTS), NUM_REQUESTS))
ARRIVALS: dict[str, Callable[[Server, Sequence[Body]], list[Answer]]] = {
    "shuffled, in turn": lambda server, bodies: ask_in_turn(server, bodies, SHUFFLED),
    "longest first, in turn": lambda server, bodies: ask_in_turn(server, bodies, range(NUM_REQUESTS)[::-1]),
}


def assert_as_transformers(asked: Asked, answers: Sequence[Answer]) -> None:
    assert [answer.tokens for answer in answers] == list(asked.expected)
    assert [answer.text for answer in answers] == asked.texts
    for answer, prompt in zip(answers, asked.prompts, strict=True):
        end = answer.history[-1]
        assert isinstance(end, Finished)
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(prompt), NUM_TOKENS)
        # Who gave back the pages was admitted again.
        assert answer.count(Admitted) == answer.count(Preempted) + 1


def assert_found_in_the_cache(server: Server, asked: Asked) -> None:
    again = with_histories(server, [ask_whole(server, asked.bodies[-1]) for _ in range(2)])
    assert again[1].cached_tokens >= 16
    assert [answer.tokens for answer in again] == [asked.expected[-1]] * 2


@over_http(AS_IT_COMES, FEW_SHARED)
@pytest.mark.parametrize("arrival", rest_at_night(ARRIVALS))
def test_who_joins_running_requests_gets_the_tokens_of_transformers(server: Server, asked: Asked, arrival: str) -> None:
    assert_as_transformers(asked, ARRIVALS[arrival](server, asked.bodies))


@over_http(AS_IT_COMES, IN_CHUNKS, FEW_PAGES, FEW_SHARED)
def test_sixteen_requests_get_the_tokens_of_transformers(server: Server, asked: Asked, setting: str) -> None:
    answers = ask_at_once(server, asked.bodies, range(NUM_REQUESTS))
    assert_as_transformers(asked, answers)
    if setting == IN_CHUNKS:
        assert max(event.chunks for answer in answers for event in answer.produced) >= 3
        assert has_mixed_step(answers)
    if setting == FEW_PAGES:
        assert any(answer.count(Preempted) for answer in answers)
    if setting == FEW_SHARED:
        assert_found_in_the_cache(server, asked)


@over_http(TWO_RANKS, FOUR_RANKS)
def test_ranks_give_the_tokens_of_transformers(server: Server, asked: Asked) -> None:
    """In chunks, with preemptions and prefix hits, after a cancelled request, and the log-probabilities of a prompt."""
    Stream(server, "Go on.", max_tokens=200).begun().leave()
    answers = ask_at_once(server, asked.bodies, range(NUM_REQUESTS))
    assert_as_transformers(asked, answers)
    assert any(answer.count(Preempted) for answer in answers)
    assert max(event.chunks for answer in answers for event in answer.produced) >= 3
    assert_found_in_the_cache(server, asked)
    index = max(index for index, body in enumerate(asked.bodies) if "prompt" in body)
    body = {"prompt": asked.bodies[index]["prompt"], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    told = server.ask("/v1/completions", body)["choices"][0]["logprobs"]
    prompt = asked.prompts[index]
    logprobs_NV = Reference(asked.folder, torch.float32).logits(prompt[:1], prompt[1:]).log_softmax(-1)
    expected = logprobs_NV[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()
    assert told["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-3)


@over_http(FEW_SHARED)
@pytest.mark.parametrize(
    ("first", "second", "preempted"), [(0, 0, "second"), (1, 0, "first"), (0, 1, "second"), (-3, -4, "first")], ids=str
)
def test_who_came_first_keeps_its_pages_unless_the_other_is_more_important(
    server: Server, first: int, second: int, preempted: str
) -> None:
    """One such answer fits into the pages, two do not. If the second comes late, nobody is preempted: once more."""
    num_tokens = 120
    preemptions: set[str] = set()
    for _ in range(5):
        base, events = new_uid(), []
        for name, priority in (("first", first), ("second", second)):
            sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            said = f"The {name} log is the memory."
            events.append(
                Submitted(endpoint="test", frontend="web-0", prompt=said, sampling=sampling, priority=priority)
            )
        uids = dict(zip(("first", "second"), sibling_uids(base, 2), strict=True))
        with server.log() as log:
            log.submit(base, events)  # at once: the second would wait if the first had most pages already
            eventually(lambda uids=uids: not log.alive(list(uids.values())), "both have ended", 120)  # type: ignore[misc]
        answers = dict(zip(uids, with_histories(server, [(uid, "") for uid in uids.values()]), strict=True))
        assert {len(answer.tokens) for answer in answers.values()} == {num_tokens}
        preemptions = {name for name, answer in answers.items() if answer.count(Preempted)}
        if preemptions:
            break
    assert preemptions == {preempted}


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


@over_http(IN_BFLOAT16)
def test_in_bfloat16_every_token_is_the_best_one_but_for_rounding(server: Server, asked: Asked) -> None:
    """Held to transformers in bfloat16: to its logits, because there the best two are often equal."""
    answers = ask_at_once(server, asked.bodies, range(NUM_REQUESTS))
    assert_best_but_for_rounding(asked, [answer.tokens for answer in answers])
    again = ask_whole(server, asked.bodies[-1])
    assert with_histories(server, [again])[0].cached_tokens > 0


@over_http(AS_IT_COMES, FEW_SHARED)
def test_prompts_become_the_token_ids_of_transformers(server: Server, asked: Asked) -> None:
    answers = ask_at_once(server, [dict(body) | {"max_tokens": 1} for body in asked.bodies], range(NUM_REQUESTS))
    tokenized = [next(event for event in answer.history if isinstance(event, Tokenized)) for answer in answers]
    assert [event.token_ids for event in tokenized] == list(asked.prompts)
    assert_begins_once(asked)


def assert_begins_once(asked: Asked) -> None:
    bos = AutoTokenizer.from_pretrained(asked.folder).get_vocab().get(BOS)
    if bos is not None:
        assert all(prompt[0] == bos and Counter(prompt)[bos] == 1 for prompt in asked.prompts)


# The same engine and schedule in this process.

Change = Callable[[BatchPlan], BatchPlan]
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


def unchanged(plan: BatchPlan) -> BatchPlan:
    return plan


def run_here(
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    flags: Sequence[str],
    *,
    sampled: Sequence[Mapping[str, Any]] = (),
    order: Sequence[int] = (),
    change: Change = unchanged,
) -> Ran:
    """Compute *prompts* under *flags*, when every plan goes through *change*.

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
            ran.steps.append(schedule.complete(engine.forward(change(planned[0])).token_ids))
            for row in ran.steps[-1]:
                ran.tokens[int(row.uid)].append(row.token)
            if coming and sum(map(bool, ran.tokens)) > num_begun:
                break
    assert schedule.problems() == []
    return ran


@pytest.mark.parametrize(
    "order", rest_at_night([(), SHUFFLED, range(NUM_REQUESTS)[::-1]], first=2), ids=["at once", *ARRIVALS]
)
def test_engine_and_schedule_give_the_tokens_of_transformers(asked: Asked, order: Sequence[int]) -> None:
    ran = run_here(asked, asked.prompts, SETTINGS[AS_IT_COMES], order=order)
    assert ran.tokens == list(asked.expected)
    assert not order or any(min(rows) == 0 and max(rows) > 0 for rows in ran.chunks)


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


# The proof that these tests can fail: with one thing wrong.

ALONE = ("--cache", "naive", "--page-size", "16")
"""No page belongs to two requests."""
WINDOWED = {"mistral", "phi3"}
one_family = pytest.mark.parametrize("asked", rest_at_night(f for f in FAMILIES if f not in WINDOWED), indirect=True)
"""Not those with a window in every layer: what it hides they do not miss."""


def first_pages_exchanged() -> Change:
    """Return a change that gives each decode row the first page of the next one.

    Two whole pages of one row, exchanged, change nothing, because attention is over a set; and two rows that exchange
    pages before anything is in them only call them by other names.
    """
    pages: dict[int, list[int]] = {}

    def change(plan: BatchPlan) -> BatchPlan:
        for row in plan.rows:
            pages[row.table] = [*pages.get(row.table, [])[: row.first_page], *row.new_pages]
        decoding = [row.table for row in plan.rows[: plan.num_decode_rows]]
        others = dict(zip(decoding, [*decoding[1:], *decoding[:1]], strict=True))
        rows = [
            replace(row, new_pages=(pages[others[row.table]][0], *pages[row.table][1:]), first_page=0)
            if row.table in others
            else row
            for row in plan.rows
        ]
        return replace(plan, rows=tuple(rows))

    return change


def num_differing(asked: Asked, tokens: Sequence[Sequence[int]]) -> int:
    return sum(list(mine) != theirs for mine, theirs in zip(tokens, asked.expected, strict=True))


@one_family
def test_pages_exchanged_between_requests_change_the_answers(asked: Asked) -> None:
    assert num_differing(asked, run_here(asked, asked.prompts, ALONE, change=first_pages_exchanged()).tokens) >= 15


@one_family
def test_positions_shifted_by_one_change_the_answers(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the output only: rotary positions are relative, so that prompt and output shifted alike change nothing."""

    def shifted(*arguments: Any) -> ForwardBatch:
        batch = copied(*arguments)
        decoding_T = torch.arange(len(batch.positions_T)) < batch.num_decode_rows
        return replace(batch, positions_T=batch.positions_T + decoding_T)

    monkeypatch.setattr(engine_module, "copied", shifted)
    assert num_differing(asked, run_here(asked, asked.prompts, ALONE).tokens) >= 15


@one_family
def test_half_of_the_prompt_dropped_changes_the_answers(asked: Asked) -> None:
    halves = [prompt[len(prompt) // 2 :] for prompt in asked.prompts]
    assert num_differing(asked, run_here(asked, halves, ALONE).tokens) >= 15
