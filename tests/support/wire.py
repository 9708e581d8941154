"""Bodies without HTTP: what they submit, and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pipeline.errors import RequestError
from pipeline.events import Submitted
from web.wire.openai.schemas import parse_chat, parse_completion
from web.wire.sglang.schemas import parse_generate
from web.wire.submit import chat_events, completion_events, generate_events

HELLO = [{"role": "user", "content": "hello"}]
MADE: Any = {"frontend": "web-0", "model": "m", "defaults": {}}
Body = Mapping[str, Any]


def chats(**fields: Any) -> list[Submitted]:
    """Return what a chat with *fields* submits."""
    return chat_events(parse_chat(json.dumps({"messages": HELLO, **fields}).encode()), **MADE)


def completions(body: Body) -> list[Submitted]:
    return completion_events(parse_completion(json.dumps(body).encode()), **MADE)


def generations(body: Body) -> list[Submitted]:
    return generate_events(parse_generate(json.dumps(body).encode()), **MADE)


def refusal(parse: Callable[[bytes], object], body: bytes | Body) -> RequestError:
    """Return the error that *parse* raises."""
    with pytest.raises(RequestError) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value
