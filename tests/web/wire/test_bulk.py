"""How much a JSON text holds is counted without parsing it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire import refusal

from web.wire.openai.bulk import MOST_VALUES, Bulk, bulk_of, refuse_bulk
from web.wire.openai.messages import MOST_CALLS, MOST_IN_ARGUMENTS, MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from web.wire.openai.schemas import parse_chat, parse_completion

TEXTS = st.text(alphabet='ab,[]{}:"\\\n/u0é\U0001f600')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)
USER = b'{"messages":[{"role":"user","content":"Hi"}],'


def held_by(value: Any) -> Bulk:
    """Count by walking over the value; `bulk_of` counts one value too many for each object or list in another."""
    if isinstance(value, dict):
        parts = [held_by(each) for each in value.values()] + [Bulk(0, 1)] * len(value)
    elif isinstance(value, list):
        parts = [held_by(each) for each in value]
    else:
        return Bulk(1, int(isinstance(value, str)))
    return Bulk(1 + sum(part.values for part in parts), 1 + sum(part.large for part in parts))


@given(VALUES, st.booleans())
def test_the_count_is_that_of_the_values_whatever_texts_hold(value: Any, ascii_alone: bool) -> None:
    counted, held = bulk_of(json.dumps(value, ensure_ascii=ascii_alone).encode()), held_by(value)
    assert counted.large == held.large
    assert held.values <= counted.values <= held.values + held.large


@pytest.mark.parametrize("unit", [b"1", b"[]", b"{}", b'""', b'{"a":[1]}', b'"\\"\\\\"', b"["])
def test_a_body_with_more_values_than_are_parsed_in_a_short_time_is_refused(unit: bytes) -> None:
    error = refusal(parse_chat, USER + b'"x":[' + b",".join([unit] * (MOST_VALUES + 1)) + b"]}")
    assert (error.status, error.code, error.param) == (400, "too_many_values", None)


@pytest.mark.parametrize("text", [b"[1],", b'\\"', b'\\\\\\",{', b"\\\\", b'{\\"a\\":[1,2]},'])
def test_what_a_long_text_says_does_not_count(text: bytes) -> None:
    long = text * (MOST_VALUES + 1)
    refuse_bulk(long_prompt := b'{"prompt":"' + long + b'"}')
    assert parse_chat(long_prompt).prompt == json.loads(b'"' + long + b'"')


def test_a_prompt_of_many_token_ids_is_taken() -> None:
    body = b'{"prompt":[' + b",".join([b"12345"] * (MOST_VALUES - 16)) + b"]}"
    assert len(parse_completion(body).prompts[0]) == MOST_VALUES - 16


def test_of_many_wrong_items_only_the_first_is_looked_at() -> None:
    error = refusal(parse_chat, b'{"messages":[' + b"1," * (MOST_VALUES // 2) + b"1]}")
    assert error.param == "messages.0"


CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":"%s"}}'
ASSISTANT = '{"role":"assistant","tool_calls":[%s]}'
TOOL = '{"type":"function","function":{"name":"f"}}'
PART = '{"type":"text","text":"a"}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"messages":[' + ",".join(['{"role":"user","content":"a"}'] * (MOST_MESSAGES + 1)) + "]", "messages"),
        ('"messages":[{"role":"user","content":[' + ",".join([PART] * (MOST_PARTS + 1)) + "]}]", "messages.0.content"),
        (
            '"messages":[' + ASSISTANT % ",".join([CALL % "{}"] * (MOST_CALLS + 1)) + "]",
            "messages.0.tool_calls",
        ),
        ('"prompt":"a","tools":[' + ",".join([TOOL] * (MOST_TOOLS + 1)) + "]", "tools"),
        ('"prompt":"a","logit_bias":{' + ",".join(f'"a{i}":1' for i in range(1025)) + "}", "logit_bias"),
        ('"prompt":"a","metadata":{' + ",".join(f'"a{i}":[]' for i in range(1025)) + "}", "metadata"),
        ('"prompt":"a","stop":[' + ",".join(['"a"'] * 129) + "]", "stop"),
        ('"messages":[{"role":"user","content":"a","name":"' + "x" * 1025 + '"}]', "messages.0.name"),
        (
            '"messages":[' + ASSISTANT % (CALL % ("[" + "1," * MOST_IN_ARGUMENTS + "1]")) + "]",
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
    ids=lambda value: value if len(value) < 100 else "",
)
def test_every_list_has_a_largest_length_and_its_error_names_the_field(fields: str, param: str) -> None:
    error = refusal(parse_chat, f"{{{fields}}}".encode())
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)
    assert "at most" in error.message or "more than" in error.message


def test_arguments_of_many_calls_count_together() -> None:
    call = CALL % ('{\\"a\\":[' + "1," * 100 + "1]}")
    messages = ",".join([ASSISTANT % ",".join([call] * 500)] * 3)
    error = refusal(parse_chat, f'{{"messages":[{messages}]}}'.encode())
    assert error.param is not None and error.param.startswith("messages.1.tool_calls.")


def test_many_answers_share_all_of_a_large_body_but_how_they_are_sampled() -> None:
    def body(field: str, value: object) -> bytes:
        return json.dumps({"prompt": ["a"] * 1000, field: value}).encode()

    assert len(parse_completion(body("user", "x" * 60_000)).prompts) == 1000
    error = refusal(parse_completion, body("stop", ["x" * 1000] * 9))
    assert error.param == "prompt" and "`stop`" in error.message
    assert len(parse_completion(body("stop", ["x" * 1000] * 7)).prompts) == 1000
    error = refusal(parse_chat, {"prompt": "Hi", "n": 128, "bad_words": ["x" * 256] * 256})
    assert error.param == "n" and "send fewer" in error.message
