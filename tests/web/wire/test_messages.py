"""Messages and tools of a request: what is refused and by which path, and what a template is given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.wire import HELLO, chats, refusal

from pipeline.events import decode, encode
from web.wire.openai.schemas import parse_chat

SECRET = "a-word-that-must-not-come-back"
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "default": None}}},
        "strict": True,
    },
}


def plain(*messages: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return chats(messages=messages)[0].messages


def plain_tools(*tools: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return chats(tools=tools)[0].templating.tools


def calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL, {"id": "call_2", "type": "function", "function": function}]}


ARGUMENTS = "0.tool_calls.1.function.arguments"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"content": "x"}, "0.role"),
    ({"role": SECRET, "content": "x"}, "0.role"),
    ({"role": "function", "name": "f", "content": "x"}, "0.role"),
    ({"role": "user"}, "0.content"),
    ({"role": "system", "content": None}, "0.content"),
    ({"role": "developer", "content": 3}, "0.content"),
    ({"role": "user", "content": []}, "0.content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}, "0.content"),
    ({"role": "user", "content": [{"type": [SECRET], "text": SECRET}]}, "0.content"),
    ({"role": "user", "content": [{"type": "input_text", "input_text": SECRET}]}, "0.content"),
    ({"role": "user", "content": [{"type": "thinking", "thinking": SECRET}]}, "0.content"),
    ({"role": "assistant", "content": [{"type": "refusal", "text": SECRET}]}, "0.content"),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": [{"text": "a"}, SECRET]}]}, "0.content"),
    ({"role": "user", "content": "x", "name": 3}, "0.name"),
    ({"role": "tool", "content": "x"}, "0.tool_call_id"),
    ({"role": "tool", "content": "x", "tool_call_id": ""}, "0.tool_call_id"),
    ({"role": "tool", "content": "x", "tool_call_id": 1}, "0.tool_call_id"),
    ({"role": "user", "content": "x", "tool_call_id": SECRET}, "0.tool_call_id"),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "0.tool_calls"),
    ({"role": "assistant", "tool_calls": CALL}, "0.tool_calls"),
    ({"role": "assistant", "tool_calls": [SECRET]}, "0.tool_calls.0"),
    ({"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}, "0.tool_calls.0.id"),
    ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "0.tool_calls.0.type"),
    ({"role": "assistant", "tool_calls": [{"id": SECRET}]}, "0.tool_calls.0.function"),
    (calling(arguments="{}"), "0.tool_calls.1.function.name"),
    (calling(name="", arguments="{}"), "0.tool_calls.1.function.name"),
    (calling(name="f", arguments='{"a":' * 100_000), ARGUMENTS),
    ({"role": "assistant", "content": "x", "refusal": SECRET}, "0.refusal"),
    ({"role": "assistant", "content": "x", "reasoning": {"text": SECRET}}, "0.reasoning"),
    ({"role": "assistant", "content": "x", "reasoning": SECRET, "reasoning_content": "hm"}, "0.reasoning"),
    ({"role": "user", "content": "x", "reasoning_content": SECRET}, "0.reasoning_content"),
    ({"role": "tool", "content": "x", "tool_call_id": "c", "reasoning": SECRET}, "0.reasoning"),
    ({"role": "assistant", "content": "x", "function_call": {"name": SECRET}}, "0.function_call"),
]


@pytest.mark.parametrize(("message", "path"), BAD, ids=[f"{path}-{i}" for i, (_, path) in enumerate(BAD)])
def test_a_bad_message_is_refused_by_its_path_and_without_its_value(message: dict[str, Any], path: str) -> None:
    error = refusal(parse_chat, {"messages": [message, {"role": "user", "content": "fine"}]})
    assert (error.status, error.param) == (400, f"messages.{path}")
    assert f"messages.{path}" in error.message and SECRET not in error.message


def test_a_conversation_with_calls_is_given_as_templates_know_it() -> None:
    assert plain(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "tool_calls": [CALL | {"index": 0}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "seen"}]},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "user", "content": ""},
    ) == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "seen", "tool_call_id": "call_1"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    )


def test_a_call_without_a_type_is_of_a_function_and_no_arguments_are_none() -> None:
    (message,) = plain(
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}, "type": None}]}
    )
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ('{"city": "Pa', '{"city": "Pa'),
        ("Paris", "Paris"),
        ("null", "null"),
        (None, "null"),
        ([], "[]"),
        ({"at": "你", "big": 10**25}, '{"at": "你", "big": 10000000000000000000000000}'),
    ],
)
def test_any_arguments_of_an_old_call_are_taken(given: object, kept: str) -> None:
    function = {"name": "f", "arguments": given}
    (message,) = plain({"role": "assistant", "tool_calls": [{"id": "c", "function": function}]})
    assert message["tool_calls"][0]["function"]["arguments"] == kept


def test_arguments_that_are_left_out_are_none() -> None:
    (message,) = plain({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}


def test_parts_of_the_assistant_are_lines_and_its_thoughts_are_reasoning() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "What is"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]},
        {"type": "refusal", "refusal": "I cannot."},
    ]
    message = {"role": "assistant", "content": "What is\nI cannot.", "reasoning_content": "hm\nso"}
    assert plain({"role": "assistant", "content": parts}) == (message,)
    told = {"role": "assistant", "content": parts, "reasoning_content": "all of it"}
    assert plain(told) == (message | {"reasoning_content": "all of it"},)


def test_parts_of_the_responses_api_are_text_and_a_result_of_nothing_is_empty() -> None:
    parts = [{"type": "input_text", "text": "What is"}, {"type": "text", "text": "this?"}]
    assert plain({"role": "user", "content": parts}, {"role": "tool", "tool_call_id": "c", "content": None}) == (
        {"role": "user", "content": "What is\nthis?"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    )


def test_a_part_that_is_not_supported_is_told_which_are() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
    error = refusal(parse_chat, {"messages": [message]})
    assert re.search(r"`text`.*`input_text`.*`refusal`.*`thinking`", error.message)


def test_what_a_template_is_not_given_is_left_out() -> None:
    message = {"role": "assistant", "content": "x"}
    assert plain({**message, "refusal": "", "annotations": [], "reasoning_content": ""}) == (message,)


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]])
def test_reasoning_comes_back_under_either_name_and_templates_get_one(names: list[str]) -> None:
    message = {"role": "assistant", "content": "x"}
    assert plain(message | dict.fromkeys(names, "hm")) == (message | {"reasoning_content": "hm"},)


def test_unknown_names_are_let_through_and_named() -> None:
    call = CALL | {"index": 0, "function": {"name": "f", "arguments": "{}", "parsed": 1}}
    message = {"role": "assistant", "tool_calls": [call], "weight": 1, "audio": None}
    tool = TOOL | {"cache": 1, "function": {"name": "f", "deep": [1e999]}}
    assert parse_chat(json.dumps({"messages": [message], "tools": [tool]}).encode()).unknown == (
        *("messages.tool_calls.function.parsed", "messages.tool_calls.index", "messages.weight"),
        *("tools.cache", "tools.function.deep"),
    )
    assert plain_tools(tool) == ({"type": "function", "function": {"name": "f"}},)


def test_a_tool_is_given_as_it_was_sent_but_for_what_is_null() -> None:
    assert plain_tools(TOOL) == (TOOL,)
    bare = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    assert plain_tools(bare) == ({"type": "function", "function": {"name": "f"}},)


def test_tools_come_through_the_log_as_they_were_sent() -> None:
    (event,) = chats(
        messages=[{"role": "assistant", "tool_calls": [CALL]}], tools=[TOOL], chat_template_kwargs={"a": [None, 1.5]}
    )
    assert decode(encode(event)) == event
    assert event.templating.tools == (TOOL,)


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        (SECRET, "0"),
        ({"type": "web_search"}, "0.type"),
        ({"function": {"name": "f"}}, "0.type"),
        ({"type": "function"}, "0.function"),
        ({"type": "function", "function": {"name": ""}}, "0.function.name"),
        ({"type": "function", "function": {"name": f"f({SECRET})"}}, "0.function.name"),
        ({"type": "function", "function": {"name": "f" * 129}}, "0.function.name"),
        ({"type": "function", "function": {"name": "f", "strict": "yes"}}, "0.function.strict"),
        ({"type": "function", "function": {"name": "f", "parameters": [SECRET]}}, "0.function.parameters"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {SECRET: float("nan")}}},
            "0.function.parameters",
        ),
    ],
)
def test_a_bad_tool_is_refused_by_its_path_and_without_its_value(tool: Any, path: str) -> None:
    error = refusal(parse_chat, {"messages": HELLO, "tools": [tool]})
    assert error.param == f"tools.{path}" and SECRET not in error.message
