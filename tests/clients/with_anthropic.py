"""Anthropic's library, with its strict types: streams of text and calls, results of tools, counts and errors."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import pytest

WEATHER: Any = {
    "name": "get_weather",
    "description": "Tells the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}


def main(url: str, model: str) -> None:
    client = anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, _strict_response_validation=True
    )
    asked: Any = {"model": model, "max_tokens": 200, "tools": [WEATHER], "extra_body": {"temperature": 0}}
    with client.messages.stream(messages=[QUESTION], **asked) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert kinds >= {"message_start", "content_block_start", "input_json", "message_stop"}, kinds
    (call,) = message.content
    assert call.type == "tool_use" and call.input == {"city": "Paris"} and message.stop_reason == "tool_use", message
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 20 degrees"}
    turns: list[Any] = [
        QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=turns, **asked)
    (text,) = answer.content
    assert text.type == "text" and "sunny" in text.text and answer.stop_reason == "end_turn", answer
    assert answer.usage.cache_read_input_tokens, "the first turn is in the prefix cache"
    count = client.messages.count_tokens(model=model, messages=turns, tools=[WEATHER])
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum") as refused:
        client.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": "word " * 70_000}])
    assert refused.value.request_id


if __name__ == "__main__":
    main(*sys.argv[1:])
