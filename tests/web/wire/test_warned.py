"""What is strange about a request that is taken all the same."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.events import SamplingParams, Submitted
from web.wire.fields import MOST_SHOWN
from web.wire.submit import warnings_of

BOS = "<s>"


def submitted(**fields: Any) -> Submitted:
    return Submitted(endpoint="e", frontend="f", sampling=SamplingParams(), **fields)


def calling(*arguments: str) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_arguments_that_are_no_object_are_named_by_their_path() -> None:
    messages = ({"role": "user", "content": "q"}, calling("{}", '{"city": "Pa', "", "null"), calling("[]"))
    assert warnings_of([submitted(messages=messages)], BOS) == (
        "invalid_arguments=messages.1.tool_calls.1.function.arguments",
        "invalid_arguments=messages.1.tool_calls.3.function.arguments",
        "invalid_arguments=messages.2.tool_calls.0.function.arguments",
    )
    assert len(warnings_of([submitted(messages=(calling(*["Paris"] * 1000),))], BOS)) == MOST_SHOWN


@pytest.mark.parametrize(
    ("fields", "bos", "warned"),
    [
        ({"prompt": "<s>[INST] Hi [/INST]"}, BOS, True),
        ({"prompt": "<s>Hi", "add_special_tokens": True}, BOS, True),
        ({"prompt": "<s>Hi", "add_special_tokens": False}, BOS, False),
        ({"prompt": "Hi <s>"}, BOS, False),
        ({"prompt": "<s>Hi"}, "", False),
        ({"messages": ({"role": "user", "content": "<s>Hi"},)}, BOS, False),
        ({"prompt_ids": (1, 2)}, BOS, False),
    ],
)
def test_a_prompt_that_gets_a_second_first_token_is_warned_of(fields: dict[str, Any], bos: str, warned: bool) -> None:
    events = [submitted(prompt="Hi"), submitted(**fields)]
    assert warnings_of(events, bos) == (("double_bos=prompt",) if warned else ())
