"""Anthropic's bodies and answers: a conversation is the same prompt as in a chat, and a stream the same answer."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from support.chunks import THINK, UID, answered, frames_of, history
from support.marked_texts import FAMILIES, written
from support.wire import MADE, Body, refusal

from ops.sse_reader import frames_in
from pipeline.errors import RequestError
from pipeline.events import (
    Calls,
    Failed,
    Presentation,
    SamplingParams,
    Submitted,
    Templating,
)
from web.wire.anthropic.errors import error_body
from web.wire.anthropic.schemas import CountRequest, MessagesRequest, message_events, parse_count, parse_messages
from web.wire.endpoints import MESSAGES_ENDPOINT
from web.wire.frames import ClientEvent
from web.wire.signatures import MOST_THOUGHT, signature_of

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "find", "description": "Finds.", "input_schema": {"type": "object", "properties": {"n": {}}}}
CALL = '<tool_call>{"name": "find", "arguments": {"n": 1}}</tool_call>'


def parsed(**fields: Any) -> MessagesRequest:
    return parse_messages(json.dumps({"max_tokens": 9, "messages": HELLO, **fields}).encode())


def submitted(**fields: Any) -> Submitted:
    (event,) = message_events(parsed(**fields), **MADE)
    return event


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        submitted(**fields)
    return caught.value


def assistant(*blocks: dict[str, Any]) -> list[Any]:
    return [*HELLO, {"role": "assistant", "content": list(blocks)}, {"role": "user", "content": "On"}]


# a conversation


def test_a_text_and_a_block_of_text_are_the_same() -> None:
    block = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    assert submitted(system=block, messages=[{"role": "user", "content": block}]).messages == (
        submitted(system="Hello").messages
    )


def test_a_system_text_loses_the_block_that_changes_with_each_request() -> None:
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cc=1;", "Be brief.", "Now.")]
    assert submitted(system=blocks).messages[0] == {"role": "system", "content": "Be brief.\n\nNow."}


def test_results_of_tools_come_before_what_the_user_says() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "find", "input": {"n": "ä"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}], "is_error": False}
    turns = [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "?"}]},
    ]
    function = {"name": "find", "arguments": '{"n": "ä"}'}
    assert submitted(messages=[*HELLO, *turns], tools=[TOOL]).messages[1:] == (
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "user", "content": "?"},
    )


def test_a_system_text_that_is_one_string_loses_the_first_line_alone() -> None:
    text = "x-anthropic-billing-header: cc=1;\n\nBe brief.\nNow."
    assert submitted(system=text).messages[0] == {"role": "system", "content": "Be brief.\nNow."}


def test_text_after_a_call_comes_back_as_it_was() -> None:
    blocks = [{"type": "text", "text": text} for text in ("Well.", "\n\nSo.", "Then.")]
    assert submitted(messages=assistant(*blocks)).messages[1]["content"] == "Well.\n\nSo.\nThen."


def test_a_system_message_may_come_later() -> None:
    later = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "Now brief."}]}]
    assert submitted(messages=later).messages[1] == {"role": "system", "content": "Now brief."}


def test_an_answer_at_the_end_is_continued() -> None:
    event = submitted(messages=[*HELLO, {"role": "assistant", "content": "Well,"}])
    assert event.templating.continue_final_message and not event.templating.add_generation_prompt
    assert submitted().templating.add_generation_prompt


def test_a_signature_carries_the_thought_that_a_client_leaves_out() -> None:
    thought = "Let me see. äöü 🙂"
    for block in ({"thinking": thought, "signature": ""}, {"thinking": "", "signature": signature_of(thought)}):
        event = submitted(messages=assistant({"type": "thinking", **block}, {"type": "text", "text": "So"}))
        assert event.messages[1] == {"role": "assistant", "content": "So", "reasoning_content": thought}


@pytest.mark.parametrize(
    "signature",
    [
        "not base64!",
        "bWluaXNnbA==",
        base64.b64encode(b"\x02" + zlib.compress(b"later")).decode(),
        base64.b64encode(b"\x01" + zlib.compress(b"cut" * 99)[:-8]).decode(),
        signature_of("\0" * (MOST_THOUGHT + 1)),
        "",
    ],
    ids=["no base64", "foreign", "later version", "cut", "too long", "empty"],
)
def test_a_signature_that_cannot_be_read_is_left_out_and_named(signature: str) -> None:
    request = parsed(messages=assistant({"type": "thinking", "thinking": "", "signature": signature}))
    (event,) = message_events(request, **MADE)
    assert "reasoning_content" not in event.messages[1]
    assert request.left_out == ("messages.1.content.0.signature",)


def test_signatures_of_a_body_unpack_to_no_more_than_one_may() -> None:
    half = {"type": "thinking", "thinking": "", "signature": signature_of("\0" * (MOST_THOUGHT // 2))}
    request = parsed(messages=assistant(half, half, half))
    assert request.left_out == ("messages.1.content.2.signature",)


def test_signatures_that_unpack_to_much_are_not_unpacked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    class Counting:
        def __init__(self) -> None:
            self._real = decompressobj()

        def decompress(self, data: bytes, most: int) -> bytes:
            unpacked.append(self._real.decompress(data, most))
            return unpacked[-1]

        @property
        def eof(self) -> bool:
            return self._real.eof

    decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    bomb = base64.b64encode(b"\x01" + zlib.compress(b"\0" * (MOST_THOUGHT + 1))).decode()
    request = parsed(messages=assistant(*[{"type": "thinking", "thinking": "", "signature": bomb}] * 500))
    assert len(request.left_out) == 32 and sum(map(len, unpacked)) == MOST_THOUGHT


# what is asked for


def test_a_limit_that_may_be_too_long_is_no_error_of_the_prompt() -> None:
    event = submitted(max_tokens=32_000)
    assert (event.sampling.max_tokens, event.limit) == (32_000, "")


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        (None, Calls()),
        ({"type": "auto", "disable_parallel_tool_use": True}, Calls(parallel=False)),
        ({"type": "any"}, Calls(choice="required")),
        ({"type": "tool", "name": "find"}, Calls(choice="required", names=("find",), parallel=False)),
        ({"type": "none"}, Calls(choice="none")),
    ],
)
def test_a_choice_of_tools(choice: Body | None, calls: Calls) -> None:
    assert submitted(tools=[TOOL], tool_choice=choice).calls == calls


def test_tools_of_other_servers_are_left_out_and_named() -> None:
    request = parsed(tools=[{"type": "web_search_20250305", "name": "web_search"}, TOOL])
    (event,) = message_events(request, **MADE)
    assert request.left_out == ("web_search",)
    assert [tool["function"]["name"] for tool in event.templating.tools] == ["find"]
    assert submitted(tools=[{"type": "web_search_20250305", "name": "web_search"}]).calls is None


@pytest.mark.parametrize(
    ("thinking", "reasoning", "omits", "variables", "budget"),
    [
        (None, "hidden", False, {"enable_thinking": False}, None),
        ({"type": "disabled"}, "hidden", False, {"enable_thinking": False}, None),
        ({"type": "enabled", "budget_tokens": 1024}, "apart", False, {"enable_thinking": True}, 1024),
        ({"type": "adaptive", "display": "omitted"}, "apart", True, {}, None),
    ],
)
def test_thinking(thinking: Body | None, reasoning: str, omits: bool, variables: Body, budget: int | None) -> None:
    event = submitted(thinking=thinking)
    shown = event.presentation
    assert (shown.reasoning, shown.omits_thoughts) == (reasoning, omits)
    assert (event.templating.variables, event.thinking_budget) == (variables, budget)


def test_a_schema_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    constraint = submitted(output_config={"format": {"type": "json_schema", "schema": schema}}).constraint
    assert constraint is not None and json.loads(constraint.text) == schema


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"output_format": {"type": "json_schema", "schema": {}}}, "`output_config.format`"),
        ({"stop": ["x"]}, "`stop_sequences`"),
        ({"response_format": {"type": "json_object"}}, "`output_config.format`"),
        ({"mcp_servers": [{"type": "url", "url": "https://a", "name": "a"}]}, "leave it out or send []"),
        ({"container": "c"}, "leave it out"),
        ({"logit_bias": {"1": 1}}, "leave it out"),
        ({"n": 2}, "leave it out"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(fields: Any, instead: str) -> None:
    with pytest.raises(RequestError, match=re.escape(instead)) as told:
        parsed(**fields)
    assert (told.value.code, told.value.param) == ("unsupported_parameter", next(iter(fields)))
    assert parsed(n=1, stop=None, mcp_servers=[], logit_bias={}).unknown == ()


def test_labels_are_kept_and_unknown_fields_are_named() -> None:
    request = parsed(metadata={"user_id": "ann"}, service_tier="auto", betas=["x"], context_management={"edits": []})
    (event,) = message_events(request, **MADE)
    assert event.labels == {"metadata": {"user_id": "ann"}, "service_tier": "auto"}
    assert request.unknown == ("betas",)
    noted = {**TOOL, "cache_control": {}, "defer_loading": True, "colour": 1}
    within = parsed(tools=[noted], thinking={"type": "adaptive", "a": 1}, messages=[{**HELLO[0], "b": 1}])
    assert within.unknown == ("messages.b", "thinking.a", "tools.colour")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}, "messages.0.content"),
        ({"messages": assistant(*[{"type": "tool_use", "id": "c", "name": "f"}] * 1025)}, "messages.1.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}] * 4096}] * 3},
            "messages.2.content",
        ),
        ({"stop_sequences": ["a" * 1024] * 65}, "stop_sequences"),
        ({"messages": assistant({"type": "image"})}, "messages.1.content.0"),
        ({"messages": assistant({"type": "text"})}, "messages.1.content.0.text"),
        (
            {"messages": assistant({"type": "tool_use", "id": "c", "name": "f", "input": []})},
            "messages.1.content.0.input",
        ),
        ({"messages": assistant({"type": "tool_use", "id": "", "name": "f"})}, "messages.1.content.0.id"),
        ({"messages": assistant({"type": "tool_use", "id": "c" * 1025, "name": "f"})}, "messages.1.content.0.id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [3]}]}]},
            "messages.0.content.0.content.0",
        ),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"system": "a", "tools": [{"name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "find"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"metadata": {"a": "b" * 70_000}}, "metadata"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "tool_choice",
        ),
    ],
)
def test_a_wrong_body_is_refused_with_its_place(fields: Body, param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param)


def test_a_body_without_a_limit_is_refused() -> None:
    assert refusal(parse_messages, {"messages": HELLO}).param == "max_tokens"
    assert parse_count(json.dumps({"messages": HELLO}).encode()).unknown == ()


def test_the_limits_admit_a_long_conversation_of_an_agent() -> None:
    turns: list[Any] = list(HELLO)
    for number in range(2000):
        given = {"command": f"sed -n {number}p file", "description": "Reads a line"}
        call = {"type": "tool_use", "id": f"call_{number}", "name": "tool_0", "input": given}
        result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": "words " * 60, "is_error": False}
        turns += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    properties = {f"p{n}": {"type": "string", "description": "What it is."} for n in range(4)}
    schema = {"type": "object", "properties": properties, "required": ["p0"], "additionalProperties": False}
    tools = [{"name": f"tool_{n}", "description": "Does things.", "input_schema": schema} for n in range(300)]
    event = submitted(messages=turns, tools=tools)
    assert len(event.messages) == 4001 and len(event.templating.tools) == 300


def of_claude_code(*turns: Any, session: str) -> dict[str, Any]:
    """Return a body in the form that Claude Code 2.1 sends."""
    kept = {"cache_control": {"type": "ephemeral"}}
    billing = f"x-anthropic-billing-header: cc_version=2.1.332.{session}; cc_entrypoint=sdk-cli;"
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **TOOL["input_schema"]}  # type: ignore[dict-item]
    return {
        "model": "demo",
        "messages": list(turns),
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent.", **kept},
            {"type": "text", "text": "Here are the rules.", **kept},
        ],
        "tools": [
            {**TOOL, "input_schema": schema},
            {"name": "Placeholder", "description": "Reserved.", "input_schema": schema, "defer_loading": True},
        ],
        "metadata": {"user_id": json.dumps({"session_id": session})},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def test_the_second_turn_of_claude_code_begins_as_the_first() -> None:
    """It writes the same texts as blocks in one turn and as strings in the next, and its first block changes."""
    said = {"type": "text", "text": "Make a file", "cache_control": {"type": "ephemeral"}}
    rules = {"type": "text", "text": "More rules.", "cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "", "signature": signature_of("I will.")}
    call = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"n": 1}}
    result = {"tool_use_id": "toolu_1", "type": "tool_result", "content": "hello", "is_error": False}
    first = submitted(
        **of_claude_code({"role": "user", "content": [said]}, {"role": "system", "content": [rules]}, session="a")
    )
    second = submitted(
        **of_claude_code(
            {"role": "user", "content": "Make a file"},
            {"role": "system", "content": "More rules."},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
            session="b",
        )
    )
    assert second.messages[: len(first.messages)] == first.messages
    assert second.messages[-2]["reasoning_content"] == "I will."
    assert first.templating == second.templating
    assert first.messages[0]["content"] == "You are an agent.\n\nHere are the rules."
    assert parsed(**of_claude_code({"role": "user", "content": "a"}, session="c")).unknown == ()


# answers


def event_of(**shown: Any) -> Submitted:
    return Submitted(
        endpoint=MESSAGES_ENDPOINT,
        frontend="web-0",
        model="m",
        messages=({"role": "user", "content": "Hello"},),
        sampling=SamplingParams(max_tokens=1000),
        calls=Calls(),
        templating=Templating(tools=({"type": "function", "function": {"name": "find", "parameters": {}}},)),
        presentation=Presentation(continuous_usage=True, **shown),
    )


def streamed(event: Submitted, said: Sequence[ClientEvent]) -> list[tuple[str, Any]]:
    fold = frames_of([event], UID)
    raw = b"".join(map(fold.of, said))
    return [(frame.kind, json.loads(frame.data)) for frame in frames_in(raw)]


def put_together(frames: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream, as Anthropic's libraries do."""
    message: dict[str, Any] = {}
    partial: dict[int, str] = {}
    for kind, data in frames:
        assert kind == data["type"]
        match kind:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(data["content_block"])
            case "content_block_delta":
                block, delta = message["content"][data["index"]], data["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        partial[data["index"]] = partial.get(data["index"], "") + delta["partial_json"]
            case "content_block_stop":
                if message["content"][data["index"]]["type"] == "tool_use":
                    message["content"][data["index"]]["input"] = json.loads(partial.get(data["index"]) or "{}")
            case "message_delta":
                message |= data["delta"]
                message["usage"] |= data["usage"]
    assert frames[-1][0] == "message_stop"
    return message


def whole(event: Submitted, said: Sequence[ClientEvent]) -> Any:
    return json.loads(answered([event], said, UID))


def test_an_answer_with_thinking_text_and_calls() -> None:
    answer = whole(event_of(), history(f"<think>\nWell\n</think>\n\nLet me see.\n{CALL}\n{CALL}"))
    thinking, text, *calls = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Well", "signature": signature_of("Well")}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [("tool_use", "find", {"n": 1})] * 2
    assert len({call["id"] for call in calls}) == 2
    assert (answer["id"], answer["stop_reason"], answer["model"]) == (f"msg_{UID}", "tool_use", "m")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_put_together_is_the_whole_answer(family: str, size: int) -> None:
    for seed in range(8):
        text = written(family, seed)  # type: ignore[arg-type]
        event = event_of().model_copy(update={"templating": Templating(tools=tuple(text.tools))})
        said = history(text.text or "a", text.markup, size=size)
        expected = whole(event, said)
        assert put_together(streamed(event, said)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"n": 12345678901234567890123}', {"n": 12345678901234567890123}),
        ('{"n": ' + "[" * 260 + "]" * 260 + "}", None),
        ('{"n": "cut', {}),
    ],
    ids=["a large number", "deep", "cut"],
)
def test_arguments_are_as_the_model_wrote_them(arguments: str, expected: Any) -> None:
    said = history(f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>', THINK)
    (call,) = whole(event_of(), said)["content"]
    assert call["input"] == (json.loads(arguments)["n"] and json.loads(arguments) if expected is None else expected)


def test_an_answer_without_markup_is_text() -> None:
    said = history("Hello\u2028!", None)
    assert whole(event_of(), said)["content"] == [{"type": "text", "text": "Hello\u2028!"}]
    assert put_together(streamed(event_of(), said)) == whole(event_of(), said)


def test_a_stream_begins_with_the_counts_of_the_prompt() -> None:
    (kind, first), (ping, _), *_ = streamed(event_of(), history("Hello", None))
    assert (kind, ping) == ("message_start", "ping")
    assert first["message"]["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 0,
    }


def test_thoughts_that_are_omitted_have_a_signature_alone() -> None:
    event, said = event_of(omits_thoughts=True), history("<think>\nWell\n</think>\n\nSo")
    expected = {"type": "thinking", "thinking": "", "signature": signature_of("Well")}
    assert whole(event, said)["content"][0] == expected
    assert put_together(streamed(event, said)) == whole(event, said)


def test_hidden_thinking_leaves_no_block() -> None:
    assert [
        block["type"]
        for block in whole(event_of(reasoning="hidden"), history("<think>\nWell\n</think>\n\nSo"))["content"]
    ] == ["text"]


def test_an_answer_that_fills_the_context_says_so() -> None:
    said = history("Hello", None, reason="length")
    assert whole(event_of(), said)["stop_reason"] == "model_context_window_exceeded"
    short = event_of().model_copy(
        update={"sampling": SamplingParams(max_tokens=whole(event_of(), said)["usage"]["output_tokens"])}
    )
    assert whole(short, said)["stop_reason"] == "max_tokens"


def test_an_error_in_mid_stream_is_an_event() -> None:
    failed = Failed(n=1, status=500, code="internal_error", message="No.")
    *_, (kind, data) = streamed(event_of(), [history("Hello", None)[0], ClientEvent("9-0", 9, failed)])
    assert (kind, data["type"], data["error"]["type"], data["request_id"]) == ("error", "error", "api_error", UID)


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know() -> None:
    message = (
        "This model's maximum context length is 4096 tokens. However, the prompt has at least 9000 tokens, and the .."
    )
    error = RequestError(message, code="context_length_exceeded", param="messages")
    told = json.loads(error_body(error, "r"))["error"]
    assert told == {"type": "invalid_request_error", "message": "prompt is too long: 9000 tokens > 4096 maximum"}


def test_tokens_are_counted_of_the_prompt_that_is_answered() -> None:
    body = {"messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
    request = parse_count(json.dumps(body).encode())
    assert isinstance(request, CountRequest)
    (count,) = request.submitted(frontend="web-0", model="m")
    event = submitted(**body)
    assert (count.messages, count.templating, count.task) == (event.messages, event.templating, "tokenize")
