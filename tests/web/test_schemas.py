"""Bodies of chat requests: what is refused and how, what is neutral, what is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import RequestError
from web.openai.schemas import UNSUPPORTED, ChatRequest, parse_chat
from web.submit import to_submitted

HELLO = [{"role": "user", "content": "hello"}]
SECRET = "a-word-that-must-not-come-back"


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def refusal(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_chat(raw)
    return caught.value


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [SECRET]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": SECRET, "content": "x"}]}, "messages.0.role"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.1.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [SECRET]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": SECRET}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "reasoning_content": SECRET}]}, "messages.0.reasoning_content"),
    ({"prompt": "and messages"}, "prompt"),
    ({"messages": None, "prompt": ""}, "prompt"),
    ({"messages": None, "prompt": ["a", "b"]}, "prompt"),
    ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "true"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"max_tokens": 3.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"stop": ""}, "stop.0"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop_token_ids": ["3"]}, "stop_token_ids.0"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"ignore_eos": "true"}, "ignore_eos"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"n": "1"}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": {SECRET: 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"1.0": 5}}, "logit_bias"),
    ({"logit_bias": {"07": 5}}, "logit_bias"),
    ({"logit_bias": {"9999999999": 5}}, "logit_bias"),
    ({"logit_bias": {"7": 100.5}}, "logit_bias"),
    ({"logit_bias": {"7": "5"}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"logit_bias": [7]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
    ({"allowed_token_ids": 3}, "allowed_token_ids"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": SECRET}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": SECRET}]}, "functions"),
    ({"structured_outputs": {"regex": SECRET}}, "structured_outputs"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"user": 3}, "user"),
    ({"store": "yes"}, "store"),
    ({"metadata": {SECRET: [1]}}, "metadata"),
    ({"metadata": {SECRET: 10**30}}, "metadata"),
    ({"metadata": {SECRET: 2**63}}, "metadata"),
    ({"metadata": {SECRET: -(2**63) - 1}}, "metadata"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{param}-{i}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_field_is_refused_with_its_name_and_without_its_value(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))
    assert (error.status, error.param) == (400, param)
    assert param.split(".")[0] in error.message and SECRET not in error.message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b"[]",
        b"3",
        b'"a"',
    ],
    ids=["empty", "broken", "not utf-8", "lone surrogate", "too deep", "a list", "a number", "a string"],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    error = refusal(raw)
    assert (error.status, error.param, error.code) == (400, None, "invalid_json")


def test_only_the_first_thing_that_is_wrong_is_said() -> None:
    error = refusal(body(messages=[{"role": "x"}] * 10_000))
    assert error.param == "messages.0.role" and len(error.message) < 200


def test_a_refused_feature_says_which_values_are_accepted() -> None:
    assert refusal(body(n=4)).message == "n is not supported with this value; leave it out or send 1"
    assert '{"type":"text"}' in refusal(body(response_format={"type": "json_schema"})).message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_feature_that_we_do_not_have_may_be_sent_with_its_neutral_value(name: str) -> None:
    for neutral in (None, *UNSUPPORTED[name]):
        assert parse_chat(body(**{name: neutral})).unknown == ()


def test_neutral_numbers_are_compared_as_json_numbers() -> None:
    assert parse_chat(body(n=1.0, best_of=1.0, stream_interval=1, top_logprobs=0)).unknown == ()


def test_every_optional_field_takes_null_as_absent() -> None:
    names = set(ChatRequest.model_fields) - {"messages"}
    assert parse_chat(body(**dict.fromkeys(names))) == parse_chat(body())


def test_a_whole_number_is_fine_where_a_float_is_expected() -> None:
    assert parse_chat(body(temperature=1, top_p=1)).temperature == 1.0


def test_unknown_names_are_let_through_and_listed_sorted() -> None:
    message = {"role": "user", "content": "x", "weight": 1}
    asked = parse_chat(body(zeta=1, alpha={"deep": [1]}, messages=[message], stream=True, stream_options={"beta": 1}))
    assert asked.unknown == ("alpha", "messages.weight", "stream_options.beta", "zeta")


def test_labels_are_kept_and_change_nothing() -> None:
    labels = {
        "user": "u",
        "metadata": {"a": "b", "most": 2**63 - 1, "least": -(2**63), "half": 0.5, "yes": True, "none": None},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    event = to_submitted(parse_chat(body(**labels)), frontend="web-0", model="m")
    assert event.labels == labels


def test_text_parts_are_joined_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "user", "content": ""},
    ]
    event = to_submitted(parse_chat(body(messages=messages)), frontend="web-0", model="m")
    assert event.messages == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    )


def test_sampling_is_submitted_as_it_was_asked_for() -> None:
    asked = body(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-5, stop="x", stop_token_ids=[1, 2], ignore_eos=True,
        max_tokens=9, max_completion_tokens=7, min_tokens=2, presence_penalty=1, frequency_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"7": -100, "0": 2.5}, allowed_token_ids=[3, 7],
    )  # fmt: skip
    sampling = to_submitted(parse_chat(asked), frontend="web-0", model="m").sampling
    assert sampling.model_dump() == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "seed": -5,
        "max_tokens": 7,
        "min_tokens": 2,
        "stop": ("x",),
        "stop_token_ids": (1, 2),
        "ignore_eos": True,
        "presence_penalty": 1.0,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": ((7, -100.0), (0, 2.5)),
        "allowed_token_ids": (3, 7),
    }


def test_an_absent_seed_is_drawn_anew_for_each_request() -> None:
    asked = parse_chat(body())
    first, second = (to_submitted(asked, frontend="web-0", model="m").sampling.seed for _ in range(2))
    assert first != second and min(first, second) >= 0


def test_a_prompt_goes_to_the_model_without_a_template() -> None:
    event = to_submitted(parse_chat(json.dumps({"prompt": "Once"}).encode()), frontend="web-0", model="m")
    assert (event.prompt, event.messages, event.sampling.max_tokens) == ("Once", (), None)
