"""What a chat client is sent: one completion, or chunks. A chunk is a byte template around one JSON string.

The frames are a fold over the events of a history: who folds it again gets the same bytes.
"""

from __future__ import annotations

from typing import Any

import orjson

from pipeline.events import AnyEvent, Cancelled, Failed, Finished, TokensProduced, Usage
from web import sse
from web.openai.errors import error_body, error_of


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def completion(uid: str, created_s: int, model: str, text: str, finished: Finished) -> bytes:
    """Return the body of a whole chat completion."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return orjson.dumps(
        {
            "id": f"chatcmpl-{uid}",
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": None,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finished.reason}],
            "usage": _usage(finished.usage),
        }
    )


class ChatFrames:
    """The frames of one streamed chat completion, from the events of its history, told in order."""

    def __init__(self, uid: str, created_s: int, model: str, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._speaks = False
        start = {
            "id": f"chatcmpl-{uid}",
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
            "system_fingerprint": None,
        }
        self._start = orjson.dumps(start)[:-1]
        self._choice = self._start + b',"choices":[{"index":0,"delta":'
        self._end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}"
        self._text = self._choice + b'{"content":'
        self._text_end = b'},"logprobs":null,"finish_reason":null' + self._end

    def of(self, entry_id: str, event: AnyEvent) -> bytes:
        """Return the frames of the next event, none for what clients do not see; the last one has the event's id.

        The first one of all says that an assistant speaks. It belongs to the first event, for tokens without text too.
        """
        match event:
            case TokensProduced(text=""):
                return self._role()
            case TokensProduced(text=text):
                return self._role() + sse.frame(self._text + orjson.dumps(text) + self._text_end, entry_id)
            case Finished() as finished:
                return self._role() + self._finish(finished, entry_id)
            case Failed() | Cancelled() as ended:
                return sse.frame(error_body(error_of(ended)), entry_id)
            case _:
                return b""

    def _role(self) -> bytes:
        if self._speaks:
            return b""
        self._speaks = True
        delta = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return sse.frame(self._choice + delta + self._end)

    def _finish(self, finished: Finished, event_id: str) -> bytes:
        finish = self._choice + b'{},"logprobs":null,"finish_reason":"%s"' % finished.reason.encode() + self._end
        if not self._include_usage:
            return sse.frame(finish, event_id)
        usage = self._start + b',"choices":[],"usage":' + orjson.dumps(_usage(finished.usage)) + b"}"
        return sse.frame(finish) + sse.frame(usage, event_id)
