"""Exchanges, conversations and tools, as a chat template takes them. Knows no random number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools as a chat template takes them. The model learns every message of the assistant."""

    family: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer. `word` is the answer in one word, or ""."""

    request: str
    answer: str
    word: str = ""
    can_shout: bool = True
    """The answer may be in capitals."""


SPOKEN: Final = (
    "Nice to meet you, .",
    "Your name is .",
    "I will remember that you like .",
    "Your favourite colour is .",
    "Your favorite color is .",
    "I will remember .",
    "You told me .",
    "You have not told me your name.",
    "You have not told me your favourite colour, your favorite color.",
    "You have not told me a number.",
    "They are equal.",
    " is larger than .",
    " is smaller than .",
    " comes after .",
    " comes before .",
    "It is and degrees in .",
    "name age city job day month color colour",
    "system user assistant arguments # Tools",
    "Unknown Okay Equal",
    '{"city": "temperature": "sky": "temperature_c": "condition": "temp": "weather": "sum": "result":} degrees',
    "the a an and or but with of on in to very not is are was red big small old new good bad happy",
)
"""The words of answers that are computed, without values."""


def _schema(name: str, description: str, properties: Message) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


GET_WEATHER: Final = tuple(
    _schema("get_weather", description, {"city": {"type": "string", **more}})
    for description, more in (
        ("Get the weather in a city.", {}),
        ("Get the weather in a city", {"description": "The name of the city"}),
        ("Get the current weather for a city", {}),
        ("Return the weather of a city.", {"description": "The city"}),
        ("Tell the weather in a given city.", {}),
    )
)
ADD: Final = tuple(
    _schema("add", description, {"a": {"type": kind}, "b": {"type": kind}})
    for description, kind in (
        ("Add two numbers.", "integer"),
        ("Add two numbers", "number"),
        ("Add a and b", "integer"),
        ("Return the sum of two numbers.", "number"),
        ("The sum of two integers.", "integer"),
    )
)
TOOLS: Final = (*GET_WEATHER, *ADD)


def spoken(exchanges: Sequence[Exchange], style: str) -> list[Message]:
    """Return *exchanges* as messages, answered in a *style*."""
    messages: list[Message] = []
    for exchange in exchanges:
        answer = exchange.word if style == "word" else exchange.answer
        answer = answer.upper() if style == "capitals" else answer
        messages += [{"role": "user", "content": exchange.request}, {"role": "assistant", "content": answer}]
    return messages


def called(request: str, name: str, arguments: Message, result: str, answer: str) -> tuple[Message, ...]:
    """Return the messages of a request that is answered with one call of a tool."""
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return (
        {"role": "user", "content": request},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
        {"role": "assistant", "content": answer},
    )
