"""What clients of Mini-SGLang run into and here do not, as far as no other module shows it; the server outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.servers import Server

from pipeline.names import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def workers(server: Server) -> set[int]:
    """Return the process ids of all workers."""
    return {process.pid for stage in STAGES for process in server.command.workers(stage)}


@pytest.fixture(scope="module")
def server(llama3_server: Server) -> Iterator[Server]:
    before = workers(llama3_server)
    yield llama3_server
    assert llama3_server.post(HELLO | {"max_tokens": 1}).status_code == 200
    assert workers(llama3_server) == before, "nothing that a client sends ends a process"


def test_a_chat_that_says_no_length_ends_where_the_model_ends_it(server: Server) -> None:
    assert server.post(HELLO | {"ignore_eos": True}).json()["usage"]["completion_tokens"] > 16


@pytest.mark.parametrize("path", [COMPLETIONS, "/health", "/metrics", "/ready", "/v1/models", "/openapi.json"])
def test_what_tools_look_for_is_there(server: Server, path: str) -> None:
    assert httpx.get(f"{server.url}{path}", timeout=60).status_code == (405 if path == COMPLETIONS else 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"prompt": ""}),
        (CHAT, {}),
        (CHAT, HELLO | {"max_tokens": -2}),
        (CHAT, HELLO | {"presence_penalty": 3}),
        (CHAT, HELLO | {"response_format": {"type": "json_schema"}}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": []}),
        (GENERATE, {"text": ""}),
        (GENERATE, {"input_ids": []}),
        (GENERATE, {"prompt": ""}),
        (GENERATE, {"prompt": "a", "max_tokens": -1}),
        (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -5}}),
        (GENERATE, {"input_ids": [99_999_999]}),
        (GENERATE, {"prompt": "word " * 20_000}),
        (GENERATE, {"text": "word " * 20_000, "stream": True}),
        (GENERATE, {}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_answered_is_a_400_and_ends_nobody(server: Server, path: str, body: dict[str, Any]) -> None:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 400 and set(response.json()["error"]) == {"message", "type", "param", "code"}
