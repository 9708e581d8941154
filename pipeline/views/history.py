"""The story of a request: a pure fold of its history into plain data, for people and for the pages that show it.

Knows the vocabulary and the ids of a history; no clock, no log, no text layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import orjson

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    Answered,
    Cancelled,
    Failed,
    Finished,
    HistoryEvent,
    Preempted,
    Submitted,
    TakenOver,
    Tokenized,
    TokensProduced,
    as_plain,
    decode,
)
from pipeline.log.protocol import Entry
from pipeline.views.made import Made, Times
from pipeline.walk import UNTOLD, walk

State: TypeAlias = Literal["queued", "tokenized", "running", "finished", "failed", "cancelled"]

TOLD_ELSEWHERE = frozenset(
    {"kind", "v", "n"}  # of the moment itself
    | {"frontend", "by", "engine", "epoch"}  # who
    | {"endpoint", "model", "messages", "prompt", "prompt_ids", "sampling", "deadline_ms", "labels"}  # of the request
    | {"constraint", "grammar", "prediction"}
    | {"token_ids", "pieces", "tokens", "text", "usage", "timings"}
)
"""Fields of events that a moment does not repeat. It shows all others, also those that are added later."""
STATES: Final[Mapping[str, State]] = {
    "submitted": "queued",
    "tokenized": "tokenized",
    "admitted": "running",
    "preempted": "running",
    "taken_over": "running",
    "tokens": "running",
    "finished": "finished",
    "answered": "finished",
    "failed": "failed",
    "cancelled": "cancelled",
}
QUEUE: Final = "way"
"""The lane of what happens outside of engines. Each engine and epoch has a lane of its own."""
REQUEUED_FROM: Final = "requeued_from"
"""The label of a request that was sent again: the uid of the one that died."""


@dataclass(slots=True)
class Changes:
    """What an event changes in what is told of its request."""

    facts: dict[str, Any] = field(default_factory=dict)
    """As the fields of a story."""
    text: str = ""
    """Of the answer, that comes next."""
    moments: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Place -> the moment, new or another one."""
    bars: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Place -> the bar of a chart: its lane, what it is, from when to when (None: it goes on)."""
    tokens: list[dict[str, Any]] = field(default_factory=list)
    """Those of which it is known now when they were made."""


def story(uid: str, history: Sequence[Entry]) -> dict[str, Any]:
    """Fold a history into plain data: what was asked, what came of it, and every moment in order.

    A moment has `at_ms` (since submit), `id`, `what` (the event's kind), `who`, `n` (tokens there were then) and the
    event's other fields. Consecutive token events of one engine and epoch are one moment: `first_n` to `n`, `id` to
    `last_id`, with `count`, `last_at_ms`, the `longest_pause_ms` between two of them in the engine, and the
    `longest_client_pause_ms` between two commits of them for the client, and how many were `drafted` and `accepted`, if
    steps had drafts. Missing tokens are a moment `missing`. Only a finished request has `finish_reason`, `usage` and
    `timings`; only a failed one has `error`. A copy that lacks the beginning of the history is told from its first
    entry on.

    Raises:
        UndecodableEvent: There are no entries, or one does not decode.
    """
    if not history:
        raise UndecodableEvent(f"the history of {uid} has no entries")
    fold, texts, moments = Story(), list[str](), dict[int, dict[str, Any]]()
    told: dict[str, Any] = {"uid": uid, "state": "queued", "endpoint": "", "model": "", "submitted_ms": 0}
    told |= {"deadline_ms": 0, "labels": {}, "sampling": {}, "prompt_tokens": None}
    for moment in walk(history, over_holes=True, without=UNTOLD):
        changes = fold.add(moment.id, moment.n, moment.event)
        told |= changes.facts
        texts.append(changes.text)
        moments |= changes.moments
    fold.rest()
    return told | {"text": "".join(texts) + told.get("text", ""), "moments": list(moments.values())}


class Story:
    """Takes the events of a request one by one, and says what each of them changes in what is told of it.

    It keeps no more than the last moment, however long the history is.
    """

    def __init__(self) -> None:
        self._state: State = "queued"
        self._began_ms = 0
        self._last_ms = 0
        """When the client got the last token; at first when the request was submitted."""
        self._made_ms: int | None = 0
        """When the last token was made; None: the log lacks it."""
        self._engine = ""
        """The engine that the last mark named; token events name only the epoch."""
        self._n = 0
        self._times = Times()
        self._waiting: dict[int, dict[str, Any]] = {}
        """Tokens of which it is not known yet when they were made."""
        self._moment: dict[str, Any] = {}
        self._num_moments = 0
        self._bar: dict[str, Any] = {}
        """The one that is open."""
        self._num_bars = 0
        self._drawn = 0, 0
        """Number of the first token of the bar, and when the last one was made."""
        self._num_right = 0
        """Number of tokens to come that were drafted."""
        self._first_bars: list[tuple[int, dict[str, Any]]] = []
        """The wait for the first engine, and its prefill."""
        self._changes = Changes()

    def add(self, entry_id: str, n: int, event: HistoryEvent) -> Changes:
        """Take in the next event, after which there are *n* tokens."""
        self._changes = changes = Changes()
        missing = range(self._n + 1, n + 1 - (event.count if isinstance(event, TokensProduced) else 0))
        if not self._num_moments:
            self._began_ms = self._last_ms = self._made_ms = event.ms
            changes.facts["submitted_ms"] = event.ms
        if missing or not isinstance(event, TokensProduced):
            self._settle(self._times.rest())
        if missing:
            self._skip(entry_id, event.ms, missing)
        self._n = n
        self._state = STATES.get(event.kind, self._state)
        if isinstance(event, TokensProduced):
            self._take_tokens(entry_id, event)
        else:
            self._tell(entry_id, event)
            self._draw(event)
        changes.facts |= {"state": self._state, "completion_tokens": self._n}
        return changes

    def rest(self) -> Changes:
        """Say that no event is known after these: all tokens are told."""
        self._changes = Changes()
        self._settle(self._times.rest())
        return self._changes

    def _at(self, ms: int) -> int:
        return ms - self._began_ms

    # facts and moments

    def _tell(self, entry_id: str, event: HistoryEvent) -> None:
        facts, who, details = self._changes.facts, "", dict[str, Any]()
        match event:
            case Submitted():
                facts |= {
                    "endpoint": event.endpoint,
                    "model": event.model,
                    "deadline_ms": event.deadline_ms,
                    "labels": event.labels,
                    "sampling": event.sampling.model_dump(mode="json"),
                }
                who, details = event.frontend, {} if event.constraint is None else {"constraint": event.constraint.kind}
            case Tokenized():
                who, facts["prompt_tokens"] = event.by, len(event.token_ids)
                details = {"prompt_tokens": len(event.token_ids)}
                told: dict[str, object] = {
                    "predicted_tokens": len(event.prediction),
                    "grammar_chars": len(event.grammar),
                    "calls": event.markup.tools,
                }
                told |= {"thinking": " ".join(event.markup.think)}
                details |= {name: value for name, value in told.items() if value}
            case Admitted() | Preempted() | TakenOver():
                self._engine = event.engine
                who = f"{event.engine} epoch {event.epoch}"
            case Finished():
                facts |= {
                    "prompt_tokens": event.usage.prompt_tokens,
                    "finish_reason": event.reason,
                    "usage": event.usage.model_dump(mode="json", exclude_none=True),
                    "timings": event.timings.model_dump(mode="json"),
                }
            case Failed():
                facts["error"] = {"code": event.code, "message": event.message, "status": event.status}
                facts["error"] |= {"param": event.param} if event.param else {}
            case Cancelled():
                who = event.by
            case Answered():
                who, facts["text"] = event.by, event.text
                facts |= {"prompt_tokens": len(event.token_ids)} if event.token_ids else {}
        shown = {name: value for name, value in as_plain(event).items() if name not in TOLD_ELSEWHERE}
        self._begin_moment(event.ms, entry_id, event.kind, who, self._n, **details, **shown)

    def _begin_moment(self, ms: int, entry_id: str, what: str, who: str, n: int, **more: Any) -> None:
        self._moment = {"at_ms": self._at(ms), "id": entry_id, "what": what, "who": who, "n": n} | more
        self._changes.moments[self._num_moments] = self._moment
        self._num_moments += 1

    # tokens

    def _skip(self, entry_id: str, ms: int, missing: range) -> None:
        self._begin_moment(ms, entry_id, "missing", "", missing[-1], first_n=missing[0], count=len(missing))
        self._last_ms, self._made_ms = ms, None

    def _take_tokens(self, entry_id: str, event: TokensProduced) -> None:
        n, first_n, at_ms = self._n, self._n - event.count + 1, self._at(event.ms)
        who = f"{self._engine} epoch {event.step.partition('-')[0]}".strip()
        client_pause_ms = event.ms - self._last_ms
        self._changes.text = event.text
        if (self._moment.get("what"), self._moment.get("who")) == ("tokens", who):
            self._moment |= {"n": n, "last_id": entry_id, "count": self._moment["count"] + event.count}
            self._moment["last_at_ms"] = at_ms
            longest_ms = max(self._moment["longest_client_pause_ms"], client_pause_ms)
            self._moment["longest_client_pause_ms"] = longest_ms
            self._moment["chunks"] += event.chunks
            self._changes.moments[self._num_moments - 1] = self._moment
        else:
            self._settle(self._times.rest())
            run = {"first_n": first_n, "last_id": entry_id, "count": event.count, "last_at_ms": at_ms}
            pauses = {"longest_pause_ms": 0, "longest_client_pause_ms": 0}
            self._begin_moment(event.ms, entry_id, "tokens", who, n, **run, **pauses, chunks=event.chunks)
        if event.drafted:
            self._num_right = event.accepted
            for name, more in (("drafted", event.drafted), ("accepted", event.accepted)):
                self._moment[name] = self._moment.get(name, 0) + more
        for place, number in enumerate(range(first_n, n + 1)):
            was_drafted, self._num_right = self._num_right > 0, max(self._num_right - 1, 0)
            self._waiting[number] = {
                "n": number,
                "id": entry_id,
                "token": event.tokens[place],
                "text": event.text if number == n else "",
                "score": event.scores[place].model_dump(mode="json", exclude_unset=True) if event.scores else None,
                "who": who,
                "engine": self._engine,
                "step": event.step,
                "chunks": 0 if place else event.chunks,
                "drafted": was_drafted,
                "client_at_ms": at_ms,
                "client_pause_ms": 0 if place else client_pause_ms,
            }
        self._last_ms = event.ms
        self._settle(self._times.take(n, event))

    def _settle(self, times: Iterable[tuple[int, Made]]) -> None:
        """Tell of tokens when they were made, and draw them."""
        for n, made in times:
            token = self._waiting.pop(n)
            pause_ms = 0 if self._made_ms is None else made.ms - self._made_ms
            if n > self._moment["first_n"]:
                self._moment["longest_pause_ms"] = max(self._moment["longest_pause_ms"], pause_ms)
                self._changes.moments[self._num_moments - 1] = self._moment
            token |= {"at_ms": self._at(made.ms), "pause_ms": pause_ms}
            self._changes.tokens.append(token | {"commit": made.first, "estimated": made.is_estimate})
            self._made_ms = made.ms
            self._draw_token(token)

    # bars

    def _draw(self, event: HistoryEvent) -> None:
        """Close the bar that is open, and begin the next one."""
        at_ms, bar = self._at(event.ms), self._bar
        match event:
            case Submitted():
                self._begin_bar(QUEUE, "tokenize", at_ms, "queue and tokenizer")
            case Tokenized():
                self._begin_bar(QUEUE, "wait", at_ms, "waits for an engine")
            case Admitted():
                self._begin_bar(f"{event.engine} epoch {event.epoch}", "prefill", at_ms, "prefill")
                self._bar["step"] = f"{event.engine}/{event.epoch}-{event.step}"
                if bar and not self._first_bars:
                    self._first_bars = [(self._num_bars - 2, bar), (self._num_bars - 1, self._bar)]
            case Preempted():
                says = "preempted: its pages went to more important requests"
                self._begin_bar(QUEUE, "preempted", at_ms, says)
            case TakenOver():
                if bar and bar["lane"] != QUEUE:
                    lost_ms = self._drawn[1] if bar["kind"] == "decode" else bar["from_ms"]
                    self._begin_bar(QUEUE, "gone", lost_ms, "its engine is gone, and another one takes it over")
            case _:
                self._end_bars(event, at_ms)

    def _end_bars(self, event: HistoryEvent, at_ms: int) -> None:
        if isinstance(event, Answered) and self._bar:
            self._bar["says"] = "the tokenizer answers"
        self._close_bar(at_ms)
        if isinstance(event, Finished) and self._first_bars:  # the commit came at the end of a step
            (_, wait), (_, prefill) = self._first_bars
            wait["to_ms"] = prefill["from_ms"] = max(event.timings.admitted_ms, wait["from_ms"])
            prefill.pop("step", None)
            self._changes.bars.update(self._first_bars)

    def _draw_token(self, token: Mapping[str, Any]) -> None:
        n, at_ms = token["n"], token["at_ms"]
        if self._bar.get("kind") == "prefill":
            chunks = token["chunks"]
            if chunks:
                self._bar["says"] = f"prefill in {chunks} {'chunk' if chunks == 1 else 'chunks'}"
            self._begin_bar(token["who"], "decode", at_ms, "")
            self._drawn = n, at_ms
        if self._bar.get("kind") == "decode":
            self._drawn = self._drawn[0], at_ms
            self._bar["says"] = f"tokens {self._drawn[0]} to {n}"
            self._changes.bars[self._num_bars - 1] = self._bar

    def _begin_bar(self, lane: str, kind: str, from_ms: int, says: str) -> None:
        self._close_bar(from_ms)
        self._bar = {"lane": lane, "kind": kind, "from_ms": from_ms, "to_ms": None, "says": says}
        self._changes.bars[self._num_bars] = self._bar
        self._num_bars += 1

    def _close_bar(self, at_ms: int) -> None:
        if self._bar:
            last_ms = self._drawn[1] if self._bar["kind"] == "decode" else at_ms
            self._bar["to_ms"] = max(at_ms, last_ms)
            self._changes.bars[self._num_bars - 1] = self._bar
        self._bar = {}


def state_of(history: Sequence[Entry]) -> State:
    """Return how far the request has come, from the kinds of its events alone.

    Raises:
        UndecodableEvent: There are no entries.
    """
    if not history:
        raise UndecodableEvent("the history has no entries")
    state: State = "queued"
    for entry in history:
        state = STATES.get(entry.fields.get("kind", ""), state)
    return state


def copied_history(letter: Entry) -> list[Entry]:
    """Return the history in a dead letter. If the copy was cut, it has the first entry and the last ones.

    Raises:
        UndecodableEvent: The copy does not decode.
    """
    try:
        copies = orjson.loads(letter.fields["history"])
        if not all(isinstance(copy, list) and all(isinstance(part, str) for part in copy) for copy in copies):
            raise ValueError("expected lists of an id, names and values")
        return [Entry(entry_id, dict(zip(parts[::2], parts[1::2], strict=True))) for entry_id, *parts in copies]
    except (KeyError, TypeError, ValueError) as error:
        raise UndecodableEvent(f"the history in the dead letter {letter.id} does not decode: {error!r}") from error


def plain_letter(letter: Entry) -> dict[str, Any]:
    """Return what a letter says, but for the copy of the history."""
    return {"id": letter.id} | {
        name: text if name in ("uid", "stage", "stream", "error") else _value(text)
        for name, text in letter.fields.items()
        if name != "history"
    }


def sent_again(uid: str, history: Sequence[Entry]) -> Submitted | None:
    """Return the request that asks again for what *uid* asked, whose *history* may have its first entry alone.

    None: the history is gone. Raises UndecodableEvent if it is damaged.
    """
    event = decode(history[0].fields) if history else None
    if not isinstance(event, Submitted):
        return None
    return event.model_copy(
        update={"ms": 0, "deadline_ms": 0, "frontend": "", "labels": event.labels | {REQUEUED_FROM: uid}}
    )


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
