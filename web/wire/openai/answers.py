"""An answer so far, choice by choice: a fold of its events."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pipeline.events import Finished, Logprob, Logprobs, Presentation, PromptInfo, Submitted, TokensProduced
from pipeline.names import sibling_uids
from web.wire.frames import ClientEvent
from web.wire.markup.reader import Piece, Reader, reader_for, tools_of
from web.wire.markup.source import ToolParameters


class AnswerPart(NamedTuple):
    """What one event adds to an answer, as the client sees it."""

    text: str
    token_ids: tuple[int, ...] = ()
    scores: Sequence[Logprob] = ()
    pieces: Sequence[Piece] = ()
    """What the text consists of, if it has markup."""


class Chat(NamedTuple):
    """A request with a conversation."""

    request: Submitted
    tools: Callable[[], Mapping[str, ToolParameters]]
    """Returns what readers have to know about its tools. Siblings share it."""


@dataclass(slots=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """One of the answers to a request."""

    index: int
    shown: Presentation
    uid: str = ""
    """Its own uid, also if it has siblings."""
    chat: Chat | None = None
    """The request, if the markup of its answer is read."""
    stop_token_ids: tuple[int, ...] = ()
    """The stop tokens that the client named."""
    content: bytearray = field(default_factory=bytearray)
    """The text, in UTF-8: as a list of pieces it takes twenty times as much memory. For an answer with markup, only the
    content."""
    reasoning: bytearray = field(default_factory=bytearray)
    calls: list[Call] = field(default_factory=list)
    begun: list[tuple[Literal["content", "reasoning", "call"], int]] = field(default_factory=list)
    """Where parts of one kind begin: a byte of the content or of the reasoning, or the number of a call."""
    reader: Reader | None = None
    """Reads the markup, if there is any; known with the first token."""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    scores: Logprobs = field(default_factory=Logprobs)
    prompt: PromptInfo | None = None
    finished: Finished | None = None
    scorer: Choice | None = None
    """The first choice of the same prompt, if that has the scores of the prompt for all of them."""

    @property
    def text(self) -> str:
        return self.content.decode()

    @property
    def told_prompt(self) -> PromptInfo | None:
        """The prompt, as the client is told of it."""
        if self.scorer is None or self.scorer.prompt is None:
            return self.prompt
        scored = self.scorer.prompt
        own = scored if self.prompt is None else self.prompt
        return own.model_copy(update={"scores": scored.scores, "first": scored.first})

    @property
    def waits(self) -> bool:
        """Return whether it waits for another choice, which has the scores of their prompt."""
        return self.scorer is not None and self.scorer.prompt is None and self.scorer.finished is None

    @property
    def reason(self) -> str:
        """Why it ended; only after the end."""
        assert self.finished is not None
        reason = "length" if self.shown.prompt_only else self.finished.reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    @property
    def matched(self) -> str | int | None:
        """The stop string or the token that ended it; None: the limit of its length did."""
        assert self.finished is not None
        if self.reason == "length":
            return None
        return self.finished.stop_string or (self.token_ids[-1] if self.token_ids else None)

    def apply(self, event: TokensProduced) -> AnswerPart:
        """Add tokens; return the part that the client sees."""
        self.prompt = self.prompt or event.prompt
        if self.shown.prompt_only:
            return AnswerPart("")
        self.token_ids.extend(event.tokens)
        if event.scores:
            self.scores.extend(event.scores)
        if event.markup is not None and self.reader is None and self.chat is not None:
            self.reader = reader_for(event.markup, self.chat.request, self.chat.tools)
        if self.reader is None:
            self.content += event.text.encode()
            return AnswerPart(event.text, event.tokens, event.scores)
        pieces = self._kept(self.reader.take(event.text, len(event.tokens)))
        return AnswerPart(event.text, event.tokens, event.scores, pieces)

    def finish(self, finished: Finished) -> Sequence[Piece]:
        """Say how it ended; return the last pieces of an answer with markup."""
        self.finished = finished
        return () if self.reader is None else self._kept(self.reader.finish(cut=finished.reason == "length"))

    def _kept(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Add *pieces*; return those that the client sees."""
        if self.shown.reasoning == "hidden":
            pieces = [piece for piece in pieces if piece.kind != "reasoning"]
        for piece in pieces:
            if piece.kind == "call" or (piece.text and piece.kind != "arguments" and self._kind != piece.kind):
                of_kind = {"content": len(self.content), "reasoning": len(self.reasoning), "call": piece.call}
                self.begun.append((piece.kind, of_kind[piece.kind]))
            match piece.kind:
                case "content":
                    self.content += piece.text.encode()
                case "reasoning":
                    self.reasoning += piece.text.encode()
                case "call":
                    self.calls.append(Call(self._call_id(piece), piece.text))
                case "arguments":
                    self.calls[piece.call].arguments.append(piece.text)
        return pieces

    def _call_id(self, call: Piece) -> str:
        """Return the id of a call, the same for every reader.

        Mistral's templates take ids of nine characters alone. Kimi's write the id where the model wrote the name
        and the number of a call in the conversation.
        """
        assert self.reader is not None and self.chat is not None
        if self.reader.format == "kimi_k2":
            before = sum(len(message.get("tool_calls") or ()) for message in self.chat.request.messages)
            return f"functions.{call.text}:{before + call.call}"
        digest = hashlib.blake2b(f"{self.uid}/{call.call}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self.reader.format == "mistral" else f"call_{digest}"

    @property
    def _kind(self) -> str:
        return self.begun[-1][0] if self.begun else ""

    def blocks(self) -> Iterator[tuple[str, int, int]]:
        """Yield the parts of the answer in their order: the kind, and the bytes of it; of a call, its number."""
        ends: dict[str, int] = {"content": len(self.content), "reasoning": len(self.reasoning)}
        found = []
        for kind, start in reversed(self.begun or ([("content", 0)] if self.content else [])):
            found.append((kind, start, ends.get(kind, start)))
            ends[kind] = start
        yield from reversed(found)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts: while the answer runs those so far, at the end those of the log."""
        if self.finished is None:
            prompt = self.prompt or PromptInfo(num_tokens=0)
            usage = _usage(prompt.num_tokens, len(self.token_ids), prompt.cached_tokens)
            return usage | _details([self])
        return usage_of([self])


def choices_for(uid: str, events: Sequence[Submitted]) -> list[Choice]:
    """Return the empty choices of siblings, which share *uid*, or of the single request *uid*.

    Only the answer to a conversation has markup, and the replay of one: a prompt without a template is continued as it
    is.
    """
    tools = functools.cache(lambda: tools_of(events[0].templating.tools))
    choices = [
        Choice(
            index,
            event.presentation,
            own,
            Chat(event, tools) if event.messages or event.replay is not None else None,
            event.sampling.stop_token_ids,
        )
        for index, (own, event) in enumerate(zip(sibling_uids(uid, len(events)), events, strict=True))
    ]
    if len(choices) > 1 and events[0].sampling.prompt_logprobs is not None:
        for first in range(0, len(choices), events[0].presentation.choices):
            for choice in choices[first + 1 : first + events[0].presentation.choices]:
                choice.scorer = choices[first]
    return choices


class InOrder:
    """Holds the events of choices back until the scores of their prompt are there, which come with another choice."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._held: dict[int, list[ClientEvent]] = defaultdict(list)
        """Index of the choice that they wait for -> the events."""

    def ready(self, event: ClientEvent) -> Iterator[ClientEvent]:
        """Yield *event*, and those that waited for it; nothing if it has to wait. Each is applied before the next."""
        choice = self._choices[event.index]
        if choice.waits and isinstance(event.event, TokensProduced | Finished):
            self._held[event.index - event.index % choice.shown.choices].append(event)
            return
        yield event
        if event.index in self._held and not self._choices[event.index + 1].waits:
            yield from self._held.pop(event.index)


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of answers that have ended; a prompt counts once, whatever the number of its choices."""
    usages = [choice.finished.usage for choice in choices if choice.finished is not None]
    per_prompt = choices[0].shown.choices
    prompts = usages[::per_prompt]
    num_output = 0 if choices[0].shown.prompt_only else sum(usage.completion_tokens for usage in usages)
    usage = _usage(
        sum(usage.prompt_tokens for usage in prompts), num_output, sum(usage.cached_tokens for usage in prompts)
    )
    return usage | _details(choices)


def _details(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the field with the tokens of thinking, and those of a prediction that were drafted.

    As in OpenAI's API, every answer to a conversation has it.
    """
    if all(choice.chat is None for choice in choices):
        return {}
    readers = [choice.reader for choice in choices if choice.reader is not None]
    details = {"reasoning_tokens": sum(reader.reasoning_tokens for reader in readers)}
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        counts = [getattr(choice.finished.usage, name) for choice in choices if choice.finished is not None]
        if any(count is not None for count in counts):
            details[name] = sum(count or 0 for count in counts)
    return {"completion_tokens_details": details}


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
