"""What a chat client is sent: one completion, or chunks. A chunk is a byte template around one JSON string."""

from __future__ import annotations

from typing import Any

import orjson

from pipeline.events import Cancelled, Failed, Finished, TokensProduced, Usage
from pipeline.log import Reply
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
    """The frames of one streamed chat completion, from the events of its history."""

    def __init__(self, uid: str, created_s: int, model: str, *, include_usage: bool) -> None:
        self._include_usage = include_usage
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

    def role(self) -> bytes:
        """Return the first frame, which says that an assistant speaks."""
        delta = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return sse.frame(self._choice + delta + self._end)

    def of(self, reply: Reply) -> bytes:
        """Return the frames of one event, empty for tokens without text; the last one has the event's id."""
        match reply.event:
            case TokensProduced(text=""):
                return b""
            case TokensProduced(text=text):
                return sse.frame(self._text + orjson.dumps(text) + self._text_end, reply.entry_id)
            case Finished() as finished:
                return self._finish(finished, reply.entry_id) + sse.DONE
            case Failed() | Cancelled() as ended:
                return sse.frame(error_body(error_of(ended)), reply.entry_id) + sse.DONE

    def _finish(self, finished: Finished, event_id: str) -> bytes:
        finish = self._choice + b'{},"logprobs":null,"finish_reason":"%s"' % finished.reason.encode() + self._end
        if not self._include_usage:
            return sse.frame(finish, event_id)
        usage = self._start + b',"choices":[],"usage":' + orjson.dumps(_usage(finished.usage)) + b"}"
        return sse.frame(finish) + sse.frame(usage, event_id)
