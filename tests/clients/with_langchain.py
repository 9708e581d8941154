"""LangChain, chat and completions: invoke, stream, batch, usage, logprobs, stop, several choices."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
CONVERSATION = [SystemMessage("Be brief."), HumanMessage("Tell me how a log remembers.")]

chat = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=16, max_retries=0)
whole = chat.invoke(CONVERSATION)
assert whole.content and whole.response_metadata["finish_reason"] in ("stop", "length"), whole
assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
streamed = list(chat.stream(CONVERSATION, stream_usage=True))
assert "".join(str(chunk.content) for chunk in streamed) == whole.content
assert [chunk.usage_metadata for chunk in streamed if chunk.usage_metadata][-1]["output_tokens"] > 0
assert [answer.content for answer in chat.batch([CONVERSATION] * 3)] == [whole.content] * 3

told = chat.bind(logprobs=True, top_logprobs=2).invoke(CONVERSATION).response_metadata["logprobs"]["content"]
assert len(told) > 0 and len(told[0]["top_logprobs"]) == 2
stop = str(whole.content)[2:4]
assert chat.bind(stop=[stop]).invoke(CONVERSATION).content == str(whole.content).partition(stop)[0]

several = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, n=3, seed=1, temperature=1.5, max_tokens=8)
assert len({generation.text for generation in several.generate([CONVERSATION]).generations[0]}) == 3

text = OpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=8, max_retries=0)
said = text.invoke("Once upon a time")
assert said and "".join(text.stream("Once upon a time")) == said
assert len(text.generate(["Once", "Twice"]).generations) == 2
