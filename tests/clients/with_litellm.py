"""LiteLLM: chat and text, whole and streamed, and that it tells our errors apart."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:]
HERE = {"api_base": URL, "api_key": "none"}
ASKED: dict[str, Any] = {**HERE, "model": f"openai/{MODEL}", "temperature": 0, "max_tokens": 16}
MESSAGES = [{"role": "user", "content": "Tell me how a log remembers."}]

whole = litellm.completion(messages=MESSAGES, **ASKED)
said = whole.choices[0].message.content
assert said and whole.usage.completion_tokens > 0
chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **ASKED))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
assert asyncio.run(litellm.acompletion(messages=MESSAGES, **ASKED)).choices[0].message.content == said
assert len(litellm.completion(messages=MESSAGES, n=2, **{**ASKED, "temperature": 1, "seed": 1}).choices) == 2
told = litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=1, **ASKED).choices[0].logprobs
assert len(told.content) == whole.usage.completion_tokens

text = {**ASKED, "model": f"text-completion-openai/{MODEL}"}
once = litellm.text_completion(prompt="Once upon a time", **text).choices[0].text
parts = litellm.text_completion(prompt="Once upon a time", stream=True, **text)
assert once and "".join(part.choices[0].text or "" for part in parts) == once

for fields, expected in (
    ({"messages": [{"role": "user", "content": "long " * 4000}]}, litellm.ContextWindowExceededError),
    ({"messages": MESSAGES, "logit_bias": {"99999999": 1}}, litellm.BadRequestError),
    ({"messages": MESSAGES, "model": "openai/another"}, litellm.NotFoundError),
):
    try:
        litellm.completion(**{**ASKED, **fields}, num_retries=0)
    except expected:
        pass
    else:
        raise AssertionError(f"{expected.__name__} was expected")
