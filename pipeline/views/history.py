"""The story of a request: a pure fold of its history into plain data, for people and for the pages that show it.

Knows the vocabulary and the ids of a history; no clock, no log, no text layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

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
)
from pipeline.log.protocol import Entry
from pipeline.views.made import Made, times_made
from pipeline.walk import UNTOLD, Moment, walk

State: TypeAlias = Literal["queued", "tokenized", "running", "finished", "failed", "cancelled"]

TOLD_ELSEWHERE = frozenset(
    {"kind", "v", "n"}  # of the moment itself
    | {"frontend", "by", "engine", "epoch"}  # who
    | {"endpoint", "model", "messages", "prompt", "prompt_ids", "sampling", "deadline_ms", "labels"}  # of the request
    | {"constraint", "grammar"}
    | {"token_ids", "pieces", "tokens", "text", "usage", "timings"}
)
"""Fields of events that a moment does not repeat. It shows all others, also those that are added later."""


def story(uid: str, history: Sequence[Entry]) -> dict[str, Any]:
    """Fold a history into plain data: what was asked, what came of it, and every moment in order.

    A moment has `at_ms` (since submit), `id`, `what` (the event's kind), `who`, `n` (tokens there were then) and the
    event's other fields. Consecutive token events of one engine and epoch are one moment: `first_n` to `n`, `id` to
    `last_id`, with `count`, `last_at_ms`, the `longest_pause_ms` between two of them in the engine, and the
    `longest_client_pause_ms` between two commits of them for the client. Missing tokens are a moment
    `missing`. Only a finished request has `finish_reason`, `usage` and `timings`; only a failed one has `error`. A copy
    that lacks the beginning of the history is told from its first entry on.

    Raises:
        UndecodableEvent: There are no entries, or one does not decode.
    """
    if not history:
        raise UndecodableEvent(f"the history of {uid} has no entries")
    moments = list(walk(history, over_holes=True, without=UNTOLD))
    told = _Story(uid, state_of(history), moments[0].event.ms, times_made(moments))
    for moment in moments:
        told.hear(moment)
    return told.plain()


def state_of(history: Sequence[Entry]) -> State:
    """Return how far the request has come, from the kinds of its events alone.

    Raises:
        UndecodableEvent: There are no entries.
    """
    if not history:
        raise UndecodableEvent("the history has no entries")
    state: State = "queued"
    for entry in history:
        state = _STATES.get(entry.fields.get("kind", ""), state)
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


_STATES: dict[str, State] = {
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


class _Story:
    """What is known after each event."""

    def __init__(self, uid: str, state: State, began_ms: int, made: Mapping[int, Made]) -> None:
        self._began_ms = began_ms
        self._made = made
        self._engine = ""
        """The engine that the last mark named; token events name only the epoch."""
        self._n = 0
        self._texts: list[str] = []
        self._moments: list[dict[str, Any]] = []
        self._end: dict[str, Any] = {}
        self._known: dict[str, Any] = {
            "uid": uid,
            "state": state,
            "endpoint": "",
            "model": "",
            "submitted_ms": began_ms,
            "deadline_ms": 0,
            "labels": {},
            "sampling": {},
            "prompt_tokens": None,
        }

    def plain(self) -> dict[str, Any]:
        """Return the story so far."""
        return (
            self._known
            | {"completion_tokens": self._n, "text": "".join(self._texts)}
            | self._end
            | {"moments": self._moments}
        )

    def hear(self, moment: Moment) -> None:
        """Take in the next event."""
        entry_id, n, event, missing = moment
        if missing:
            there = self._moment(event.ms, entry_id, "missing", "", missing[-1])
            self._moments.append(there | {"first_n": missing[0], "count": len(missing)})
        self._n = n
        match event:
            case Submitted():
                self._known |= {
                    "endpoint": event.endpoint,
                    "model": event.model,
                    "deadline_ms": event.deadline_ms,
                    "labels": event.labels,
                    "sampling": event.sampling.model_dump(mode="json"),
                }
                constraint = {} if event.constraint is None else {"constraint": event.constraint.kind}
                self._tell(entry_id, event, event.frontend, **constraint)
            case Tokenized():
                self._known["prompt_tokens"] = len(event.token_ids)
                grammar = {"grammar_chars": len(event.grammar)} if event.grammar else {}
                markup = {"calls": event.markup.tools, "thinking": " ".join(event.markup.think)}
                told = grammar | {name: text for name, text in markup.items() if text}
                self._tell(entry_id, event, event.by, prompt_tokens=len(event.token_ids), **told)
            case TokensProduced():
                self._take_tokens(entry_id, event)
            case Admitted() | Preempted() | TakenOver():
                self._engine = event.engine
                self._tell(entry_id, event, f"{event.engine} epoch {event.epoch}")
            case Finished():
                self._known["prompt_tokens"] = event.usage.prompt_tokens
                self._end = {
                    "finish_reason": event.reason,
                    "usage": event.usage.model_dump(mode="json"),
                    "timings": event.timings.model_dump(mode="json"),
                }
                self._tell(entry_id, event, "")
            case Failed():
                self._end = {"error": {"code": event.code, "message": event.message, "status": event.status}}
                if event.param:
                    self._end["error"]["param"] = event.param
                self._tell(entry_id, event, "")
            case Cancelled():
                self._tell(entry_id, event, event.by)
            case Answered():
                self._texts.append(event.text)
                if event.token_ids:
                    self._known["prompt_tokens"] = len(event.token_ids)
                self._tell(entry_id, event, event.by)

    def _tell(self, entry_id: str, event: HistoryEvent, who: str, **details: Any) -> None:
        shown = {name: value for name, value in as_plain(event).items() if name not in TOLD_ELSEWHERE}
        self._moments.append(self._moment(event.ms, entry_id, event.kind, who, self._n) | details | shown)

    def _moment(self, ms: int, entry_id: str, what: str, who: str, n: int) -> dict[str, Any]:
        return {"at_ms": ms - self._began_ms, "id": entry_id, "what": what, "who": who, "n": n}

    def _take_tokens(self, entry_id: str, event: TokensProduced) -> None:
        n, first_n = self._n, self._n - event.count + 1
        who = f"{self._engine} epoch {event.step.partition('-')[0]}".strip()
        self._texts.append(event.text)
        last = self._moments[-1] if self._moments else {}
        goes_on = last.get("what") == "tokens" and last["who"] == who
        made = self._made
        pauses_ms = [made[each].ms - made[each - 1].ms for each in range(first_n + (not goes_on), n + 1)]
        longest_ms = max(pauses_ms, default=0)
        if goes_on:
            at_ms = event.ms - self._began_ms
            client_ms = max(last["longest_client_pause_ms"], at_ms - last["last_at_ms"])
            last |= {
                "longest_pause_ms": max(last["longest_pause_ms"], longest_ms),
                "longest_client_pause_ms": client_ms,
            }
            last |= {"n": n, "last_id": entry_id, "count": last["count"] + event.count, "last_at_ms": at_ms}
            last["chunks"] += event.chunks
        else:
            moment = self._moment(event.ms, entry_id, "tokens", who, n)
            moment |= {"first_n": first_n, "last_id": entry_id, "count": event.count}
            moment |= {"last_at_ms": moment["at_ms"], "longest_pause_ms": longest_ms, "longest_client_pause_ms": 0}
            self._moments.append(moment | {"chunks": event.chunks})
