"""Responses, whole and as events: https://platform.openai.com/docs/api-reference/responses-streaming.

Both are folds of the same events, so the last event of a stream has the whole response. OpenAI's form wins where others
differ: thoughts are `response.reasoning_text.delta`, and a stream has no [DONE].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from pipeline.errors import RequestError
from pipeline.events import AnyEvent, Cancelled, Failed, Finished, Submitted, TokensProduced, Usage
from web.wire import sse
from web.wire.frames import ClientEvent, Frames
from web.wire.markup.reader import Piece
from web.wire.openai.answers import Choice, choices_for
from web.wire.responses.items import Item, call_item
from web.wire.signatures import signature_of
from web.wire.uids import RESPONSE_PREFIX, drawn_ms

PREFIXES: Final[Mapping[str, str]] = {"content": "msg", "reasoning": "rs", "function": "fc", "custom": "ctc"}
"""What ids of the output begin with."""
Status = str
"""`queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`."""


class Response:
    """The response to one request, as it stands."""

    def __init__(self, uid: str, event: Submitted) -> None:
        self.uid = uid
        self.event = event
        self.choice = choices_for(uid, [event])[0]
        self.ended: Failed | Cancelled | None = None
        """How it ended, if that is not well."""
        self._echoes = event.presentation.echoes
        self.special: Mapping[str, Mapping[str, Any]] = self._echoes.get("special", {})

    @property
    def status(self) -> Status:
        """Its status."""
        match self.ended:
            case Failed():
                return "failed"
            case Cancelled():
                return "cancelled"
        if self.choice.finished is not None:
            return "incomplete" if self.choice.reason == "length" else "completed"
        return "in_progress" if self.choice.token_ids else "queued"

    def apply(self, event: AnyEvent) -> None:
        """Add the next event of its history. Those of engines and tokenizers change nothing."""
        match event:
            case TokensProduced() as tokens:
                self.choice.apply(tokens)
            case Finished() as finished:
                self.choice.finish(finished)
            case Failed() | Cancelled() as ended:
                self.ended = ended

    def output(self) -> list[Item]:
        """Return its items. The last one of a response that did not end well is incomplete."""
        found = [self._item(*block, number) for number, block in enumerate(self.choice.blocks())]
        if found and self.status != "completed":
            found[-1]["status"] = "in_progress" if self.status == "in_progress" else "incomplete"
        return found

    def _item(self, kind: str, place: int, end: int, number: int) -> Item:
        match kind:
            case "content":
                return self.item(kind, number, self.choice.content[place:end].decode())
            case "reasoning":
                return self.item(kind, number, self.choice.reasoning[place:end].decode())
            case _:
                return self.item(kind, number, "".join(self.choice.calls[place].arguments), call=place)

    def item(self, kind: str, number: int, text: str | None, *, call: int = -1) -> Item:
        """Return item *number* of the output. *text*: all of its text, or a call's arguments; None: it begins."""
        status = "in_progress" if text is None else "completed"
        item: Item = {"id": self.item_id(kind, number, call), "status": status}
        match kind:
            case "content":
                content = [] if text is None else [part("output_text", text)]
                return item | {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                content = [] if text is None else [part("reasoning_text", text)]
                item |= {"type": "reasoning", "summary": [], "content": content}
                if text is not None and "encrypted" in self._echoes:
                    item["encrypted_content"] = signature_of(text)
                return item
        called = self.choice.calls[call]
        return item | call_item(called.id, called.name, text or "", self.special)

    def item_id(self, kind: str, number: int, call: int = -1) -> str:
        """Return the id of item *number* of the output."""
        if kind == "call":
            kind = "custom" if self.is_custom(call) else "function"
        return f"{PREFIXES[kind]}_{self.uid}_{number}"

    def is_custom(self, call: int) -> bool:
        """Return whether a call is that of a custom tool, whose input is one text."""
        return "custom" in self.special.get(self.choice.calls[call].name, {})

    def plain(self, status: Status = "", output: Sequence[Item] | None = None) -> dict[str, Any]:
        """Return all of it, or as it was with this *status* and *output*."""
        event, echoes, choice = self.event, self._echoes, self.choice
        now = status or self.status
        finished = choice.finished if not status else None
        began_s, took_s = drawn_ms(self.uid) / 1000, finished.timings.total_ms / 1000 if finished else 0.0
        instructions = event.messages[0]["content"] if echoes.get("instructions") else None
        calls = event.calls
        return {
            "id": RESPONSE_PREFIX + self.uid,
            "object": "response",
            "created_at": int(began_s),
            "status": now,
            "completed_at": int(began_s + took_s) if now == "completed" else None,
            "error": _error(self.ended) if isinstance(self.ended, Failed) and not status else None,
            "incomplete_details": {"reason": "max_output_tokens"} if now == "incomplete" else None,
            "instructions": instructions,
            "max_output_tokens": echoes.get("max_output_tokens"),
            "max_tool_calls": echoes.get("max_tool_calls"),
            "model": event.model,
            "output": self.output() if output is None else list(output),
            "parallel_tool_calls": echoes.get("parallel_tool_calls", calls is None or calls.parallel),
            "previous_response_id": echoes.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None} | echoes.get("reasoning", {}),
            "background": event.background,
            "service_tier": event.labels.get("service_tier", "default"),
            "store": event.labels.get("store", False),
            "temperature": event.sampling.temperature,
            "text": self._text(),
            "tool_choice": echoes.get("tool_choice", "auto"),
            "tools": self._tools(),
            "top_logprobs": 0,
            "top_p": event.sampling.top_p,
            "presence_penalty": event.sampling.presence_penalty,
            "frequency_penalty": event.sampling.frequency_penalty,
            "truncation": echoes.get("truncation", "disabled"),
            "usage": _usage(finished.usage, choice) if finished else None,
            "user": event.labels.get("user"),
            "safety_identifier": event.labels.get("safety_identifier"),
            "prompt_cache_key": event.labels.get("prompt_cache_key"),
            "metadata": event.labels.get("metadata", {}),
        }

    def _text(self) -> dict[str, Any]:
        told: dict[str, Any] = {"format": {"type": "text"}} | self._echoes.get("text", {})
        if told["format"]["type"] == "json_schema" and self.event.constraint is not None:
            told["format"] = told["format"] | {"schema": orjson.Fragment(self.event.constraint.text)}
        return told

    def _tools(self) -> list[dict[str, Any]]:
        """Return the tools as the client sent them, without those that it does not run."""
        found: list[dict[str, Any]] = []
        for tool in self.event.templating.tools:
            function = tool["function"]
            special = self.special.get(function["name"], {})
            if "custom" in special:
                kept = ("name", "description", "format")
                told = {"type": "custom"} | {name: special[name] for name in kept if name in special}
            else:
                told = {"type": "function", "description": None, "parameters": None, "strict": None} | function
                told["name"] = special.get("name", function["name"])
            if space := special.get("namespace"):
                if not found or found[-1].get("type") != "namespace" or found[-1]["name"] != space:
                    description = self._echoes.get("namespaces", {}).get(space)
                    found.append({"type": "namespace", "name": space, "description": description, "tools": []})
                found[-1]["tools"].append(told)
            else:
                found.append(told)
        return found


def part(kind: str, text: str) -> dict[str, Any]:
    """Return a part of an item's content."""
    more: Mapping[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _error(failed: Failed) -> dict[str, Any]:
    """Return an error with one of OpenAI's codes. Codex knows one more."""
    usual = "server_error" if failed.status >= 500 else "invalid_prompt"
    kept = failed.code in ("context_length_exceeded", "rate_limit_exceeded")
    return {"code": failed.code if kept else usual, "message": failed.message}


def _usage(usage: Usage, choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reader.reasoning_tokens if choice.reader else 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def body(uid: str, event: Submitted, choice: Choice) -> Iterator[bytes]:
    """Yield the whole response, once *choice* has ended."""
    response = Response(uid, event)
    response.choice = choice
    yield orjson.dumps(response.plain())


class ResponseFrames(Frames):
    """The events of a stream. An item is open until text of another kind comes."""

    def __init__(self, uid: str, event: Submitted, *, ids: bool, posted: bool, after: int = -1) -> None:
        """OpenAI's own streams have no [DONE], so there is none if they are *posted*. The client has all events up to
        the sequence number *after*."""
        super().__init__(ids=ids)
        self.done = b"" if posted else sse.DONE
        self._response = Response(uid, event)
        self._after = after
        self._number = 0
        """Sequence number of the next event."""
        self._items: list[Item] = []
        """Those that are complete."""
        self._open = ""
        """The kind of the open item."""
        self._id = ""
        self._call = -1
        self._text: list[str] = []
        """Of the open item."""
        self._written: list[tuple[str, bytes]] = []

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        choice = self._response.choice
        match event.event:
            case TokensProduced() as tokens:
                told = choice.apply(tokens)
                self._begin()
                self._add(told.pieces if choice.reader is not None else [Piece("content", told.text)])
            case Finished() as finished:
                last = choice.finish(finished)
                self._begin()
                self._add(last)
                self._close(self._response.status)
                self._write(f"response.{self._response.status}", {"response": self._response.plain()})
            case Failed() | Cancelled() as ended:
                self._begin()
                self._response.ended = ended
                kind = "failed" if isinstance(ended, Failed) else "incomplete"
                self._write(f"response.{kind}", {"response": self._response.plain()})
        return self._taken(self.id_of(event))

    def error(self, error: RequestError, entry_id: str = "") -> bytes:
        """As Frames.error. Clients know no other event for it."""
        self._begin()
        self._after = min(self._after, self._number - 1)  # else a client that has more would be told nothing
        self._response.ended = Failed(status=error.status, code=error.code or "", message=error.message)
        self._write("response.failed", {"response": self._response.plain()})
        return self._taken(entry_id)

    def begun(self) -> bytes:
        """Return the first frames, for a client that must know the id before anything is produced."""
        self._begin()
        return self._taken("")

    def _taken(self, entry_id: str) -> bytes:
        written, self._written = self._written, []
        if len(written) == 1:  # as of most tokens
            ((kind, data),) = written
            return sse.frame(data, entry_id, kind=kind)
        last = len(written) - 1
        ids = (entry_id if place == last else "" for place in range(len(written)))
        return b"".join(sse.frame(data, each, kind=kind) for (kind, data), each in zip(written, ids, strict=True))

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        if self._number > self._after:
            self._written.append((kind, orjson.dumps({"type": kind, "sequence_number": self._number, **fields})))
        self._number += 1

    def _begin(self) -> None:
        if self._number:
            return
        for kind in ("created", "in_progress"):
            self._write(f"response.{kind}", {"response": self._response.plain("in_progress", [])})

    def _add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece.kind:
                case "content" | "reasoning" if piece.text:
                    self._opened(piece.kind)
                    self._delta("output_text" if piece.kind == "content" else "reasoning_text", piece.text)
                case "call":
                    self._close()
                    self._call = piece.call
                    self._opened("call")
                case "arguments":
                    if self._response.is_custom(self._call):
                        self._text.append(piece.text)
                    else:
                        self._delta("function_call_arguments", piece.text)

    def _opened(self, kind: str) -> None:
        """Begin an item, unless one of this *kind* is open."""
        if self._open == kind:
            return
        self._close()
        self._open, self._text = kind, []
        item = self._response.item(kind, len(self._items), None, call=self._call)
        self._id = item["id"]
        self._write("response.output_item.added", {"output_index": len(self._items), "item": item})
        if kind != "call":
            self._write("response.content_part.added", self._place() | {"part": part(_PARTS[kind], "")})

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._id, "output_index": len(self._items)}
        return place if self._open == "call" else place | {"content_index": 0}

    def _delta(self, kind: str, text: str) -> None:
        self._text.append(text)
        if self._number > self._after:
            data = _DELTAS[kind] % (self._number, self._id.encode(), len(self._items), orjson.dumps(text))
            self._written.append((f"response.{kind}.delta", data))
        self._number += 1

    def _close(self, status: Status = "completed") -> None:
        """End the open item; the last one of a response has its *status*."""
        if not self._open:
            return
        text, place = "".join(self._text), self._place()
        item = self._response.item(self._open, len(self._items), text, call=self._call) | {"status": status}
        match item["type"]:
            case "function_call":
                done = {"name": item["name"], "arguments": text}
                self._write("response.function_call_arguments.done", place | done)
            case "custom_tool_call":
                self._write("response.custom_tool_call_input.delta", place | {"delta": item["input"]})
                self._write("response.custom_tool_call_input.done", place | {"input": item["input"]})
            case _:
                kind = _PARTS[self._open]
                more: Mapping[str, Any] = {"logprobs": []} if kind == "output_text" else {}
                self._write(f"response.{kind}.done", place | {"text": text, **more})
                self._write("response.content_part.done", place | {"part": part(kind, text)})
        self._write("response.output_item.done", {"output_index": len(self._items), "item": item})
        self._items.append(item)
        self._open = ""


_PARTS: Final[Mapping[str, str]] = {"content": "output_text", "reasoning": "reasoning_text"}
_DELTAS: Final[Mapping[str, bytes]] = {
    kind: b'{"type":"response.%s.delta","sequence_number":%%d,"item_id":"%%s","output_index":%%d%s,"delta":%%s%s}'
    % (kind.encode(), b"" if kind == "function_call_arguments" else b',"content_index":0', more)
    for kind, more in (("output_text", b',"logprobs":[]'), ("reasoning_text", b""), ("function_call_arguments", b""))
}
"""The data of the events that most tokens make."""
