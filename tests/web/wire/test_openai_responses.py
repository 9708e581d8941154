"""OpenAI's Responses API: items are the messages of a chat, and a stream is the same response."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.chunks import THINK, UID, answered, ended, finished, frames_of, history
from support.conversations import as_chat, as_items, as_messages, talks
from support.marked_texts import FAMILIES, written
from support.wire import MADE, Body, refusal

from ops.sse_reader import frames_in
from pipeline.errors import RequestError
from pipeline.events import Calls, Cancelled, Failed, Submitted, Templating, decode, encode
from web.wire.anthropic.schemas import message_events, parse_messages
from web.wire.frames import ClientEvent
from web.wire.openai.schemas import parse_chat
from web.wire.responses.answers import ResponseFrames
from web.wire.responses.items import Conversation, items_of
from web.wire.responses.schemas import ONE_TEXT, ResponsesRequest, parse_response, response_events
from web.wire.signatures import signature_of
from web.wire.submit import chat_events

Json = dict[str, Any]
HELLO: Json = {"role": "user", "content": "Hello"}
TOOL: Json = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {"n": {}}}}
PATCH: Json = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
SPACE: Json = {"type": "namespace", "name": "deep", "description": "Deep.", "tools": [TOOL, {**PATCH, "strict": None}]}
SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
THOUGHT: Json = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL: Json = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"n": 1}'}
RESULT: Json = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def parsed(**fields: Any) -> ResponsesRequest:
    return parse_response(json.dumps({"input": "Hello", **fields}).encode())


def submitted(**fields: Any) -> Submitted:
    (event,) = response_events(parsed(**fields), **MADE)
    return event


def outcome(**fields: Any) -> Submitted | RequestError:
    try:
        return submitted(**fields)
    except RequestError as error:
        return error


def messages(*items: Any) -> list[Json]:
    return list(submitted(input=list(items)).messages)


def part(text: str, kind: str = "input_text") -> list[Json]:
    return [{"type": kind, "text": text}]


def answer(text: str) -> Json:
    return {"type": "message", "role": "assistant", "content": part(text, "output_text")}


def called(name: str = "find", arguments: str = '{"n": 1}') -> Json:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


# items


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["Hello", part("Hello"), part("Hello", "text")], HELLO),
        ([[{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]], {**HELLO, "content": "a\nb"}),
        ([[]], {**HELLO, "content": ""}),
    ],
)
def test_a_text_and_one_part_are_the_same(items: list[Any], message: Json) -> None:
    for content in items:
        assert messages({"role": "user", "content": content}) == [message]
        assert messages({"type": "message", "role": "user", "id": "msg_1", "content": content}) == [message]
        assert messages({**RESULT, "output": content})[0]["content"] == message["content"]
    assert list(submitted(input="Hello").messages) == [HELLO]


@pytest.mark.parametrize("content", ["So", part("So", "output_text"), [{"type": "refusal", "refusal": "So"}]])
def test_what_the_assistant_says_is_a_text_too(content: Any) -> None:
    assert messages(HELLO, {"role": "assistant", "content": content})[1] == {"role": "assistant", "content": "So"}


def test_items_of_the_assistant_that_follow_each_other_are_one_message() -> None:
    whole = {"role": "assistant", "content": "a\nb", "reasoning_content": "Hm.\nHm.", "tool_calls": [called()] * 2}
    in_order = [THOUGHT, THOUGHT, answer("a"), answer("b"), CALL, CALL]
    assert messages(HELLO, *in_order, RESULT) == [HELLO, whole, {"role": "tool", "content": "3", "tool_call_id": "c1"}]
    assert messages(HELLO, CALL, answer("a"), THOUGHT, CALL, answer("b"), THOUGHT) == [HELLO, whole]
    assert [each["role"] for each in messages(answer("a"), HELLO, answer("b"), RESULT, CALL)] == (
        ["assistant", "user", "assistant", "tool", "assistant"]
    )


def test_instructions_and_developers_are_the_system_wherever_they_are() -> None:
    developer = {"type": "message", "role": "developer", "content": part("Now.")}
    event = submitted(instructions="Be brief.", input=[developer, HELLO, {**developer, "role": "system"}])
    system = {"role": "system", "content": "Now."}
    assert list(event.messages) == [{"role": "system", "content": "Be brief."}, system, HELLO, system]


def test_a_call_in_a_namespace_has_its_whole_name() -> None:
    assert messages(HELLO, {**CALL, "namespace": "deep"})[1]["tool_calls"] == [called("deep__find")]
    assert messages(HELLO, {**CALL, "namespace": None})[1]["tool_calls"] == [called()]


def test_a_custom_call_is_a_call_with_one_text() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'ä "b"\n'}
    found = messages(HELLO, call, {**RESULT, "type": "custom_tool_call_output"})
    assert found[1]["tool_calls"] == [called("patch", json.dumps({"input": 'ä "b"\n'}, ensure_ascii=False))]
    assert found[2] == {"role": "tool", "content": "3", "tool_call_id": "c1"}


@pytest.mark.parametrize("content", [None, []])
def test_encrypted_content_carries_the_thought_that_a_client_leaves_out(content: Any) -> None:
    thought = "Let me see. äöü 🙂"
    item = {"type": "reasoning", "summary": [], "content": content, "encrypted_content": signature_of(thought)}
    expected = {"role": "assistant", "content": "So", "reasoning_content": thought}
    assert messages(HELLO, item, answer("So")) == [HELLO, expected]
    shown = {**item, "content": part("Mine", "reasoning_text")}
    assert messages(HELLO, shown)[1]["reasoning_content"] == "Mine"


@pytest.mark.parametrize(
    "signature",
    ["OPAQUE!", "", "bWluaXNnbA==", base64.b64encode(b"\x02" + zlib.compress(b"later")).decode()],
    ids=["no base64", "empty", "foreign", "later version"],
)
def test_a_thought_that_cannot_be_read_is_left_out_and_named(signature: str) -> None:
    asked = parsed(input=[HELLO, {"type": "reasoning", "summary": [], "encrypted_content": signature}, answer("So")])
    assert list(asked.conversation.messages) == [HELLO, {"role": "assistant", "content": "So"}]
    assert asked.left_out == ("input.1.encrypted_content",)


def test_a_thought_without_a_text_leaves_nothing() -> None:
    asked = parsed(input=[HELLO, {"type": "reasoning", "id": "rs_1", "summary": part("Sum", "summary_text")}, CALL])
    assert "reasoning_content" not in asked.conversation.messages[1] and asked.left_out == ()


@pytest.mark.parametrize(
    ("item", "code", "place"),
    [
        (5, "invalid_value", ""),
        ({}, "unsupported_content", ".type"),
        ({"type": 5}, "unsupported_content", ".type"),
        ({"type": "web_search_call"}, "unsupported_content", ".type"),
        ({"type": "additional_tools"}, "unsupported_content", ".type"),
        ({"type": "message", "role": "tool", "content": ""}, "invalid_value", ".role"),
        ({"role": ["user"], "content": ""}, "invalid_value", ".role"),
        ({"role": "user"}, "invalid_value", ".content"),
        ({"role": "user", "content": [5]}, "unsupported_content", ".content.0.type"),
        (
            {"role": "user", "content": [*part("a"), {"type": "input_image", "image_url": "data:,"}]},
            "unsupported_content",
            ".content.1.type",
        ),
        ({"role": "user", "content": [{"type": "input_file"}]}, "unsupported_content", ".content.0.type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "invalid_value", ".content.0.text"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}, "invalid_value", ".content.0.refusal"),
        ({"role": "user", "content": part("") * 4097}, "invalid_value", ".content"),
        ({"type": "reasoning", "content": 5}, "invalid_value", ".content"),
        ({"type": "reasoning", "content": part("a", "output_text")}, "unsupported_content", ".content.0.type"),
        ({"type": "reasoning", "encrypted_content": 5}, "invalid_value", ".encrypted_content"),
        ({**CALL, "arguments": {"n": 1}}, "invalid_value", ".arguments"),
        ({**CALL, "call_id": ""}, "invalid_value", ".call_id"),
        ({**CALL, "call_id": "c" * 1025}, "invalid_value", ".call_id"),
        ({**CALL, "name": None}, "invalid_value", ".name"),
        ({**CALL, "namespace": ""}, "invalid_value", ".namespace"),
        ({**CALL, "arguments": f"[{'1,' * 100_001}1]"}, "invalid_value", ".arguments"),
        ({**CALL, "type": "custom_tool_call"}, "invalid_value", ".input"),
        ({**RESULT, "call_id": 5}, "invalid_value", ".call_id"),
        ({**RESULT, "output": None}, "invalid_value", ".output"),
        ({**RESULT, "output": [{"type": "input_image"}]}, "unsupported_content", ".output.0.type"),
    ],
)
def test_an_item_that_is_not_supported_is_refused_with_its_place(item: Any, code: str, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages(HELLO, item)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, f"input.1{place}")


def test_references_are_named_once_and_need_an_id() -> None:
    asked = parsed(input=[{"type": "item_reference", "id": "msg_1"}, HELLO, {"id": "rs_1"}, {"id": "msg_1"}])
    assert asked.references == ("msg_1", "rs_1")
    for item in ({"type": "item_reference"}, {"id": 5}, {"id": ""}):
        with pytest.raises(RequestError) as caught:
            _ = parsed(input=[HELLO, item]).references
        assert caught.value.param == "input.1.id"


# bodies


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": 5}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": None}, "invalid_value", "input"),
        ({"input": [HELLO] * 8193}, "invalid_value", "input"),
        ({"input": [CALL] * 1025}, "invalid_value", "input.1024"),
        ({"previous_response_id": "r" * 1025}, "invalid_value", "previous_response_id"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": "9"}, "invalid_value", "max_output_tokens"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"top_p": 1.1}, "invalid_value", "top_p"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"truncation": "left"}, "invalid_value", "truncation"),
        ({"include": ["a"] * 33}, "invalid_value", "include"),
        ({"reasoning": {"effort": "much"}}, "invalid_value", "reasoning.effort"),
        ({"metadata": {"a": "b" * 70_000}}, "invalid_value", "metadata"),
        ({"metadata": {"a": 2**64}}, "invalid_value", "metadata"),
        ({"background": True, "store": False}, "invalid_value", "background"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "invalid_value", "text.format.schema"),
        ({"text": {"format": SCHEMA}, "tools": [TOOL], "tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL] * 1025}, "invalid_value", "tools"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools.1.name"),
        ({"tools": [SPACE, {**TOOL, "name": "deep__find"}]}, "invalid_value", "tools.1.name"),
        ({"tools": [{"type": "function"}]}, "invalid_value", "tools.0.name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "invalid_value", "tools.0.name"),
        ({"tools": [{**PATCH, "format": {"n": 2**64}}]}, "invalid_value", "tools.0.format"),
        ({"tools": [{**SPACE, "name": ""}]}, "invalid_value", "tools.0.name"),
        ({"tools": [{**SPACE, "name": "d" * 125}]}, "invalid_value", "tools.0.tools.0.name"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "some", "tools": [TOOL]}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice.name"),
        ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "find"}}, "invalid_value", "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "invalid_value", "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "invalid_value", "tool_choice.tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}},
            "invalid_value",
            "tool_choice.tools.0.name",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}},
            "invalid_value",
            "tool_choice.tools.0.type",
        ),
        *(
            ({name: value}, "unsupported_parameter", name)
            for name, value in {
                "conversation": "conv_1",
                "prompt": {"id": "p"},
                "messages": [HELLO],
                "n": 2,
                "max_tokens": 9,
                "stop": ["a"],
                "top_logprobs": 5,
                "response_format": {"type": "json_object"},
                "reasoning_effort": "low",
                "context_management": [{"type": "compaction"}],
            }.items()
        ),
    ],
)
def test_a_wrong_body_is_refused_with_its_place(fields: Body, code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        submitted(**fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


def test_what_is_no_object_is_no_body() -> None:
    assert refusal(parse_response, b"[]").code == refusal(parse_response, b"{").code == "invalid_json"


def test_log_probabilities_are_refused_also_where_they_are_included() -> None:
    assert isinstance(outcome(include=["message.output_text.logprobs"]), RequestError)


def test_unknown_fields_are_named_and_neutral_ones_are_not() -> None:
    noted = {**TOOL, "defer_loading": True}
    asked = parsed(
        client_metadata={},
        n=1,
        top_logprobs=0,
        stream_options={},
        reasoning={"a": 1},
        text={"b": 1},
        tools=[noted, {**SPACE, "tools": [{**PATCH, "c": 1}]}],
    )
    expected = ("client_metadata", "reasoning.a", "stream_options", "text.b", "tools.c", "tools.defer_loading")
    assert asked.unknown == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "find", "d": 1}}, "tool_choice.d"),
        ({"text": {"format": {"type": "text", "d": 1}}}, "text.format.d"),
        ({"tools": [{**SPACE, "d": 1}]}, "tools.d"),
    ],
)
def test_unknown_fields_further_within_are_named(fields: Body, name: str) -> None:
    assert parsed(**fields).unknown == (name,)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tool_calls": 2**64},
        {"reasoning": {"a": 2**64}},
        {"text": {"a": 2**64}},
        {"text": {"format": {"type": "text", "a": 2**64}}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "find", "a": 2**64}},
    ],
)
def test_a_number_that_the_log_cannot_hold_is_refused_or_left_out(fields: Body) -> None:
    found = outcome(**fields)
    assert isinstance(found, RequestError) or decode(encode(found)) == found


def test_labels_are_kept_and_store_is_one() -> None:
    labels = {"metadata": {"a": "b"}, "user": "ann", "prompt_cache_key": "k", "safety_identifier": "s"}
    assert submitted(**labels, service_tier="auto").labels == {**labels, "service_tier": "auto", "store": True}
    assert submitted(store=False).labels == {"store": False}


def test_settings_reach_the_event() -> None:
    event = submitted(max_output_tokens=9.0, temperature=0.5, top_p=0.5, seed=7, truncation="auto", background=True)
    sampling = event.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (9, 0.5, 0.5, 7)
    assert (event.limit, event.truncate_prompt_tokens, event.background) == ("", -1, True)
    assert submitted().truncate_prompt_tokens is None and not submitted().background
    assert submitted(reasoning={"effort": "low"}).templating.variables == {"reasoning_effort": "low"}
    off = {"reasoning_effort": "none", "enable_thinking": False}
    assert submitted(reasoning={"effort": "none"}).templating.variables == off


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, Calls()),
        ({"tool_choice": "none", "parallel_tool_calls": False}, Calls(choice="none", parallel=False)),
        ({"tool_choice": "required"}, Calls(choice="required")),
        (
            {"tool_choice": {"type": "function", "name": "find"}},
            Calls(choice="required", names=("find",), parallel=False),
        ),
        (
            {"tool_choice": {"type": "custom", "name": "patch", "namespace": "deep"}},
            Calls(choice="required", names=("deep__patch",), parallel=False),
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "find"}] * 2}},
            Calls(names=("find",)),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "custom", "name": "deep__patch"}],
                }
            },
            Calls(choice="required", names=("deep__patch",)),
        ),
    ],
)
def test_a_choice_of_tools(fields: Body, calls: Calls) -> None:
    assert submitted(tools=[TOOL, SPACE], **fields).calls == calls


def test_namespaces_and_custom_tools_are_functions_for_the_model() -> None:
    patch = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    tools = submitted(tools=[TOOL, SPACE, patch]).templating.tools
    assert all(tool["type"] == "function" for tool in tools)
    find, of_space, plain, shaped = (tool["function"] for tool in tools)
    assert find == {"name": "find", "parameters": TOOL["parameters"]}
    assert of_space == {**find, "name": "deep__find"}
    assert plain == {"name": "deep__patch", "description": "Edits.", "parameters": ONE_TEXT}
    assert (shaped["name"], shaped["parameters"]) == ("patch", ONE_TEXT)
    assert shaped["description"].startswith("Edits.\n") and '"lark"' in shaped["description"]


def test_hosted_tools_are_left_out_and_named() -> None:
    within = {**SPACE, "tools": [TOOL, {"type": "computer_use"}]}
    asked = parsed(tools=[{"type": "web_search"}, within, {"type": "mcp", "name": "docs"}])
    assert asked.left_out == ("computer_use", "docs", "web_search")
    (event,) = response_events(asked, **MADE)
    assert [tool["function"]["name"] for tool in event.templating.tools] == ["deep__find"]
    assert submitted(tools=[{"type": "web_search"}]).calls is None


def test_a_namespace_in_a_namespace_is_refused_or_named() -> None:
    body = {"tools": [TOOL, {**SPACE, "tools": [SPACE]}]}
    assert isinstance(outcome(**body), RequestError) or parsed(**body).left_out


# clients


def of_codex(*items: Json) -> Json:
    """Return a body in the form that Codex 0.171 sends."""
    rules = {"type": "message", "id": "msg_1", "role": "developer"}
    said = {"type": "message", "id": "msg_2", "role": "user"}
    first = [
        {**rules, "content": part("You are Codex.")},
        {**rules, "content": part("Skills.") + part("Apps.")},
        {**said, "content": part("<environment>")},
        {**said, "content": part("Make a file")},
    ]
    run = {**TOOL, "description": "Runs.", "strict": False}
    return {
        "model": "demo",
        "stream": True,
        "input": [*first, *items],
        "tools": [
            run,
            {**SPACE, "tools": [{**run, "name": "wait"}]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn_id": "t"},
    }


def test_the_second_turn_of_codex_begins_as_the_first() -> None:
    sealed = {**THOUGHT, "id": "rs_1", "encrypted_content": signature_of("Hm.")}
    call = {**CALL, "id": "fc_1", "status": "completed"}
    first, second = submitted(**of_codex()), submitted(**of_codex(sealed, call, {**RESULT, "id": "fco_1"}))
    assert [each["role"] for each in first.messages] == ["system", "system", "user", "user"]
    assert first.messages[1]["content"] == "Skills.\nApps."
    assert second.messages[:4] == first.messages and second.templating == first.templating
    assert second.messages[4:] == (
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [called()]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    )
    asked = parsed(**of_codex(sealed, call))
    assert (asked.left_out, asked.unknown) == (("web_search",), ("client_metadata",))
    assert [tool["function"]["name"] for tool in first.templating.tools] == ["find", "deep__wait"]


def test_bodies_of_opencode_and_of_the_agents_sdk() -> None:
    call = {name: CALL[name] for name in ("type", "call_id", "name", "arguments")}
    sealed = {"type": "reasoning", "encrypted_content": signature_of("Hm."), "summary": []}
    user = {"role": "user", "content": part("Hello")}
    tools = [{**TOOL, "description": "Runs.", "strict": False}]
    of_opencode = {
        "model": "demo",
        "input": [{"role": "system", "content": "Be brief."}, user, sealed, call, RESULT],
        "max_output_tokens": 512,
        "store": False,
        "prompt_cache_key": "ses_1",
        "tools": tools,
        "tool_choice": "auto",
        "stream": True,
    }
    told = {"id": "fc_1", "status": "completed", **CALL}
    of_agents = {
        "model": "demo",
        "include": [],
        "input": [HELLO, told, RESULT],
        "instructions": "Be brief.",
        "tools": tools,
    }
    begins = ({"role": "system", "content": "Be brief."}, HELLO)
    answers: Json = {"role": "assistant", "content": "", "tool_calls": [called()]}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert submitted(**of_opencode).messages == (*begins, {**answers, "reasoning_content": "Hm."}, result)
    assert submitted(**of_agents).messages == (*begins, answers, result)
    for body in (of_opencode, of_agents):
        assert (parsed(**body).unknown, parsed(**body).left_out) == ((), ())


@given(talks(), st.integers())
def test_a_conversation_is_the_same_in_every_dialect(talk: Any, seed: int) -> None:
    random = Random(seed)
    body = as_items(talk, lambda: random.random() < 0.5)
    mine = submitted(**body)
    (chat,) = chat_events(parse_chat(json.dumps(as_chat(talk)).encode()), **MADE)
    (message,) = message_events(parse_messages(json.dumps(as_messages(talk)).encode()), **MADE)
    for other in (chat, message):
        assert (mine.messages, mine.templating, mine.calls) == (other.messages, other.templating, other.calls)
    items = list(items_of(mine.messages, UID, {}))
    assert len({item["id"] for item in items}) == len(items)
    if not any(turn.answer + turn.thought == "" and not turn.calls for turn in talk.turns):  # nothing said: no item
        assert tuple(folded(items).messages) == mine.messages


def folded(items: Sequence[Json]) -> Conversation:
    found = Conversation()
    for number, item in enumerate(items):
        found.add(item, f"input.{number}")
    return found


# answers


def event_of(**fields: Any) -> Submitted:
    return submitted(**{"model": "m", "tools": [TOOL, SPACE, PATCH], "store": True, **fields})


def events_of(event: Submitted, said: Sequence[ClientEvent]) -> list[Json]:
    """Return the events of a stream."""
    found = list(frames_in(b"".join(map(frames_of([event]).of, said))))
    events = [json.loads(frame.data) for frame in found]
    assert [event["type"] for event in events] == [frame.kind for frame in found]
    return events


def whole(event: Submitted, said: Sequence[ClientEvent]) -> Any:
    return json.loads(answered([event], said))


def put_together(events: Sequence[Json]) -> Json:
    """Return the response that a client makes of a stream, which is the one in its last event."""
    items: list[Json] = []
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    is_open = False
    for event in events[2:-1]:
        kind, item = event["type"].removeprefix("response."), items[-1] if items else {}
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        assert is_open == (kind != "output_item.added") and event.get("item_id", item.get("id")) == item.get("id")
        text = item["content"][-1] if item.get("content") else {}
        match kind:
            case "output_item.added":
                items.append(event["item"])
                is_open = True
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                text["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == text["text"]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
            case "custom_tool_call_input.done":
                assert event["input"] == item["input"]
            case "content_part.done":
                assert event["part"] == text
            case _:
                assert kind == "output_item.done"
                last = {name: event["item"][name] for name in ("status", "encrypted_content") if name in event["item"]}
                items[-1] = item | last
                assert items[-1] == event["item"]
                is_open = False
    response: Json = events[-1]["response"]
    assert not is_open and response["output"] == items
    assert events[-1]["type"] == f"response.{response['status']}"
    return response


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


FULL = "<think>\nWell\n</think>\n\nLet me see.\n" + call_of("find", '{"n": 1}') + call_of("deep__find", "{}")


def test_the_events_of_a_stream_come_in_the_order_of_openai() -> None:
    kinds = [event["type"].removeprefix("response.") for event in events_of(event_of(), history(FULL, THINK))]
    once = [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]]
    texts = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [
        [kind.format("reasoning_text") for kind in texts],
        [kind.format("output_text") for kind in texts],
        call,
        call,
    ]
    within = [kind for item in items for kind in ("output_item.added", *item, "output_item.done")]
    assert once == ["created", "in_progress", *within, "completed"]


def test_an_answer_with_thinking_text_and_calls() -> None:
    response = whole(event_of(), history(FULL, THINK))
    reasoning, message, call, far = response["output"]
    done = {"status": "completed"}
    said = [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert message == {"type": "message", "id": f"msg_{UID}_1", "role": "assistant", "content": said, **done}
    assert reasoning == {**THOUGHT, "id": f"rs_{UID}_0", "content": part("Well", "reasoning_text"), **done}
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "find", '{"n": 1}')
    assert (far["namespace"], far["name"], far["id"]) == ("deep", "find", f"fc_{UID}_3")
    assert "namespace" not in call and call["call_id"] != far["call_id"]
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 3, 10)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert folded(response["output"]).messages[0]["tool_calls"][1]["function"]["name"] == "deep__find"


def test_a_response_has_all_members_and_the_official_client_reads_it_and_its_events() -> None:
    event, said = event_of(instructions="Be brief.", text={"format": SCHEMA}), history(FULL, THINK)
    response = whole(event, said)
    expected = """id object created_at completed_at status incomplete_details model previous_response_id instructions
        output error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty
        top_logprobs temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
        safety_identifier prompt_cache_key"""
    assert set(response) >= set(expected.split())
    OpenAIResponse.model_validate_json(json.dumps(response), strict=True)
    reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for each in events_of(event, said):
        assert reader.validate_json(json.dumps(each), strict=True).type == each["type"]


def test_a_response_repeats_what_was_asked() -> None:
    labels = {"metadata": {"a": "b"}, "user": "ann", "prompt_cache_key": "k", "safety_identifier": "s"}
    settings = {
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "find"}]},
        "truncation": "auto",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "previous_response_id": "resp_1",
        "temperature": 0.5,
        "top_p": 0.25,
        "instructions": "Be brief.",
        "background": True,
        "store": True,
        "parallel_tool_calls": True,
    }
    more = {"reasoning": {"effort": "low"}, "text": {"format": SCHEMA, "verbosity": "low"}}
    response = whole(event_of(**settings, **labels, **more), history("So", None))
    assert {name: response[name] for name in (*settings, *labels)} == {**settings, **labels}
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["text"] == more["text"]
    find, space, patch = response["tools"]
    assert find == {**TOOL, "description": None, "strict": None}
    assert (space["name"], space["description"], space["tools"][0]) == ("deep", "Deep.", find)
    assert space["tools"][1] == patch == PATCH
    assert (response["id"], response["object"], response["model"]) == (f"resp_{UID}", "response", "m")
    assert (response["created_at"], response["completed_at"], response["status"]) == (5, 5, "completed")
    assert whole(event_of(instructions=None), history("So", None))["instructions"] is None


@pytest.mark.parametrize("size", [1, 7, 200])
def test_a_custom_call_has_its_decoded_text(size: int) -> None:
    given = 'ä "b"\n\u2028'
    said = history(
        call_of("patch", json.dumps({"input": given})) + call_of("deep__patch", '{"input": ""}'), THINK, size=size
    )
    events = events_of(event_of(), said)
    first, second = put_together(events)["output"]
    assert (first["type"], first["name"], first["input"]) == ("custom_tool_call", "patch", given)
    assert (second["namespace"], second["name"], second["input"]) == ("deep", "patch", "")
    assert first["id"] == f"ctc_{UID}_0" and not any("function_call" in event["type"] for event in events)
    assert events[-1]["response"] == whole(event_of(), said)


@pytest.mark.parametrize("arguments", ['{"input": "cut', '{"other": 1}', "[1]"])
def test_a_custom_call_without_its_text_has_all_that_there_is(arguments: str) -> None:
    said = history(f'<tool_call>{{"name": "patch", "arguments": {arguments}', THINK, reason="length")
    response = put_together(events_of(event_of(), said))
    assert response == whole(event_of(), said)
    assert [item["input"] for item in response["output"]] == [arguments]


@pytest.mark.parametrize("given", ["[1]", '{"a": 1}', "true", "null"])
def test_a_custom_call_whose_input_is_no_text_has_it_as_the_model_wrote_it(given: str) -> None:
    (call,) = whole(event_of(), history(call_of("patch", f'{{"input": {given}}}'), THINK))["output"]
    assert call["input"] in (given, f'{{"input": {given}}}')


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_put_together_is_the_whole_response(family: str, size: int) -> None:
    for seed in range(8):
        text = written(family, seed)  # type: ignore[arg-type]
        reason = "length" if seed % 4 == 3 else "stop"
        event = event_of(include=["reasoning.encrypted_content"] if seed % 2 else [])
        event = event.model_copy(update={"templating": Templating(tools=tuple(text.tools))})
        said = history(text.text or "a", text.markup, size=size, reason=reason)  # type: ignore[arg-type]
        assert put_together(events_of(event, said)) == whole(event, said)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "So 🙂", "<tool_", "call>", FULL, call_of("patch", "{}")]))
)
def test_a_stream_of_any_text_put_together_is_the_whole_response(texts: list[str]) -> None:
    said = history("".join(texts) or "a", THINK, size=5)
    assert put_together(events_of(event_of(), said)) == whole(event_of(), said)


def test_thoughts_are_encrypted_where_that_is_asked_for() -> None:
    said = history("<think>\nWell\n</think>\n\nSo", THINK)
    reasoning, _ = put_together(events_of(event_of(include=["reasoning.encrypted_content"]), said))["output"]
    assert reasoning["encrypted_content"] == signature_of("Well")
    assert "encrypted_content" not in whole(event_of(), said)["output"][0]


def test_an_answer_without_markup_or_without_a_text() -> None:
    said = history("Hello\u2028!", None)
    response = whole(event_of(), said)
    assert [item["content"][0]["text"] for item in response["output"]] == ["Hello\u2028!"]
    assert put_together(events_of(event_of(), said)) == response
    assert put_together(events_of(event_of(), [ended(finished())])) == whole(event_of(), [ended(finished())])


def test_a_limit_makes_the_last_item_incomplete() -> None:
    response = put_together(events_of(event_of(), history("<think>\nWell\n</think>\n\nSo", THINK, reason="length")))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    ("end", "kind", "status", "code"),
    [
        (
            Failed(status=400, code="context_length_exceeded", message="No."),
            "failed",
            "failed",
            "context_length_exceeded",
        ),
        (Failed(status=500, code="engine_error", message="No."), "failed", "failed", "server_error"),
        (Failed(status=503, code="shutting_down", message="No."), "failed", "failed", "server_error"),
        (Failed(status=400, code="invalid_value", message="No."), "failed", "failed", "invalid_prompt"),
        (Cancelled(by="client"), "incomplete", "cancelled", None),
    ],
)
@pytest.mark.parametrize("begun", [0, 2])
def test_an_end_that_is_none_of_the_models(
    end: Failed | Cancelled, kind: str, status: str, code: str | None, begun: int
) -> None:
    events = events_of(event_of(), [*history("Hello you", None)[:begun], ended(end)])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == (f"response.{kind}", status)
    assert (response["error"] or {}).get("code") == code
    assert (response["usage"], response["completed_at"]) == (None, None)
    assert [(item["status"], item["content"][0]["text"]) for item in response["output"]] == (
        [("incomplete", "Hello ")] if begun else []
    )


def test_a_stream_after_any_number_has_exactly_the_events_behind_it() -> None:
    event, said = event_of(), history(FULL + call_of("patch", '{"input": "a"}'), THINK)
    events = events_of(event, said)

    def rest(after: int) -> Iterator[Json]:
        frames = ResponseFrames(UID, event, ids=True, posted=True, after=after)
        assert frames.done == b""
        return (json.loads(frame.data) for frame in frames_in(b"".join(map(frames.of, said))))

    for after in range(-1, len(events) + 1):
        assert list(rest(after)) == events[after + 1 :]


def test_an_end_that_only_this_process_knows_is_a_failure() -> None:
    fold = frames_of([event_of()])
    frames = frames_in(
        fold.of(history("Hello", None)[0]) + fold.error(RequestError("No.", status=429, code="rate_limit_exceeded"))
    )
    *_, last = (json.loads(frame.data) for frame in frames)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "rate_limit_exceeded")
    assert last["response"]["output"][0]["status"] == "incomplete"
