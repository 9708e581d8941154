"""A seeded request gets the same text, token ids and log-probabilities alone and in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
from support.checkpoints import TEXT, make_checkpoint
from support.kernel_variants import DTYPES, VARIANTS
from support.servers import Server, eventually, serve
from support.streams import Stream, events_of, num_of

from pipeline.events import Preempted, TakenOver, TokensProduced
from pipeline.names import GENERATE

# By day tests/stages/generate/kernels/test_invariance.py has the bits, and test_parity.py a seed.
pytestmark = [pytest.mark.slow, pytest.mark.night]

NUM_REQUESTS = 16
NUM_TOKENS = 300
NUM_OTHERS = 8
COMPANIES = 4
KILLED = 2
"""The company whose engine is killed."""
MEASURED = "measured"
"""A label of the requests that are compared."""
ARRIVE_WITHIN = 160
"""Tokens of a stream; while it makes them, all requests of a company arrive."""
FLAGS = ("--page-size", "16", "--num-pages", "120", "--lease", "1")
"""About a quarter of the pages that all requests of a company need at once."""
DEPENDS_ON_THE_BATCH = pytest.mark.xfail(
    strict=True, raises=pytest.fail.Exception, reason="torch sums in an order that depends on the batch"
)
MODES = [
    ("auto", "bfloat16"),
    pytest.param(("torch", "bfloat16"), marks=[DEPENDS_ON_THE_BATCH, pytest.mark.night]),
    *(pytest.param((variant, dtype), marks=pytest.mark.night) for variant in VARIANTS for dtype in DTYPES),
]


def flags_of(kernels: str, dtype: str) -> list[str]:
    numbers = ["--dtype", "bfloat16", "--quantization", "int8"] if dtype == "int8" else ["--dtype", dtype]
    return [*numbers, "--kernels", kernels]


@dataclass(frozen=True)
class Answered:
    """What a client was told, and where the log has more of it."""

    uid: str
    choice: dict[str, Any]
    """Text, token ids, log-probabilities."""


def ask(http: httpx.Client, body: dict[str, Any]) -> Answered:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return Answered(response.headers["x-minisgl-uid"], choice)


def said(draw: random.Random, num_characters: int) -> str:
    begin = draw.randrange(len(TEXT) // 4)
    return (TEXT * 2)[begin : begin + num_characters]


def measured(index: int) -> dict[str, Any]:
    """Return the request *index*: the later, the longer its prompt. Every second one asks for log-probabilities."""
    return {
        "prompt": said(random.Random(index), 3 + 25 * index),
        "seed": index,
        "temperature": 1,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "user": MEASURED,
    } | ({"logprobs": 2} if index % 2 else {})


def other(draw: random.Random) -> dict[str, Any]:
    """Return a request of any length, sampled or not."""
    return {
        "prompt": said(draw, draw.choice((10, 100, 1400))),
        "seed": draw.randrange(1000),
        "temperature": draw.choice((0, 1)),
        "max_tokens": draw.randrange(1, 150),
        "ignore_eos": True,
    }


BODIES = [measured(index) for index in range(NUM_REQUESTS)]


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("same")
    model = make_checkpoint(folder / "llama3", "llama3", dtype="bfloat16", max_positions=1024)
    with serve(folder, "--model", str(model), *flags_of(*request.param), *FLAGS) as server:
        yield server


def in_company(server: Server, http: httpx.Client, number: int) -> list[Answered]:
    """Send the requests among others while a stream runs, each when the stream has so many tokens; in one company the
    engine is killed on the way.
    """
    draw = random.Random(number)
    coming = [*BODIES, *(other(draw) for _ in range(NUM_OTHERS))]
    arrivals = sorted((draw.randrange(ARRIVE_WITHIN), index) for index in range(len(coming)))
    (engine,) = server.command.workers(GENERATE)
    answers: dict[int, Future[Answered]] = {}
    stream = Stream(server, f"Begin company {number}.", max_tokens=ARRIVE_WITHIN + 50, return_token_ids=True)
    with ThreadPoolExecutor(len(coming)) as threads:
        for moment, index in arrivals:
            eventually(partial(has_come_to, moment, stream), f"{moment} tokens of the stream")
            answers[index] = threads.submit(ask, http, coming[index])
            if number == KILLED and len(answers) == len(coming) // 2:
                eventually(partial(is_measuring, http), "the engine computes one of them")
                engine.kill()
    assert stream.answer[1] == "length"
    return [answers[index].result() for index in range(NUM_REQUESTS)]


def is_measuring(http: httpx.Client) -> bool:
    listed = http.get("/v1/requests", params={"state": "running", "search": MEASURED}).json()["requests"]
    return any(request["output_tokens"] for request in listed)


def has_come_to(moment: int, stream: Stream) -> bool:
    return stream.num_frames > moment or stream.is_over  # several tokens may come in one frame


def assert_had_company(server: Server, companies: Sequence[Sequence[Answered]]) -> None:
    with server.log() as log:
        events = [[event for each in answers for event in events_of(log, each.uid)] for answers in companies]
    assert sum(num_of(each, Preempted) for each in events) > 0
    assert [num_of(each, TakenOver) > 0 for each in events] == [number == KILLED for number in range(COMPANIES)]
    for each in events:
        assert max(event.chunks for event in each if isinstance(event, TokensProduced)) > 1


def test_seeded_requests_get_the_same_alone_and_in_any_company(server: Server) -> None:
    limits = httpx.Limits(max_keepalive_connections=NUM_REQUESTS + NUM_OTHERS)
    with httpx.Client(base_url=server.url, timeout=120, limits=limits) as http:
        alone = [ask(http, body) for body in BODIES]
        assert min(len(set(answer.choice["token_ids"])) for answer in alone) > NUM_TOKENS // 4, "it repeats itself"
        companies = [in_company(server, http, number) for number in range(COMPANIES)]
    assert_had_company(server, companies)
    differing = [
        [index for index, (mine, theirs) in enumerate(zip(alone, answers, strict=True)) if mine.choice != theirs.choice]
        for answers in companies
    ]
    if any(differing):
        pytest.fail(f"of {NUM_REQUESTS} answers these differ from those alone, by company: {differing}")
