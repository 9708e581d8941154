"""OpenAI's library on responses, with its strict types: streams, chains of tools, the background, what is stored."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

EVENTS: Any = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
QUESTION = "What is the weather in Paris?"
ENDLESS: Any = {"format": {"type": "json_schema", "name": "long", "schema": {"type": "string", "minLength": 3000}}}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def client_of(url: str) -> OpenAI:
    """Return a client that refuses an answer which is not of its types."""
    return OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True)


def read(stream: Any) -> tuple[list[dict[str, Any]], Response]:
    """Return the events of a stream, each of the library's types and with its number, and the response in the last."""
    events = list(stream)
    plain = [event.to_dict() for event in events]
    for event in plain:
        EVENTS.validate_python(event, strict=True)
    first = plain[0]["sequence_number"]
    assert [event["sequence_number"] for event in plain] == list(range(first, first + len(plain)))
    return plain, events[-1].response


def kept(client: OpenAI, response: Response) -> None:
    """Check that a response is stored as it was told."""
    stored = client.responses.retrieve(response.id).to_dict()
    assert stored.pop("expires_at") and stored == response.to_dict(), (stored, response)


def tools(client: OpenAI, asked: dict[str, Any]) -> None:
    """Call a tool and go on from the response that asked for it."""
    events, first = read(client.responses.create(input=QUESTION, tools=[WEATHER], stream=True, **asked))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    (call,) = first.output
    assert call.type == "function_call" and call.arguments == '{"city": "Paris"}', first
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 1 and "".join(deltas) == call.arguments
    kept(client, first)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 20 degrees"}
    answer = client.responses.create(input=[result], previous_response_id=first.id, tools=[WEATHER], **asked)
    assert "sunny" in answer.output_text and answer.previous_response_id == first.id, answer
    usage = answer.usage
    assert usage and usage.input_tokens_details.cached_tokens, "the first response is in the prefix cache"
    pages = client.responses.input_items.list(answer.id, order="asc", limit=2)
    assert pages.has_more and [item.type for item in pages] == ["message", "function_call", "function_call_output"]
    turns: Any = [{"role": "user", "content": QUESTION}, *first.output, result]
    assert client.responses.create(input=turns, tools=[WEATHER], **asked).output_text == answer.output_text
    kept(client, answer)


def texts(client: OpenAI, asked: dict[str, Any]) -> None:
    """Stream a text with the library's own accumulation, and get one of a type."""
    with client.responses.stream(input="Hello", **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text != ""
    whole = client.responses.create(input="Hello", **asked)
    assert whole.output_text == text and whole.status == "completed"
    _, cut = read(client.responses.create(input="Hello", stream=True, **asked | {"max_output_tokens": 2}))
    assert cut.status == "incomplete" and cut.to_dict()["incomplete_details"] == {"reason": "max_output_tokens"}
    parsed = client.responses.parse(input="Write JSON for Ada, 42 years old.", text_format=Person, **asked)
    assert parsed.output_parsed == Person(name="Ada", age=42), parsed


def background(client: OpenAI, asked: dict[str, Any]) -> None:
    """Read a response of the background from any event on, stop one, and delete it."""
    begun = client.responses.create(input=QUESTION, background=True, **asked)
    assert begun.background and begun.status in ("queued", "in_progress")
    events, ended = read(client.responses.retrieve(begun.id, stream=True))
    assert ended.status == "completed" and ended.output_text
    assert read(client.responses.retrieve(begun.id, stream=True, starting_after=4))[0] == events[5:]
    kept(client, ended)
    stream = client.responses.create(input="Hello", background=True, stream=True, text=ENDLESS, **asked)
    uid = next(event.response.id for event in stream if event.type == "response.created")
    stream.close()
    assert client.responses.retrieve(uid).status in ("queued", "in_progress"), "it goes on without its reader"
    assert client.responses.cancel(uid).status == "cancelled"
    assert read(client.responses.retrieve(uid, stream=True))[1].status == "cancelled"
    client.responses.delete(uid)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(uid)


def main(url: str, model: str) -> None:
    client = client_of(url)
    asked = {"model": model, "temperature": 0, "max_output_tokens": 1500}
    tools(client, asked)
    texts(client, asked)
    background(client, asked)


if __name__ == "__main__":
    main(*sys.argv[1:])
