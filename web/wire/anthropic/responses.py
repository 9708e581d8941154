"""The answers of /v1/messages: one body, or events: https://docs.anthropic.com/en/docs/build-with-claude/streaming.

Both are folds of the same events, so a stream put together equals the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, Finished, PromptInfo, Submitted, TokensProduced, Usage
from web.wire import sse
from web.wire.anthropic.errors import error_body
from web.wire.frames import ClientEvent, Frames
from web.wire.markup.reader import Piece
from web.wire.openai.answers import Choice, choices_for
from web.wire.openai.errors import error_of
from web.wire.signatures import signature_of
from web.wire.uids import MESSAGE_PREFIX

PING: Final = ("ping", b'{"type":"ping"}')


def body(uid: str, event: Submitted, choice: Choice) -> Iterator[bytes]:
    """Yield the whole answer, once *choice* has ended."""
    assert choice.finished is not None
    content = [_whole(choice, kind, place, end, event) for kind, place, end in choice.blocks()]
    told = _message(uid, event, content) | _end(event, choice)
    yield orjson.dumps(told | {"usage": _usage(choice.finished.usage)})


def _whole(choice: Choice, kind: str, place: int, end: int, event: Submitted) -> dict[str, Any]:
    """Return a block of the answer: bytes [place, end) of its content or its reasoning, or the call number *place*."""
    match kind:
        case "content":
            return {"type": "text", "text": choice.content[place:end].decode()}
        case "reasoning":
            thought = choice.reasoning[place:end].decode()
            shown = "" if event.presentation.omits_thoughts else thought
            return {"type": "thinking", "thinking": shown, "signature": signature_of(thought)}
        case _:
            call = choice.calls[place]
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input("".join(call.arguments))}


def _input(arguments: str) -> Any:
    """Return the arguments of a call as the model wrote them; {} if they are no object, as where a call was cut."""
    try:
        is_object = isinstance(orjson.loads(arguments or b"{}"), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments) if is_object and arguments else {}


def _message(uid: str, event: Submitted, content: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {
        "id": f"{MESSAGE_PREFIX}{uid}",
        "type": "message",
        "role": "assistant",
        "model": event.model,
        "content": list(content),
        "stop_reason": None,
        "stop_sequence": None,
    }


def _end(event: Submitted, choice: Choice) -> dict[str, Any]:
    """Return why the answer ended. At the end of the context it is shorter than the client allowed."""
    assert choice.finished is not None
    finished = choice.finished
    if choice.reason == "length":
        most = event.sampling.max_tokens
        is_context = most is not None and finished.usage.completion_tokens < most
        return {"stop_reason": "model_context_window_exceeded" if is_context else "max_tokens", "stop_sequence": None}
    if finished.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
    return {"stop_reason": "tool_use" if choice.calls else "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Return Anthropic's counts: those of cached tokens are not among the input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class MessageFrames(Frames):
    """The events of a stream. A block is open until text of another kind comes."""

    keep_alive = sse.frame(PING[1], kind=PING[0])

    def __init__(self, uid: str, event: Submitted, *, ids: bool, posted: bool) -> None:
        """Anthropic's own streams have no [DONE], so there is none if they are *posted*."""
        super().__init__(ids=ids)
        self.done = b"" if posted else sse.DONE
        self._uid, self._event = uid, event
        self._choice = choices_for(uid, [event])[0]
        self._has_begun = False
        self._open = ""
        """The kind of the open block."""
        self._num_blocks = 0
        self._thought: list[str] = []
        self._written: list[tuple[str, bytes]] = []
        """Names and data of the frames of an event."""

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        match event.event:
            case TokensProduced() as tokens:
                part = self._choice.apply(tokens)
                self._begin(tokens.prompt)
                self._add(part.pieces if self._choice.reader is not None else [Piece("content", part.text)])
            case Finished() as finished:
                last = self._choice.finish(finished)
                self._begin(None)
                self._add(last)
                self._close()
                delta = _end(self._event, self._choice)
                self._write("message_delta", {"delta": delta, "usage": _usage(finished.usage)})
                self._write("message_stop", {})
            case Failed() | Cancelled() as ended:
                return self.error(error_of(ended), self.id_of(event))
        written, self._written = self._written, []
        return self._framed(written, self.id_of(event))

    def error(self, error: RequestError, entry_id: str = "") -> bytes:
        """As Frames.error."""
        return sse.frame(error_body(error, self._uid), entry_id, kind="error")

    @staticmethod
    def _framed(written: Sequence[tuple[str, bytes]], entry_id: str) -> bytes:
        last = len(written) - 1
        ids = ("" if place < last else entry_id for place in range(len(written)))
        return b"".join(sse.frame(data, each, kind=kind) for (kind, data), each in zip(written, ids, strict=True))

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        self._written.append((kind, orjson.dumps({"type": kind, **fields})))

    def _begin(self, prompt: PromptInfo | None) -> None:
        """Begin the message, with the counts of its prompt."""
        if self._has_begun:
            return
        self._has_begun = True
        prompt = prompt or PromptInfo(num_tokens=0)
        usage = Usage(prompt_tokens=prompt.num_tokens, completion_tokens=0, cached_tokens=prompt.cached_tokens)
        self._write("message_start", {"message": _message(self._uid, self._event) | {"usage": _usage(usage)}})
        self._written.append(PING)

    def _add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece.kind:
                case "content" if piece.text:
                    self._opened("content", {"type": "text", "text": ""})
                    self._delta(b'"text_delta","text":', piece.text)
                case "reasoning" if piece.text:
                    self._opened("reasoning", {"type": "thinking", "thinking": "", "signature": ""})
                    self._thought.append(piece.text)
                    if not self._event.presentation.omits_thoughts:
                        self._delta(b'"thinking_delta","thinking":', piece.text)
                case "call":
                    self._close()
                    call = self._choice.calls[piece.call]
                    self._opened("call", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
                case "arguments":
                    self._delta(b'"input_json_delta","partial_json":', piece.text)

    def _opened(self, kind: str, block: dict[str, Any]) -> None:
        """Begin a *block*, unless one of this kind is open."""
        if self._open == kind:
            return
        self._close()
        self._open = kind
        self._write("content_block_start", {"index": self._num_blocks, "content_block": block})

    def _delta(self, kind: bytes, text: str) -> None:
        data = b'{"type":"content_block_delta","index":%d,"delta":{"type":%s%s}}'
        self._written.append(("content_block_delta", data % (self._num_blocks, kind, orjson.dumps(text))))

    def _close(self) -> None:
        if not self._open:
            return
        if self._open == "reasoning":
            self._delta(b'"signature_delta","signature":', signature_of("".join(self._thought)))
            self._thought = []
        self._write("content_block_stop", {"index": self._num_blocks})
        self._open = ""
        self._num_blocks += 1
