"""The table of fields is complete, and the values that a row refuses are refused. Its effects: end_to_end."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from support.fields import FIELDS, Field
from support.wire import HELLO, refusal

from pipeline.events import SamplingParams
from web.wire.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest, parse_chat, parse_completion
from web.wire.sglang.schemas import parse_generate

NAMES = [one.name for one in FIELDS]
SHOWN_TWICE = {one.name for one in FIELDS if one.completions and NAMES.count(one.name) > 1}


def test_every_field_that_changes_the_tokens_has_a_row() -> None:
    assert set(SamplingParams.model_fields) <= set(NAMES)


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_every_field_of_a_request_has_a_row(model: type[GenerationRequest]) -> None:
    no_rows = {"model", "messages", "prompt", "best_of"}  # what is asked, of whom; and what must be `n`
    rows = {
        one.name for one in FIELDS if one.completions is (model is CompletionRequest) or one.name not in SHOWN_TWICE
    }
    assert set(model.model_fields) - no_rows <= rows


def test_no_row_is_of_a_field_that_there_is_not() -> None:
    assert set(NAMES) <= set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)


def test_a_minimum_above_the_limit_says_which_field_to_raise() -> None:
    def refused(parse: Callable[[bytes], object], **asked: object) -> str:
        return refusal(parse, asked).message

    chat = functools.partial(refused, parse_chat, messages=HELLO, min_tokens=50)
    assert "50" in chat(max_tokens=5) and "max_tokens (5)" in chat(max_tokens=5)
    expected = "min_tokens: 50 is above max_completion_tokens (4); raise max_completion_tokens"
    assert chat(max_tokens=60, max_completion_tokens=4) == expected
    expected = "min_tokens: 50 is above max_tokens (16); raise max_tokens"
    assert refused(parse_completion, prompt="Hello!", min_tokens=50) == expected
    expected = "sampling_params.min_new_tokens: 129 is above max_new_tokens (128); raise max_new_tokens"
    assert refused(parse_generate, text="Hello!", sampling_params={"min_new_tokens": 129}) == expected


@pytest.mark.parametrize("row", FIELDS, ids=NAMES)
def test_what_a_field_does_not_take_is_refused_by_its_name(row: Field) -> None:
    if row.completions:
        error = refusal(parse_completion, {"prompt": "Hello!", row.name: row.refused})
    else:
        error = refusal(parse_chat, {"messages": HELLO, row.name: row.refused})
    assert error.status == 400 and (error.param or "").split(".")[0] == row.name
