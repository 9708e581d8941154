"""What is wrong with a request is told to its client, with the field and in the one shape, and harms nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import NARROW, Server
from transformers import AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("narrow_server")]

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture
def server(narrow_server: Server) -> Iterator[Server]:
    """The server; after the test the same processes answer the next client."""
    before = process_ids(narrow_server)
    yield narrow_server
    assert process_ids(narrow_server) == before
    response = narrow_server.post(HELLO)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] in (1, 2)


def process_ids(server: Server) -> set[int]:
    return {process.pid for process in server.command.processes()}


def send(server: Server, content: bytes) -> httpx.Response:
    """Send a body as it is."""
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=60)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error in a body of the one shape that there is."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    server: Server, llama3: Path, field: str, stream: bool
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(llama3)
    said = "The log is the memory of the program. " * 16
    if field == "prompt":
        body: dict[str, Any] = {"prompt": said}
        ids = tokenizer.encode(said)
    else:
        body = {"messages": [{"role": "user", "content": said}]}
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
    assert NARROW < len(ids) < 2 * NARROW
    error = error_of(server.post(body | {"stream": stream}), 400)
    assert (error["code"], error["param"], error["type"]) == (
        "context_length_exceeded",
        field,
        "invalid_request_error",
    )
    assert f"{NARROW} tokens" in error["message"]
    assert f"{len(ids)} tokens" in error["message"]


def test_a_prompt_needs_room_for_one_token_of_the_answer(server: Server, llama3: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(llama3)
    fits, too_long = "!" * (NARROW - 2), "!" * (NARROW - 1)  # and the token at the beginning
    assert (len(tokenizer.encode(fits)), len(tokenizer.encode(too_long))) == (NARROW - 1, NARROW)
    answer = server.post({"prompt": fits, "ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    error = error_of(server.post({"prompt": too_long}), 400)
    assert error["code"] == "context_length_exceeded"


def test_a_prompt_of_many_megabytes_is_refused_without_being_encoded(server: Server) -> None:
    error = error_of(server.post({"prompt": "All work and no play. " * 150_000}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"{NARROW} tokens" in error["message"] and "at least" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("roles", [("user", "user"), ("assistant",), ("user", "assistant", "assistant")])
def test_a_conversation_that_the_template_refuses_gets_the_templates_words(
    server: Server, roles: tuple[str, ...], stream: bool
) -> None:
    messages = [{"role": role, "content": "Hello"} for role in roles]
    error = error_of(server.post({"messages": messages, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("template_error", "messages")
    assert "roles must alternate user/assistant/user/assistant/..." in error["message"]


def test_one_bad_conversation_among_good_ones_fails_alone(server: Server) -> None:
    bad = {"messages": 2 * [{"role": "user", "content": "Hello"}]}
    with ThreadPoolExecutor(15) as threads:
        statuses = threads.map(lambda index: server.post(bad if index % 3 == 1 else HELLO).status_code, range(15))
        assert list(statuses) == 5 * [200, 400, 200]


def test_an_unknown_model_is_not_found(server: Server) -> None:
    error = error_of(httpx.get(f"{server.url}/v1/models/org/another"), 404)
    assert error["code"] == "model_not_found" and "org/name, other-name" in error["message"]


@pytest.mark.parametrize("model", ["default", "", None, "org/name", "gpt-4"])
def test_any_name_and_none_are_the_served_model(server: Server, model: str | None) -> None:
    response = server.post(HELLO | {"model": model})
    assert response.json()["model"] == response.headers["x-minisgl-model"] == "org/name"


def test_another_served_name_is_answered_under_that_name(server: Server) -> None:
    assert server.post(HELLO | {"model": "other-name"}).json()["model"] == "other-name"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": ["Hello"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"prompt": "Hello"}, "prompt"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop.0"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ],
    ids=repr,
)
def test_a_wrong_value_is_refused_with_its_field(server: Server, wrong: dict[str, Any], param: str) -> None:
    """tests/web/wire has every field."""
    error = error_of(send(server, json.dumps(HELLO | wrong).encode()), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param.split(".")[0] in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"\xff\xfe\x00", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', b"[" * 40_000],
    ids=lambda content: repr(content[:40]),
)
def test_a_body_that_is_no_json_object_is_refused(server: Server, content: bytes) -> None:
    assert error_of(send(server, content), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("told", [True, False], ids=["with its length", "in chunks"])
def test_a_body_of_forty_megabytes_is_too_large(server: Server, told: bool) -> None:
    content = json.dumps(HELLO | {"user": "x" * (40 << 20)}).encode()
    pieces = (content[begin : begin + (1 << 20)] for begin in range(0, len(content), 1 << 20))
    url = f"{server.url}/v1/chat/completions"
    error = error_of(httpx.post(url, content=content if told else pieces, timeout=60), 413)
    assert error["code"] == "request_too_large"
    assert str(4 << 20) in error["message"]


def test_a_path_or_a_method_that_there_is_not_is_told_in_the_same_shape(server: Server) -> None:
    assert error_of(httpx.get(f"{server.url}/v1/nothing"), 404)["code"] == "not_found"
    response = httpx.get(f"{server.url}/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_does_not_fit_beside_the_prompt_is_refused_with_the_largest_that_does(
    server: Server, stream: bool
) -> None:
    without = server.post(HELLO | {"max_tokens": None, "ignore_eos": True}).json()
    assert without["choices"][0]["finish_reason"] == "length" and without["usage"]["total_tokens"] == NARROW
    most = NARROW - without["usage"]["prompt_tokens"]
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        for too_many in (most + 1, 10**9, 2**63 - 1):
            asked = HELLO | {"max_tokens": None, name: too_many, "stream": stream}
            error = error_of(server.post(asked), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", name)
            assert f"send at most {most}," in error["message"]
    assert server.post(HELLO | {"max_tokens": most, "ignore_eos": True}).json()["usage"]["total_tokens"] == NARROW
