"""The fields about calls of tools and about thinking: what they submit, and what is refused and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.wire import HELLO, chats, refusal

from pipeline.events import Calls, Submitted
from web.wire.openai.schemas import parse_chat

SECRET = "a-word-that-must-not-come-back"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g.h-1")]
FUNCTION = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g.h-1"}}
UNKNOWN = {"type": "function", "function": {"name": SECRET}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def submitted(**fields: Any) -> Submitted:
    return chats(**fields)[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Calls()),
        ({"tool_choice": None}, Calls()),
        ({"tool_choice": "auto"}, Calls()),
        ({"tool_choice": "none"}, Calls(choice="none")),
        ({"tool_choice": "required", "parallel_tool_calls": True}, Calls(choice="required")),
        ({"parallel_tool_calls": False}, Calls(parallel=False)),
        ({"tool_choice": FUNCTION}, Calls(choice="required", names=("f",), parallel=False)),
        ({"tool_choice": allowed("auto", OTHER, FUNCTION, OTHER)}, Calls(names=("g.h-1", "f"))),
        ({"tool_choice": allowed("required", FUNCTION)}, Calls(choice="required", names=("f",))),
        ({"response_format": {"type": "json_object"}}, Calls()),
    ],
)
def test_a_choice_of_tools_is_submitted_as_what_the_answer_may_be(fields: dict[str, Any], expected: Calls) -> None:
    event = submitted(tools=TOOLS, **fields)
    assert (event.calls, event.templating.tools) == (expected, tuple(TOOLS))


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}]
)
def test_without_tools_there_are_no_calls(fields: dict[str, Any]) -> None:
    assert submitted(**fields).calls is None and submitted(tools=[], **fields).calls is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": SECRET}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": SECRET}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": SECRET}}, "tool_choice.function"),
        ({"tool_choice": FUNCTION | allowed("auto", FUNCTION)}, "tool_choice.function"),
        ({"tool_choice": allowed("auto", FUNCTION) | {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}}, "tool_choice.allowed_tools"),
        ({"tool_choice": FUNCTION | allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("none", FUNCTION)}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": UNKNOWN}, "tool_choice.function.name"),
        ({"tool_choice": allowed("auto", FUNCTION, UNKNOWN)}, "tool_choice.allowed_tools.tools.1.function.name"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": FUNCTION, "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": FUNCTION, "regex": SECRET}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools.2.function.name"),
        ({"tools": [FUNCTION | {"function": {"name": "f()"}}]}, "tools.0.function.name"),
        ({"messages": None, "prompt": SECRET}, "tools"),
        ({"messages": None, "prompt": SECRET, "tools": None, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": None, "prompt": SECRET, "tools": None, "thinking_budget": 0}, "thinking_budget"),
        ({"reasoning_effort": SECRET}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"thinking_token_budget": 5, "reasoning_budget": 6}, "reasoning_budget"),
        ({"include_reasoning": 0}, "include_reasoning"),
        ({"include_reasoning": False, "separate_reasoning": False}, "include_reasoning"),
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
        ({"separate_reasoning": True, "reasoning_format": "none"}, "reasoning_format"),
        ({"separate_reasoning": False, "reasoning_format": "deepseek"}, "reasoning_format"),
        ({"stream_reasoning": False}, "stream_reasoning"),
        ({"parse_tool_calls": False}, "parse_tool_calls"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens"),
    ],
)
def test_what_contradicts_or_does_not_exist_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(parse_chat, {"messages": HELLO, "tools": TOOLS, **fields})
    assert (error.status, error.param) == (400, param)
    assert error.code in ("invalid_value", "unsupported_parameter")
    assert param in error.message and SECRET not in error.message


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "none", "enable_thinking": True}, {"reasoning_effort": "none", "enable_thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {
                "reasoning_effort": "none",
                "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": 3, "x": 1},
            },
            {"enable_thinking": True, "reasoning_effort": 3, "x": 1},
        ),
    ],
)
def test_what_is_said_about_thinking_becomes_variables_of_the_template(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert submitted(**fields).templating.variables == variables


@pytest.mark.parametrize(
    "name", ["thinking_token_budget", "thinking_budget", "reasoning_budget", "reasoning_budget_tokens"]
)
def test_a_budget_of_thinking_has_the_names_of_other_servers(name: str) -> None:
    assert [submitted(**{name: budget}).thinking_budget for budget in (None, -1, 0, 16)] == [None, None, 0, 16]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "apart"),
        ({"include_reasoning": True, "separate_reasoning": True, "reasoning_format": "auto"}, "apart"),
        ({"reasoning_format": "deepseek"}, "apart"),
        ({"include_reasoning": False}, "hidden"),
        ({"separate_reasoning": False}, "inline"),
        ({"reasoning_format": "none"}, "inline"),
    ],
)
def test_reasoning_is_shown_as_the_client_wants_it(fields: dict[str, Any], shown: str) -> None:
    assert submitted(**fields).presentation.reasoning == shown


def test_unknown_members_are_named() -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": {**FUNCTION, "weight": 1}}
    assert parse_chat(json.dumps(asked).encode()).unknown == ("tool_choice.weight",)
