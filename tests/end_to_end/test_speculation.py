"""Answers are the same with drafts and without: texts, tokens, scores, ends, usage; after a kill, and in replays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints import TEXT, make_checkpoint
from support.kernel_variants import VARIANTS
from support.selection import by_night
from support.servers import Server, serve
from support.tool import Tool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VARIANTS, reason="torch alone promises no equal tokens"),
]

NUM_REQUESTS = by_night(60, 500)
FLAGS = ("--page-size", "16", "--lease", "1", "--tool-parser", "hermes")
SCHEMA = {
    "type": "object",
    "properties": {"name of the thing": {"enum": ["log", "page"]}, "how many of them": {"type": "integer"}},
    "required": ["name of the thing", "how many of them"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama3", dtype="bfloat16", max_positions=1024)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[Server, Server]]:
    """One with drafts, as many as possible, and one without."""
    on, off = (tmp_path_factory.mktemp(name) for name in ("on", "off"))
    with (
        serve(on, "--model", str(model), *FLAGS, "--speculate", "8") as first,
        serve(off, "--model", str(model), *FLAGS, "--speculate", "off") as second,
    ):
        yield first, second


def body_of(number: int) -> dict[str, Any]:
    """Return a request with something of all that decides how an answer goes on and ends."""
    draw = random.Random(number)
    text = TEXT[draw.randrange(200) :][: draw.randrange(20, 200)]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text * draw.choice((1, 2))}],
        "seed": number,
        "temperature": draw.choice((0, 0.2, 0.7, 1.0, 1.5)),
        "max_tokens": draw.randrange(8, 120),
        "return_token_ids": True,
    }
    some: list[dict[str, Any]] = [
        {"frequency_penalty": 1},
        {"presence_penalty": -0.5, "repetition_penalty": 1.1},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": [draw.choice("aeiou"), "th"]},
        {"n": 2},
        {"min_tokens": 8},
        {"ignore_eos": True},
        {"prediction": {"type": "content", "content": text}},
        {"top_p": 0.9, "top_k": 20, "logit_bias": {"70": 2}},
        {"bad_words": ["the"]},
    ]
    for fields in draw.sample(some, draw.randrange(4)):
        body |= fields
    kind = draw.random()
    if kind < 0.2:
        body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    elif kind < 0.3:
        body |= {"tools": [TOOL], "tool_choice": "required"}
    elif kind < 0.4:
        body |= {"structured_outputs": {"regex": "(one two three four, ){1,4}end"}}
    return body


def answer(server: Server, body: dict[str, Any]) -> tuple[Any, str]:
    """Return what must be equal, and the uid."""
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    told = response.json()
    for choice in told["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("id")
    details = told["usage"]["completion_tokens_details"]
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        details.pop(name, None)
    told["usage"].pop("prompt_tokens_details")  # what is cached depends on who came before
    return (told["choices"], told["usage"], told.get("prompt_token_ids")), response.headers["x-minisgl-uid"]


def test_answers_are_the_same_with_drafts_and_without(
    servers: tuple[Server, Server], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on, off = servers
    uids: list[str] = []
    with ThreadPoolExecutor(6) as pool:
        expected = list(pool.map(lambda number: answer(off, body_of(number))[0], range(NUM_REQUESTS)))
        told = []
        for number, (each, uid) in enumerate(pool.map(lambda n: answer(on, body_of(n)), range(NUM_REQUESTS))):
            told.append(each)
            uids.append(uid)
            if number in (NUM_REQUESTS // 3, NUM_REQUESTS // 2):
                (engine,) = on.command.workers("generate")
                engine.kill()
    assert told == expected
    metrics = httpx.get(f"{on.url}/metrics").text
    assert "spec_decode_num_accepted_tokens_total" in metrics
    replay = Tool("replay", on.redis_url, capsys)
    here = ("--model", str(model), "--page-size", "16", "--num-pages", "64", "--speculate", "off")
    code, out, err = replay.run("run", *uids[: by_night(3, 20)], "--json", *here)
    assert code == 0, out + err
    code, out, err = replay.run("schedule", "generate-0")
    assert code == 0 and "planned again: identical" in out, out + err
