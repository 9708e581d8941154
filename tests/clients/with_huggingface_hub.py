"""huggingface_hub's InferenceClient, without a model name: chat, streams, tools, schemas and errors."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

URL, MODEL = sys.argv[1:]
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 64}
FUNCTION = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


client: Any = InferenceClient(base_url=URL, api_key="none")
question = user("What is 17 plus 25?")
whole = client.chat_completion(question, **ASKED)
said = whole.choices[0].message.content
assert said and whole.model == MODEL and whole.usage.completion_tokens > 0, whole
chunks = list(client.chat_completion(question, stream=True, stream_options={"include_usage": True}, **ASKED))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
assert client.chat.completions.create(messages=question, **ASKED).choices[0].message.content == said

told = client.chat_completion(question, logprobs=True, top_logprobs=2, n=2, **{**ASKED, "temperature": 1, "seed": 1})
assert [choice.index for choice in told.choices] == [0, 1]
assert len(told.choices[0].logprobs.content[0].top_logprobs) == 2

weather = user("What is the weather in Paris?")
tools = [{"type": "function", "function": FUNCTION}]
message = client.chat_completion(weather, tools=tools, **ASKED).choices[0].message
assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}, message
deltas = [chunk.choices[0].delta for chunk in client.chat_completion(weather, tools=tools, stream=True, **ASKED)]
called = [call for delta in deltas for call in delta.tool_calls or ()]
assert json.loads("".join(call.function.arguments or "" for call in called)) == {"city": "Paris"}, called

schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
bound = client.chat_completion(user("Write JSON for Ada, 42 years old."), response_format=schema, **ASKED)
assert json.loads(bound.choices[0].message.content) == {"name": "Ada", "age": 42}, bound


async def streamed() -> str:
    each: Any
    async with AsyncInferenceClient(base_url=URL, api_key="none") as each:
        stream = await each.chat_completion(question, stream=True, **ASKED)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


assert asyncio.run(streamed()) == said

try:
    client.chat_completion(question, temperature=3)
except HfHubHTTPError as error:
    refused = error
else:
    raise AssertionError("HfHubHTTPError was expected")
assert refused.response.status_code == 400 and "temperature" in str(refused), refused
