"""What is wrong with a request is told to its client, with the field and in the one shape, and harms nobody else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.raw_client import Answer
from support.servers import Server
from transformers import PreTrainedTokenizerFast

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

CONTEXT = 512
"""Tokens of a prompt and its answer."""
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture
def server(llama3_server: Server) -> Iterator[Server]:
    """The server; after the test the same processes answer the next client."""
    before = process_ids(llama3_server)
    yield llama3_server
    assert process_ids(llama3_server) == before
    response = llama3_server.post(HELLO)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] in (1, 2)


def process_ids(server: Server) -> set[int]:
    return {process.pid for process in server.command.processes()}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error in a body of the one shape that there is."""
    assert response.status_code == status, response.text
    return Answer(response.status_code, dict(response.headers), response.content).error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    server: Server, tokenizer: PreTrainedTokenizerFast, field: str, stream: bool
) -> None:
    said = "The log is the memory of the program. " * 64
    if field == "prompt":
        body: dict[str, Any] = {"prompt": said}
        ids = tokenizer.encode(said)
    else:
        body = {"messages": [{"role": "user", "content": said}]}
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
    assert CONTEXT < len(ids) < 2 * CONTEXT
    error = error_of(server.post(body | {"stream": stream}), 400)
    assert (error["code"], error["param"], error["type"]) == (
        "context_length_exceeded",
        field,
        "invalid_request_error",
    )
    assert f"{CONTEXT} tokens" in error["message"]
    assert f"{len(ids)} tokens" in error["message"]


def test_a_prompt_needs_room_for_one_token_of_the_answer(server: Server, tokenizer: PreTrainedTokenizerFast) -> None:
    fits, too_long = "!" * (CONTEXT - 2), "!" * (CONTEXT - 1)  # and the token at the beginning
    assert (len(tokenizer.encode(fits)), len(tokenizer.encode(too_long))) == (CONTEXT - 1, CONTEXT)
    answer = server.post({"prompt": fits, "ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    error = error_of(server.post({"prompt": too_long}), 400)
    assert error["code"] == "context_length_exceeded"


def test_a_prompt_of_many_megabytes_is_refused_without_being_encoded(server: Server) -> None:
    error = error_of(server.post({"prompt": "All work and no play. " * 150_000}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"{CONTEXT} tokens" in error["message"] and "at least" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("roles", [("user", "user"), ("assistant",), ("user", "assistant", "assistant")])
def test_a_conversation_that_the_template_refuses_gets_the_templates_words(
    server: Server, roles: tuple[str, ...], stream: bool
) -> None:
    messages = [{"role": role, "content": "Hello"} for role in roles]
    error = error_of(server.post({"messages": messages, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("template_error", "messages")


def test_one_bad_conversation_among_good_ones_fails_alone(server: Server) -> None:
    bad = {"messages": 2 * [{"role": "user", "content": "Hello"}]}
    with ThreadPoolExecutor(15) as threads:
        statuses = threads.map(lambda index: server.post(bad if index % 3 == 1 else HELLO).status_code, range(15))
        assert list(statuses) == 5 * [200, 400, 200]


def test_a_limit_that_does_not_fit_beside_the_prompt_is_refused_with_the_largest_that_does(server: Server) -> None:
    without = server.post(HELLO | {"max_tokens": None, "ignore_eos": True}).json()
    assert without["choices"][0]["finish_reason"] == "length" and without["usage"]["total_tokens"] == CONTEXT
    most = CONTEXT - without["usage"]["prompt_tokens"]
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        for too_many, stream in itertools.product((most + 1, 10**9, 2**63 - 1), (False, True)):
            asked = HELLO | {"max_tokens": None, name: too_many, "stream": stream}
            error = error_of(server.post(asked), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", name)
            assert str(most) in error["message"]
    brief = server.post(HELLO | {"max_tokens": most, "guided_choice": ["x"]})
    assert brief.status_code == 200 and brief.json()["choices"][0]["message"]["content"] == "x"
