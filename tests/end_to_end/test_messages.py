"""/v1/messages with the demo model: the tokens are those of a chat, and what was said is in the prefix cache."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import Server, serve

from ops.sse_reader import frames_in

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo_server")]

PAGE_SIZE = 64
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Tells the weather of a city", "input_schema": WEATHER}
FUNCTION = {"name": "get_weather", "description": "Tells the weather of a city", "parameters": WEATHER}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}


def message(server: Server, *turns: Any, **fields: Any) -> Any:
    asked = {"max_tokens": 32_000, "temperature": 0, "messages": list(turns), "tools": [TOOL], **fields}
    return server.ask("/v1/messages", asked)


def test_a_call_its_result_and_an_answer(demo_server: Server) -> None:
    called = message(demo_server, QUESTION)
    (call,) = called["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Rome"})
    assert called["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny, 20 degrees"}
    turns = [QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answer = message(demo_server, *turns)
    assert answer["content"][0]["text"] == "It is sunny and 20 degrees in Rome." and answer["stop_reason"] == "end_turn"
    first = (
        called["usage"]["input_tokens"] + called["usage"]["cache_read_input_tokens"] + called["usage"]["output_tokens"]
    )
    cached = answer["usage"]["cache_read_input_tokens"]
    assert cached >= (first - 1) // PAGE_SIZE * PAGE_SIZE, "all whole pages of the first turn are read"


@pytest.mark.parametrize("as_blocks", [False, True])
def test_the_tokens_are_those_of_a_chat(demo_server: Server, as_blocks: bool) -> None:
    """Anthropic's form and OpenAI's of a conversation with a call, and both ways to write a text."""

    def said(text: str) -> Any:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}] if as_blocks else text

    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Rome"}}
    turns = [
        {"role": "user", "content": said("What is the weather in Rome?")},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": said("sunny")}]},
    ]
    function = {"name": "get_weather", "arguments": json.dumps({"city": "Rome"})}
    chat = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    count = demo_server.ask(
        "/v1/messages/count_tokens", {"messages": turns, "system": said("Be brief."), "tools": [TOOL]}
    )
    tools = [{"type": "function", "function": FUNCTION}]
    other = demo_server.ask("/tokenize", {"messages": chat, "tools": tools, "enable_thinking": False})
    assert count["input_tokens"] == other["count"]
    asked = {"messages": turns, "system": said("Be brief."), "tools": [TOOL], "max_tokens": 50, "temperature": 0}
    mine = demo_server.ask("/v1/messages", asked)["content"]
    theirs = demo_server.ask(
        "/v1/chat/completions", {"messages": chat, "tools": tools, "max_tokens": 50, "temperature": 0}
    )
    assert "".join(block.get("text", "") for block in mine) == (theirs["choices"][0]["message"]["content"] or "")


def test_a_limit_beyond_the_context_ends_where_the_context_does(demo_server: Server) -> None:
    words = "word " * 4050
    answer = message(demo_server, {"role": "user", "content": words}, tools=[], output_config=_counting())
    usage = answer["usage"]
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 4096


def _counting() -> Any:
    """Return a schema that only long answers follow."""
    items = {"type": "string", "pattern": "^a{200}$"}
    return {
        "format": {"type": "json_schema", "schema": {"type": "array", "items": items, "minItems": 9, "maxItems": 9}}
    }


def test_a_stream_goes_on_after_any_event(demo_server: Server) -> None:
    body = {
        "max_tokens": 60,
        "seed": 5,
        "stream": True,
        "messages": [{"role": "user", "content": "Count from 1 to 20"}],
    }
    response = httpx.post(f"{demo_server.url}/v1/messages", json=body, headers={"x-minisgl-event-ids": "1"}, timeout=60)
    path = f"{demo_server.url}/v1/requests/{response.headers['x-minisgl-uid']}/events"
    ids = [frame.id for frame in frames_in(response.content) if frame.id]
    assert len(ids) > 5
    for cursor in ids:
        _, _, rest = response.content.partition(b"id: %s\n" % cursor.encode())
        after = rest.partition(b"\n\n")[2]
        assert httpx.get(path, headers={"Last-Event-ID": cursor}).content == after + b"data: [DONE]\n\n"


def test_the_same_bytes_come_after_any_event_whatever_died(tmp_path: Path) -> None:
    """The engine dies in mid-stream, then the web process and Redis; the frames are those of a quiet stream."""
    body = {
        "max_tokens": 300,
        "seed": 5,
        "stream": True,
        "messages": [{"role": "user", "content": "Count from 1 to 90"}],
    }
    headers = {"x-minisgl-event-ids": "1"}
    with serve(tmp_path, demo=True) as server:
        quiet = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=60)
        read = b""
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, headers=headers, timeout=60) as response:
            uid = response.headers["x-minisgl-uid"]
            for piece in response.iter_raw():
                if not read:
                    server.command.workers("generate")[0].kill()
                read += piece
        assert put_together(read) == put_together(quiet.content)
        time.sleep(1.5)  # Redis writes each second
        (web,) = server.command.workers("web")
        (redis,) = (each for each in server.command.processes() if "valkey" in each.name())
        web.kill()
        redis.kill()
        ids = [frame.id for frame in frames_in(read) if frame.id]
        assert len(ids) > 20
        for cursor in ids:
            after = read.partition(b"id: %s\n" % cursor.encode())[2].partition(b"\n\n")[2]
            assert resumed(server, uid, cursor) == after + b"data: [DONE]\n\n"


def put_together(stream: bytes) -> str:
    """Return the text of a stream."""
    deltas = (json.loads(frame.data).get("delta", {}) for frame in frames_in(stream))
    return "".join(delta.get("text", "") for delta in deltas)


def resumed(server: Server, uid: str, cursor: str) -> bytes:
    """Return what comes after *cursor*, as soon as a web process is there."""
    deadline_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            found = httpx.get(f"{server.url}/v1/requests/{uid}/events", headers={"Last-Event-ID": cursor}, timeout=10)
            if found.status_code == 200:
                return found.content
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
