"""OpenAI's library on responses of a model that thinks, with its strict types: reasoning, streamed and sent back."""

from __future__ import annotations

import sys
from typing import Any

from clients.with_openai_responses import client_of, kept, read

COLOURS: Any = {"format": {"type": "json_schema", "name": "colour", "schema": {"enum": ["red", "blue"]}}}
TRIES = 30
"""The model is a random one, so most of its thoughts do not end."""


def main(url: str, model: str) -> None:
    client = client_of(url)
    asked: Any = {"model": model, "input": "Hello", "text": COLOURS, "include": ["reasoning.encrypted_content"]}
    for seed in range(TRIES):
        more: Any = {"max_output_tokens": 300, "extra_body": {"seed": seed}}
        events, response = read(client.responses.create(stream=True, **asked, **more))
        thought = response.output[0]
        assert thought.type == "reasoning" and thought.content and thought.encrypted_content, response
        deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought.content[0].text
        if response.status == "completed":
            break
        assert len(response.output) == 1 and thought.status == "incomplete", response
    assert response.status == "completed" and response.output_text in ('"red"', '"blue"'), response
    assert response.usage and 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    kept(client, response)
    whole = client.responses.create(**asked, **more)
    assert whole.output_text == response.output_text
    assert whole.output[0].to_dict() == thought.to_dict() | {"id": whole.output[0].id}
    user = {"role": "user", "content": "Hello"}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    answer = {"role": "assistant", "content": response.output_text}
    counts = []
    for back in (thought.to_dict(), sealed, {"type": "item_reference", "id": thought.id}):
        turns: Any = [user, back, answer, user]
        again = client.responses.create(model=model, input=turns, max_output_tokens=1)
        (found,) = (item for item in client.responses.input_items.list(again.id) if item.type == "reasoning")
        assert found.content and found.content[0].text == thought.content[0].text, found
        counts.append(again.usage.input_tokens if again.usage else 0)
    assert len(set(counts)) == 1, "the tokens are the same however the thought is sent"


if __name__ == "__main__":
    main(*sys.argv[1:])
