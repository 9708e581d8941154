"""Random conversations, and how clients of three dialects write each: OpenAI's chats, Anthropic's Messages, OpenAI's
Responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from web.wire.signatures import signature_of

SCHEMA = {"type": "object", "properties": {"n": {}}}
NAMES = ("find", "deep__look")
"""Names of tools, as the model knows them. The second one may be in a namespace."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and what comes of it."""

    said: str
    thought: str
    answer: str
    calls: Sequence[tuple[str, str, Json]]
    """The id, the name and the arguments of each."""
    results: Sequence[str]
    told: str
    """A system text after it; "": none."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation. It ends with the user."""

    system: str
    """The system text at its begin; "": none."""
    turns: Sequence[Turn]


_texts = st.text(max_size=12)
_systems = _texts.filter(lambda text: not text.startswith("x-anth"))


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Draw a conversation."""
    turns = []
    for turn in range(draw(st.integers(1, 4))):
        calls = [
            (f"c{turn}.{n}", draw(st.sampled_from(NAMES)), {"n": draw(_texts)}) for n in range(draw(st.integers(0, 2)))
        ]
        results = [draw(_texts) for _ in calls]
        turns.append(Turn(draw(_texts), draw(_texts), draw(_texts), calls, results, draw(_systems)))
    return Talk(draw(_systems), turns)


def _arguments(given: Json) -> str:
    return json.dumps(given, ensure_ascii=False)


def as_chat(talk: Talk) -> Json:
    """Return the body of a chat."""
    messages: list[Json] = [{"role": "system", "content": talk.system}] if talk.system else []
    for turn in talk.turns:
        answer: Json = {"role": "assistant", "content": turn.answer}
        if turn.thought:
            answer["reasoning_content"] = turn.thought
        if turn.calls:
            answer["tool_calls"] = [
                {"id": at, "type": "function", "function": {"name": name, "arguments": _arguments(given)}}
                for at, name, given in turn.calls
            ]
        messages += [{"role": "user", "content": turn.said}, answer]
        for (at, *_), result in zip(turn.calls, turn.results, strict=True):
            messages.append({"role": "tool", "tool_call_id": at, "content": result})
        messages += [{"role": "system", "content": turn.told}] if turn.told else []
    functions = [{"name": name, "description": "Finds.", "parameters": SCHEMA} for name in NAMES]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"messages": [*messages, {"role": "user", "content": "On"}], "tools": tools}


def as_messages(talk: Talk) -> Json:
    """Return the body of /v1/messages."""
    messages: list[Json] = []
    for turn in talk.turns:
        blocks: list[Json] = [{"type": "text", "text": turn.answer}]
        if turn.thought:
            blocks.insert(0, {"type": "thinking", "thinking": turn.thought, "signature": ""})
        blocks += [{"type": "tool_use", "id": at, "name": name, "input": given} for at, name, given in turn.calls]
        messages += [{"role": "user", "content": turn.said}, {"role": "assistant", "content": blocks}]
        results = [
            {"type": "tool_result", "tool_use_id": at, "content": result}
            for (at, *_), result in zip(turn.calls, turn.results, strict=True)
        ]
        messages += [{"role": "user", "content": results}] if results else []
        messages += [{"role": "system", "content": turn.told}] if turn.told else []
    tools = [{"name": name, "description": "Finds.", "input_schema": SCHEMA} for name in NAMES]
    body: Json = {"max_tokens": 9, "thinking": {"type": "adaptive"}, "tools": tools}
    body |= {"system": talk.system} if talk.system else {}
    return body | {"messages": [*messages, {"role": "user", "content": "On"}]}


def as_items(talk: Talk, flips: Callable[[], bool]) -> Json:
    """Return the body of /v1/responses. *flips* decides between two spellings of the same, again and again."""

    def text(said: str, kind: str = "input_text") -> Any:
        return said if flips() else [{"type": kind, "text": said}]

    def tool(name: str) -> Json:
        space, _, own = name.rpartition("__")
        return {"namespace": space, "name": own} if space and flips() else {"name": name}

    def system(said: str) -> Json:
        return {"role": "system" if flips() else "developer", "content": text(said)}

    first = bool(talk.system) and flips()
    items = [system(talk.system)] if talk.system and not first else []
    for turn in talk.turns:
        items.append({"role": "user", "content": text(turn.said)})
        if turn.thought and flips():
            items.append({"type": "reasoning", "content": text(turn.thought, "reasoning_text"), "summary": []})
        elif turn.thought:
            items.append({"type": "reasoning", "encrypted_content": signature_of(turn.thought), "summary": []})
        items.append({"type": "message", "role": "assistant", "content": text(turn.answer, "output_text")})
        for at, name, given in turn.calls:
            items.append({"type": "function_call", "call_id": at, **tool(name), "arguments": _arguments(given)})
        for (at, *_), result in zip(turn.calls, turn.results, strict=True):
            items.append({"type": "function_call_output", "call_id": at, "output": text(result)})
        items += [system(turn.told)] if turn.told else []
    tools: list[Json] = [
        {"type": "function", "name": name, "description": "Finds.", "parameters": SCHEMA} for name in NAMES
    ]
    if flips():
        tools[1] = {"type": "namespace", "name": "deep", "tools": [{**tools[1], "name": "look"}]}
    body: Json = {"instructions": talk.system} if first else {}
    return body | {"input": [*items, {"role": "user", "content": text("On")}], "tools": tools}
