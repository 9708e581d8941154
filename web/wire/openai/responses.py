"""The answers of OpenAI's endpoints: one body, or chunks. A plain chunk is a byte template around a string.

The frames are a fold of events: the same events always give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson

from pipeline.events import Cancelled, Failed, Finished, Submitted, TokensProduced
from web.wire import sse
from web.wire.frames import ClientEvent, Frames
from web.wire.known import Known
from web.wire.markup.reader import Piece
from web.wire.openai.answers import AnswerPart, Call, Choice, InOrder, choices_for, usage_of
from web.wire.openai.errors import error_of
from web.wire.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from web.wire.pieces import Slices, encoded, sliced
from web.wire.uids import drawn_ms, family_of, index_of

Chunk: TypeAlias = bytes | Iterator[bytes]
"""A chunk with the scores of a prompt may be long, so it is made piece by piece."""


class Style:
    """What differs between endpoints: the fields of their bodies and chunks. This is the style of chats."""

    prefix = "chatcmpl-"
    """Before the uid, in `id`."""
    whole = "chat.completion"
    """`object` of a body."""
    chunk = "chat.completion.chunk"
    """`object` of a chunk."""

    def opening(self) -> Mapping[str, Any] | None:
        """Return the fields of the chunk that begins a choice; None if it begins with text."""
        return {"delta": {"role": "assistant", "content": ""}}

    def text(self, text: str) -> Mapping[str, Any]:
        """Return the fields of a chunk's choice that bring *text*."""
        return {"delta": {"content": text}}

    def piece(self, choice: Choice, piece: Piece) -> Mapping[str, Any]:
        """Return the fields of a chunk's choice that bring a *piece* of an answer with markup."""
        match piece.kind:
            case "content":
                return self.text(piece.text)
            case "reasoning":
                return {"delta": _reasoning(piece.text)}
            case "call":
                called = choice.calls[piece.call]
                function = {"name": called.name, "arguments": ""}
                begun = {"index": piece.call, "id": called.id, "type": "function", "function": function}
                return {"delta": {"tool_calls": [begun]}}
            case "arguments":
                more = {"index": piece.call, "function": {"arguments": piece.text}}
                return {"delta": {"tool_calls": [more]}}

    def closing(self) -> Mapping[str, Any]:
        """Return the fields of the last chunk of a choice, beside `finish_reason`."""
        return {"delta": {}}

    def message(self, choice: Choice) -> Mapping[str, Any]:
        """Return the fields of a body's choice that have its text."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reader is not None and choice.reader.thinks and choice.shown.reasoning == "apart":
            message |= _reasoning(choice.reasoning.decode() or None)
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return {"message": message}

    def logprobs(self, choice: Choice, part: AnswerPart, offset: int, *, first: bool) -> Mapping[str, Any] | None:
        """Return the log-probabilities of a *part* that begins at *offset*; the *first* part includes the prompt."""
        return chat_logprobs(part.scores, as_ids=choice.shown.tokens_as_ids) if part.scores else None

    def of_prompt(self, choice: Choice) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the fields about the prompt: beside `choices`, and within the choice."""
        return _of_prompt(choice), {}


class CompletionStyle(Style):
    """The style of completions, which have a text where chats have a message."""

    prefix = "cmpl-"
    whole = chunk = "text_completion"

    def opening(self) -> None:
        return None

    def text(self, text: str) -> Mapping[str, Any]:
        return {"text": text}

    def closing(self) -> Mapping[str, Any]:
        return {"text": ""}

    def message(self, choice: Choice) -> Mapping[str, Any]:
        return {"text": self._echoed(choice) + choice.text}

    def logprobs(self, choice: Choice, part: AnswerPart, offset: int, *, first: bool) -> Mapping[str, Any] | None:
        prompt = choice.told_prompt if choice.shown.echo and first else None
        if not part.scores and not (prompt is not None and prompt.first):
            return None
        offset += len(self._echoed(choice))
        return completion_logprobs(prompt, part.scores, part.text, offset, as_ids=choice.shown.tokens_as_ids)

    def of_prompt(self, choice: Choice) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {}, _of_prompt(choice)

    @staticmethod
    def _echoed(choice: Choice) -> str:
        return choice.prompt.text if choice.shown.echo and choice.prompt is not None else ""


def _reasoning(text: str | None) -> dict[str, Any]:
    """Return both fields in which clients look for reasoning."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": "".join(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _of_prompt(choice: Choice) -> Mapping[str, Any]:
    told: dict[str, Any] = {}
    prompt = choice.told_prompt if choice.shown.prompt_scores else None
    if prompt is not None and prompt.first:
        told["prompt_logprobs"] = prompt_logprobs(prompt)
    if choice.prompt is not None and choice.shown.token_ids:
        told["prompt_token_ids"] = choice.prompt.token_ids
    return told


CHAT: Final = Style()
COMPLETION: Final = CompletionStyle()


def body(style: Style, uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> Iterator[bytes]:
    """Yield the whole answer in pieces, once all *choices* have ended."""
    head, usage = _head(style, style.whole, uid, events[0].model), usage_of(choices)
    of_prompts = [style.of_prompt(choice) for choice in choices]
    beside: dict[str, Any] = {}
    for for_all, _ in of_prompts:
        beside |= for_all
    beside |= _cached(choices[0], usage)
    told = Slices([_whole(style, choice, within)] for choice, (_, within) in zip(choices, of_prompts, strict=True))
    yield from encoded({**head, "choices": told, "usage": usage, **beside})


def _whole(style: Style, choice: Choice, within: Mapping[str, Any]) -> dict[str, Any]:
    part = AnswerPart(choice.text, scores=choice.scores)
    logprobs = {"logprobs": style.logprobs(choice, part, 0, first=True)}
    end = {"finish_reason": choice.reason, **_stopped_by(choice)}
    token_ids = {"token_ids": sliced(choice.token_ids)} if choice.shown.token_ids else {}
    return {"index": choice.index, **style.message(choice), **logprobs, **end, **token_ids, **within}


class ChunkFrames(Frames):
    """The frames of a stream. Events of one history come in order, those of siblings as they happen.

    Only the stream of one history can have event ids: siblings have no common order.
    """

    def __init__(self, style: Style, uid: str, events: Sequence[Submitted], *, ids: bool, known: Known | None) -> None:
        """*uid* is that of the history; with several *events*, the one that siblings share. The frames of one history
        leave out what is *known*.
        """
        super().__init__(ids=ids and len(events) == 1)
        choices = choices_for(uid, events)
        if len(events) == 1:
            choices[0].index = index_of(uid)
        self._choices = choices
        self._in_order = InOrder(choices)
        self._echoes_scores = events[0].presentation.echo and events[0].sampling.prompt_logprobs is not None
        self._include_usage = events[0].presentation.include_usage
        self._start = orjson.dumps(_head(style, style.chunk, family_of(uid), events[0].model))[:-1]
        self._chunks = [
            _ChoiceChunks(style, choice, self._start, include_usage=self._include_usage, known=known)
            for choice in choices
        ]

    def of(self, event: ClientEvent) -> bytes:
        """Return the frames of the next event, none if clients do not see it; the last one has the event's id."""
        return b"".join(self.pieces(event)) if self.are_long else self._of(event)

    @property
    def are_long(self) -> bool:
        """As Frames.are_long: until all choices have begun, if they begin with the scores of the prompt."""
        self._echoes_scores = self._echoes_scores and not all(chunks.begun for chunks in self._chunks)
        return self._echoes_scores

    def pieces(self, event: ClientEvent) -> Iterator[bytes]:
        """As Frames.pieces."""
        for each in self._in_order.ready(event):
            match each.event:
                case TokensProduced() as tokens if not self._chunks[each.index].begun:
                    yield from _pieces_of(self._chunks[each.index].tokens(tokens), self.id_of(each))
                case _:
                    yield self._of(each)

    def _of(self, event: ClientEvent) -> bytes:
        chunks = self._chunks[event.index]
        entry_id = self.id_of(event)
        match event.event:
            case TokensProduced() as tokens:
                added = chunks.tokens(tokens)
                return _framed(added, entry_id)
            case Finished() as finished:
                added = chunks.finish(finished)
                if self._include_usage and all(choice.finished is not None for choice in self._choices):
                    counts = orjson.dumps(usage_of(self._choices))
                    added.append(self._start + b',"choices":[],"usage":' + counts + b"}")
                return _framed(added, entry_id)
            case Failed() | Cancelled() as ended:
                if event.entry_id:
                    chunks.end()
                return self.error(error_of(ended), entry_id)
            case _:
                return b""


@dataclass(slots=True)
class _ChoiceChunks:
    """The chunks of one choice."""

    style: Style
    choice: Choice
    start: bytes
    include_usage: bool
    known: Known | None = None
    """The text that the client has already; it is left out."""
    begun: bool = False
    offset: int = 0
    """Characters of the answer so far."""
    before: bytes = b""
    after: bytes = b""
    around_thoughts: Sequence[bytes] = ()
    """The bytes around the two texts of a chunk that has only reasoning."""
    is_plain: bool = False

    def __post_init__(self) -> None:
        shown = self.choice.shown
        self.is_plain = not (shown.token_ids or shown.continuous_usage or shown.prompt_only)
        whole = self._chunk(self.style.text("\0"))  # the bytes around the text of a chunk that has nothing else
        self.before, _, self.after = whole.partition(b'"\\u0000"')

    def tokens(self, event: TokensProduced) -> list[Chunk]:
        """Return the chunks of tokens; none if there is nothing to show."""
        choice = self.choice
        choice.prompt = choice.prompt or event.prompt
        chunks: list[Chunk] = [] if self.begun else self._begin()  # with the counts before any token
        part = choice.apply(event)
        if self.known is not None:
            part = self._lacking(part, self.known)
            if not self.known.are_over:  # the stream may still be refused, so the opening waits for the first text
                self.begun = not chunks
                return []
        if choice.reader is not None:
            chunks += self._pieces(part)
        elif self.is_plain and not part.scores:
            if part.text:
                chunks.append(self.before + orjson.dumps(part.text) + self.after)
        elif part.text or part.token_ids:
            token_ids = {"token_ids": part.token_ids} if choice.shown.token_ids else {}
            logprobs = self.style.logprobs(choice, part, self.offset, first=False)
            chunks.append(self._chunk(self.style.text(part.text), logprobs, choice_more=token_ids))
        self.offset += len(part.text)
        return chunks

    def finish(self, finished: Finished) -> list[Chunk]:
        """Return the chunk that says why the choice ended."""
        last = AnswerPart("", pieces=self.choice.finish(finished))
        if self.known is not None:
            last = self._lacking(last, self.known)
        self.end()
        chunks = [*self._begin(), *(self._pieces(last) if last.pieces else ())]
        stopped_by, cached = _stopped_by(self.choice), _cached(self.choice, self.choice.usage())
        last_chunk = self._chunk(self.style.closing(), reason=self.choice.reason, choice_more=stopped_by, beside=cached)
        return [*chunks, last_chunk]

    def end(self) -> None:
        """Note that the choice has ended. Raises RequestError if the client claims to have more text than it has."""
        if self.known is not None:
            self.known.end()

    def _lacking(self, part: AnswerPart, known: Known) -> AnswerPart:
        """Return *part* without the text that is *known*."""
        if self.choice.reader is None:
            return part._replace(text=known.rest(part.text))
        return part._replace(text="", pieces=known.rest_of(part.pieces))

    def _pieces(self, part: AnswerPart) -> list[bytes]:
        """Return the chunks of a *part* with markup. The first one has what is told of its tokens."""
        is_plain = self.is_plain and not part.scores
        if is_plain:
            return [self._piece(piece) for piece in part.pieces]
        token_ids = {"token_ids": part.token_ids} if self.choice.shown.token_ids and part.token_ids else {}
        logprobs = self.style.logprobs(self.choice, part, self.offset, first=False)
        first, *others = [self.style.piece(self.choice, piece) for piece in part.pieces] or [{"delta": {}}]
        return [self._chunk(first, logprobs, choice_more=token_ids), *map(self._chunk, others)]

    def _piece(self, piece: Piece) -> bytes:
        """Return the chunk of a *piece* without other fields. Most pieces are content or reasoning."""
        if piece.kind == "content":
            return self.before + orjson.dumps(piece.text) + self.after
        if piece.kind == "reasoning":
            if not self.around_thoughts:
                whole = self._chunk(self.style.piece(self.choice, Piece("reasoning", "\0")))
                self.around_thoughts = whole.split(b'"\\u0000"')
            return orjson.dumps(piece.text).join(self.around_thoughts)
        return self._chunk(self.style.piece(self.choice, piece))

    def _begin(self) -> list[Chunk]:
        """Return the chunk before the first event: the role, or the prompt; also for tokens without text."""
        if self.begun:
            return []
        self.begun = True
        if self.known is not None and self.known.num:
            return self._rest_of_prompt(self.known)
        beside, within = self.style.of_prompt(self.choice)
        opening = self.style.opening()
        if opening is None and self.choice.shown.echo:
            prompt = Choice(self.choice.index, self.choice.shown, prompt=self.choice.told_prompt)
            opening = self.style.message(prompt)
            logprobs = self.style.logprobs(prompt, AnswerPart(""), 0, first=True)
            return [self._pieces_of(self._fields(opening, logprobs, choice_more=within, beside=beside))]
        if opening is None and not within:
            return []
        return [self._chunk(opening or self.style.text(""), choice_more=within, beside=beside)]

    def _rest_of_prompt(self, known: Known) -> list[Chunk]:
        """Return the chunk with the part of an echoed prompt that the client does not have."""
        prompt = self.choice.prompt if self.style.opening() is None and self.choice.shown.echo else None
        lacking = known.rest(prompt.text) if prompt is not None else ""
        return [self._chunk(self.style.text(lacking))] if lacking else []

    def _chunk(
        self,
        part: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
        *,
        reason: str | None = None,
        choice_more: Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> bytes:
        fields = self._fields(part, logprobs, reason=reason, choice_more=choice_more, beside=beside)
        return self.start + b"," + orjson.dumps(fields)[1:]

    def _pieces_of(self, fields: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield a chunk that may be long."""
        pieces = encoded(fields)
        yield self.start + b"," + next(pieces)[1:]
        yield from pieces

    def _fields(
        self,
        part: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None,
        *,
        reason: str | None = None,
        choice_more: Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": self.choice.index, **part, "logprobs": logprobs, "finish_reason": reason}
        more: dict[str, Any] = {"choices": [choice | dict(choice_more or {})], **(beside or {})}
        if self.include_usage:
            more["usage"] = self.choice.usage() if self.choice.shown.continuous_usage else None
        return more


def _stopped_by(choice: Choice) -> Mapping[str, Any]:
    """Return what ended an answer, in vLLM's field and in SGLang's: vLLM names no end-of-sequence token."""
    matched = choice.matched
    asked = isinstance(matched, str) or matched in choice.stop_token_ids
    return {"stop_reason": matched if asked else None, "matched_stop": matched}


def _cached(choice: Choice, usage: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return SGLang's field for where the cached tokens of a prompt were, if the client asked: here always on the
    engine's device."""
    if not choice.shown.cache_details:
        return {}
    return {"sglext": {"cached_tokens_details": {"device": usage["prompt_tokens_details"]["cached_tokens"], "host": 0}}}


def _head(style: Style, kind: str, uid: str, model: str) -> dict[str, Any]:
    created_s = drawn_ms(uid) // 1000
    return {
        "id": style.prefix + uid,
        "object": kind,
        "created": created_s,
        "model": model,
        "system_fingerprint": None,
    }


def _framed(chunks: Sequence[Chunk], entry_id: str) -> bytes:
    """Return the frames of *chunks*, the last one with an id."""
    if len(chunks) == 1 and isinstance(chunks[0], bytes):
        return sse.frame(chunks[0], entry_id)
    return b"".join(_pieces_of(chunks, entry_id))


def _pieces_of(chunks: Sequence[Chunk], entry_id: str) -> Iterator[bytes]:
    """As `_framed`, in pieces."""
    for index, chunk in enumerate(chunks, 1):
        own = entry_id if index == len(chunks) else ""
        if isinstance(chunk, bytes):
            yield sse.frame(chunk, own)
        else:
            yield from sse.frame_pieces(chunk, own)
