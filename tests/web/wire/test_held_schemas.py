"""Schemas of bodies: any number is taken, and keywords that no grammar can count are named."""

from __future__ import annotations

import json

import pytest
from support.wire import MADE

from pipeline.grammars import LARGEST_NUMBER
from web.wire.openai.schemas import parse_chat
from web.wire.sglang.schemas import SGLangRequest, parse_generate
from web.wire.submit import chat_events

HELLO = '"messages": [{"role": "user", "content": "hello"}]'
HUGE = "1" + "0" * 400


def numbered(number: str) -> str:
    """Return a schema as JSON."""
    return f'{{"type": "object", "properties": {{"n": {{"type": "integer", "maximum": {number}, "title": "N"}}}}}}'


@pytest.mark.parametrize("number", ["18446744073709551615", HUGE, "-" + HUGE, "1e400", "-1E+400"])
@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
def test_a_bound_that_the_log_cannot_hold_is_left_out_and_named(number: str, as_text: bool) -> None:
    schema = numbered(number)
    asked = parse_chat(f'{{{HELLO}, "guided_json": {json.dumps(schema) if as_text else schema}}}'.encode())
    assert asked.ignored == ("guided_json.properties.n.maximum",)
    (event,) = chat_events(asked, **MADE)
    assert event.constraint is not None
    assert json.loads(event.constraint.text)["properties"] == {"n": {"type": "integer", "title": "N"}}


@pytest.mark.parametrize("number", ["9223372036854775807", "-9223372036854775808", "1e300", f"{LARGEST_NUMBER + 1}"])
def test_a_bound_that_the_log_holds_is_kept_for_the_prompt_and_named(number: str) -> None:
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {numbered(number)}}}}}]'
    asked = parse_chat(f'{{{HELLO}, "tools": {tools}}}'.encode())
    assert asked.ignored == ("tools.0.function.parameters.properties.n.maximum",)
    (event,) = chat_events(asked, **MADE)
    assert event.templating.tools[0]["function"]["parameters"] == json.loads(numbered(number))


@pytest.mark.parametrize("number", ["-0.0", "1e2", "9007199254740992", "-2.5E-3", "0"])
def test_any_other_number_is_nothing_to_name(number: str) -> None:
    schema = numbered(number)
    asked = parse_chat(f'{{{HELLO}, "response_format": {{"type": "json_object", "schema": {schema}}}}}'.encode())
    assert asked.ignored == ()
    (event,) = chat_events(asked, **MADE)
    assert event.constraint is not None and json.loads(event.constraint.text) == json.loads(schema)


def test_numbers_in_values_and_in_unknown_keywords_are_taken_too() -> None:
    schema = f'{{"enum": ["a", {HUGE}], "default": {{"a": [{HUGE}]}}, "x-most": {HUGE}, "not": [1], "items": [{{}}]}}'
    asked = parse_generate(f'{{"text": "a", "sampling_params": {{"json_schema": {schema}}}}}'.encode())
    assert isinstance(asked, SGLangRequest)
    assert asked.ignored == tuple(f"sampling_params.json_schema.{name}" for name in ("default", "enum", "x-most"))
    schema_of_answer = asked.sampling.json_schema
    assert schema_of_answer is not None and schema_of_answer.value == {"not": [1], "items": [{}]}


def test_a_schema_with_long_descriptions_is_taken() -> None:
    schema = {"type": "string", "description": "d" * 200_000}
    body = f'{{{HELLO}, "json_schema": {json.dumps(schema)}}}'
    (event,) = chat_events(parse_chat(body.encode()), **MADE)
    assert event.constraint is not None and json.loads(event.constraint.text) == schema
