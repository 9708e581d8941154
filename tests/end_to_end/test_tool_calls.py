"""The demo model calls tools whose names it has never met; OpenAI's client reads the calls, streamed and whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

import jsonschema
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
from support.selection import by_night
from support.servers import ROOT, Server

from ops.demo_model.corpus import Maker
from ops.demo_model.messages import Message
from ops.demo_model.renamed import Tool, letters_of
from ops.demo_model.wordings import is_held_out

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo_server")]

NUM_QUESTIONS: Final = by_night(4, 200)
MOST_WRONG: Final = by_night(1, 4)
"""Questions that may get a wrong answer: 2 % at night. One of ten says little by day."""
AT_ONCE: Final = 16
Call = tuple[str, dict[str, Any]]
"""The name of a tool, and the arguments."""
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A held-out question for one of two tools whose names are held out."""

    tools: tuple[Tool, ...]
    asked: Message
    call: Call
    result: str
    answer: str

    @property
    def body(self) -> dict[str, Any]:
        tools = [tool.declared for tool in self.tools]
        return {"model": "default", "messages": [self.asked], "tools": tools, "temperature": 0, "max_tokens": 150}


def held_out_questions(number: int) -> Iterator[Question]:
    maker = Maker(Random("tool calls"), held_out=True)
    for _ in range(number):
        tools = maker.declared(both=True, renamed=True)
        asked, called, result, answer = maker.call(tools[maker.chance(0, 1)])
        function = called["tool_calls"][0]["function"]
        assert all(is_held_out(letters_of(tool.name)) for tool in tools)
        yield Question(tools, asked, (function["name"], function["arguments"]), result["content"], answer["content"])


QUESTIONS: Final = list(held_out_questions(NUM_QUESTIONS))


@pytest.fixture(scope="module")
def client(demo_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def for_each(do: Callable[[Question], T]) -> list[T]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(do, QUESTIONS))


def whole(client: OpenAI, question: Question, **fields: Any) -> ChatCompletionMessage:
    """Return the message that answers *question*; it has calls alone, or text alone, unless it is cut off."""
    (choice,) = client.chat.completions.create(**question.body, **fields).choices
    message: ChatCompletionMessage = choice.message
    if choice.finish_reason == "length":
        return message.model_copy(update={"tool_calls": None})
    assert (choice.finish_reason == "tool_calls") is bool(message.tool_calls), choice
    assert bool(message.tool_calls) is not bool(message.content), choice
    return message


def calls_in(message: ChatCompletionMessage) -> list[Call]:
    calls = [(call.id, call.function) for call in message.tool_calls or () if call.type == "function"]
    assert len({call_id for call_id, _ in calls}) == len(calls)
    return [(function.name, json.loads(function.arguments)) for _, function in calls]


def streamed(client: OpenAI, question: Question) -> list[Call]:
    """Return the calls of a streamed answer. A delta begins a call with its name, or has more of its arguments."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reasons = []
    for chunk in client.chat.completions.create(**question.body, stream=True):
        (choice,) = chunk.choices
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.index not in names:
                assert delta.id and delta.type == "function" and delta.function.arguments == ""
                names[delta.index], arguments[delta.index] = str(delta.function.name), ""
            else:
                assert (delta.id, delta.type, delta.function.name) == (None, None, None)
                arguments[delta.index] += delta.function.arguments or ""
    if reasons == ["length"]:
        return []
    assert (reasons == ["tool_calls"]) is bool(names) and len(reasons) == 1, reasons
    return [(name, json.loads(arguments[index])) for index, name in names.items()]


def assert_most_are_right(found: Sequence[object], expected: Sequence[object]) -> None:
    wrong = [(each, right) for each, right in zip(found, expected, strict=True) if each != right]
    assert len(wrong) <= MOST_WRONG, wrong


def test_held_out_questions_get_the_right_call_of_a_tool_with_a_held_out_name(client: OpenAI) -> None:
    found = for_each(lambda question: calls_in(whole(client, question)))
    assert_most_are_right(found, [[question.call] for question in QUESTIONS])
    assert for_each(lambda question: streamed(client, question)) == found


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_that_is_required_is_one_of_a_declared_tool_and_valid_by_its_schema(client: OpenAI, choice: str) -> None:
    def called(question: Question) -> list[Call]:
        named = {"type": "function", "function": {"name": question.call[0]}}
        return calls_in(whole(client, question, tool_choice=named if choice == "named" else choice))

    found = for_each(called)
    for question, calls in zip(QUESTIONS, found, strict=True):
        schemas = {tool.name: tool.declared["function"]["parameters"] for tool in question.tools}
        assert calls
        for name, arguments in calls:
            assert choice != "named" or name == question.call[0]
            jsonschema.validate(arguments, schemas[name])
    assert_most_are_right(found, [[question.call] for question in QUESTIONS])


def test_a_greeting_is_answered_with_a_call_only_if_one_is_required(client: OpenAI) -> None:
    question = QUESTIONS[0]
    greeting = Question(question.tools, {"role": "user", "content": "Good morning!"}, question.call, "", "")
    for choice in ("auto", "none"):
        message = whole(client, greeting, tool_choice=choice)
        assert (message.content, message.tool_calls) == ("Hello! How can I help you?", None)
    ((name, arguments),) = calls_in(whole(client, greeting, tool_choice="required", parallel_tool_calls=False))
    (tool,) = (tool for tool in question.tools if tool.name == name)
    jsonschema.validate(arguments, tool.declared["function"]["parameters"])


def test_the_result_of_a_call_becomes_the_answer(client: OpenAI) -> None:
    def answer(question: Question) -> str:
        message = whole(client, question)
        if not message.tool_calls:
            return "no call"
        told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": question.result}
        body = question.body | {"messages": [question.asked, message.model_dump(exclude_none=True), told]}
        (choice,) = client.chat.completions.create(**body).choices
        return str(choice.message.content)

    assert_most_are_right(for_each(answer), [question.answer for question in QUESTIONS])


def test_the_example_of_the_documentation_prints_what_is_below_it(
    demo_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    program, printed = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "docs/tools.md").read_text(), re.DOTALL | re.MULTILINE)
    assert program.count("http://127.0.0.1:1919") == 1
    exec(compile(program.replace("http://127.0.0.1:1919", demo_server.url), "tools.md", "exec"), {})
    assert capsys.readouterr().out == printed
