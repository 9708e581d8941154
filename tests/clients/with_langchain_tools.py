"""LangChain's `bind_tools` and `with_structured_output`: call, result and answer, streamed and forced."""

from __future__ import annotations

import sys
from typing import Annotated

from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]


def city_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"{city.upper()}: sunny, 21 degrees"


def sum_of(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Person(BaseModel):
    """A person."""

    name: Annotated[str, Field(max_length=12)]
    age: int


class Weather(BaseModel):
    """Get the weather in a city."""

    city: str


chat = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=64, max_retries=0)
tools = {"city_weather": tool(city_weather), "sum_of": tool(sum_of)}
bound = chat.bind_tools(list(tools.values()))

for question, name, arguments, answer in (
    ("What is the weather in Paris?", "city_weather", {"city": "Paris"}, "It is sunny and 21 degrees in Paris."),
    ("What is 17 plus 25?", "sum_of", {"a": 17, "b": 25}, "17 + 25 = 42"),
):
    conversation: list[BaseMessage] = [HumanMessage(question)]
    whole = bound.invoke(conversation)
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == (name, arguments), whole
    assert whole.response_metadata["finish_reason"] == "tool_calls" and not whole.content, whole
    summed: AIMessageChunk | None = None
    for chunk in bound.stream(conversation):
        assert isinstance(chunk, AIMessageChunk)
        summed = chunk if summed is None else summed + chunk
    assert summed is not None and [(each["name"], each["args"]) for each in summed.tool_calls] == [(name, arguments)]
    result = tools[call["name"]].invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*conversation, whole, result]).content == answer

for choice in ("any", "city_weather"):
    forced = chat.bind_tools(list(tools.values()), tool_choice=choice).invoke("Good morning!")
    assert forced.tool_calls and not forced.invalid_tool_calls, forced
    assert choice == "any" or {call["name"] for call in forced.tool_calls} == {choice}
assert bound.invoke("Good morning!").content and not bound.invoke("Good morning!").tool_calls

for method, schema, question, expected in (
    ("json_schema", Person, "Write JSON for Ada, 42 years old.", Person(name="Ada", age=42)),
    ("function_calling", Weather, "What is the weather in Paris?", Weather(city="Paris")),
):
    found = chat.with_structured_output(schema, method=method).invoke(question)
    assert found == expected, (method, found)
