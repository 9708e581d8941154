"""LlamaIndex' OpenAILike, as chat and as completions, which is its default."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = sys.argv[1:]
CONVERSATION = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello!")]

for is_chat in (True, False):
    llm = OpenAILike(
        model=MODEL, api_base=URL, api_key="none", is_chat_model=is_chat, temperature=0, max_tokens=16, max_retries=0,
        context_window=512,
    )  # fmt: skip
    said = llm.complete("Once upon a time").text
    *_, last = llm.stream_complete("Once upon a time")
    assert said and last.text == said, (said, last.text)
    assert llm.chat(CONVERSATION).message.content
    *_, answer = llm.stream_chat(CONVERSATION)
    assert answer.message.content == llm.chat(CONVERSATION).message.content
    assert llm.metadata.context_window == 512
