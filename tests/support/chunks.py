"""Answers without HTTP: made of the events of histories, and their frames and chunks, taken apart as clients do it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from openai.types.chat import ChatCompletionChunk

from pipeline.events import (
    End,
    Finished,
    FinishReason,
    Markup,
    PromptInfo,
    Submitted,
    Timings,
    TokensProduced,
    Usage,
)
from pipeline.names import SEAL
from web.wire.endpoints import body_of, frames_for
from web.wire.frames import ClientEvent, Frames
from web.wire.known import Known
from web.wire.openai.answers import choices_for

UID = f"{5000:012x}" + "7000" + "8" * 16
THINK = Markup(tools="hermes", think=("<think>", "</think>"))


def finished(reason: FinishReason = "stop") -> Finished:
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
    return Finished(n=3, reason=reason, usage=usage, timings=Timings(admitted_ms=1, first_token_ms=2, total_ms=3))


def ended(event: End, index: int = 0) -> ClientEvent:
    return ClientEvent(SEAL, 0, event, index)


def history(
    text: str, markup: Markup | None = THINK, *, reason: FinishReason = "stop", size: int = 3
) -> list[ClientEvent]:
    """Return the events of an answer with *text*, in tokens of *size* characters."""
    parts = [text[place : place + size] for place in range(0, len(text), size)]
    said = [
        ClientEvent(
            f"{n}-0",
            n,
            TokensProduced(
                tokens=(n,),
                text=each,
                step="1-1",
                markup=markup if n == 1 else None,
                prompt=PromptInfo(num_tokens=7, cached_tokens=4) if n == 1 else None,
            ),
        )
        for n, each in enumerate(parts, 1)
    ]
    return [*said, ended(finished(reason))]


def frames_of(events: Sequence[Submitted], uid: str = UID, *, ids: bool = True, known: Known | None = None) -> Frames:
    """Return what makes the frames of a stream."""
    frames = frames_for(uid, list(events), ids=ids, known=known)
    assert frames is not None
    return frames


def answered(events: Sequence[Submitted], given: Iterable[ClientEvent], uid: str = UID) -> bytes:
    """Return the whole answer that is made of the events of histories."""
    choices = choices_for(uid, events)
    for each in given:
        match each.event:
            case TokensProduced() as tokens:
                choices[each.index].apply(tokens)
            case Finished() as end:
                choices[each.index].finish(end)
    return b"".join(body_of(uid, events, choices))


def split(frames: bytes) -> list[bytes]:
    """Return the frames one by one."""
    *each, rest = frames.split(b"\n\n")
    assert rest == b""
    return [frame + b"\n\n" for frame in each]


def documents(frames: bytes) -> list[dict[str, Any]]:
    """Return the JSON of each frame but [DONE], split as line-based clients do it."""
    lines = [line for line in frames.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def put_together(chunks: Sequence[Any], index: int = 0) -> dict[str, Any]:
    """Return the message and the end that a client makes of the chunks of a choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in (each for each in parsed.choices if each.index == index):
            delta = choice.delta.model_dump()
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(message["calls"]) and call.type == "function"
                    assert call.function is not None and call.function.arguments == ""
                    message["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.function is not None and call.function.name is None and call.function.arguments
                    message["calls"][call.index][2] += call.function.arguments
            message["reason"] = choice.finish_reason
    return message
