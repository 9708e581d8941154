"""A request in a few figures: a fold of the ends of its history, for `top`, the live page and lists of requests.

Knows no log and no clock. How long a history is does not matter: only its first events and its last one are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import orjson

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    Answered,
    Cancelled,
    End,
    Failed,
    Finished,
    HistoryEvent,
    Preempted,
    Submitted,
    TakenOver,
    Tokenized,
    TokensProduced,
)
from pipeline.log.protocol import Entry
from pipeline.log.snapshot import HistoryEnds
from pipeline.names import GENERATE, SEAL, TOKENIZE, parse_id
from pipeline.walk import PROMPT, Moment, walk

HEAD_ENTRIES: Final = 8
"""No more is looked at of what happened to a request before its first token."""
MOST_LABELS: Final = 2000
"""Longer labels, as JSON, are not kept."""

Sees: TypeAlias = Callable[[str], bool]
"""Says whether somebody may see the requests of an owner."""

RequestState: TypeAlias = Literal[
    "queued",  # no tokenizer has read it
    "tokenizing",
    "waiting",  # for an engine, or in one for pages
    "running",
    "preempted",
    "finished",
    "failed",
    "cancelled",
    "unreadable",
]
ENDED: Final = frozenset({"finished", "failed", "cancelled", "unreadable"})


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of one request so far."""

    uid: str
    known_to: str = ""
    """The last id that was read before its first token; SEAL: no more of that is needed."""
    state: RequestState = "queued"
    reason: str = ""
    """Why it ended."""
    endpoint: str = ""
    model: str = ""
    owner: str = ""
    """As in Submitted."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """As in Submitted; empty where they are long."""
    replay_of: str = ""
    """The uid of the request that it computes again."""
    submitted_ms: int = 0
    ended_ms: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    engine: str = ""
    epoch: int = 0
    tokens_per_s: float | None = None
    """While it runs: since the snapshot before, or its submit. After that: from its first token to its last."""
    looked_ms: int = 0


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request."""

    uid: str
    state: RequestState
    reason: str
    endpoint: str
    age_ms: int
    """Since its submit."""
    took_ms: int | None
    """Until its end."""
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    tokens_per_s: float | None
    engine: str
    """Empty while no engine has the request, or if the engine is not known."""


def ends_of(history: Sequence[Entry]) -> HistoryEnds:
    """Return the ends of a whole history."""
    head = tuple(entry for entry in history[:HEAD_ENTRIES] if entry.id != SEAL and not parse_id(entry.id)[0])
    return HistoryEnds(bool(history), head, history[-1] if len(history) > len(head) else None)


def heard(facts: RequestFacts, peek: HistoryEnds, now_ms: int, holder: str = "") -> RequestFacts:
    """Return what is known of a request that had not ended, after a peek at its history.

    *now_ms*: the moment of the peek, by Redis' clock. *holder*: the slot of the worker that has the request, if known.
    """
    before = facts
    if facts.state == "tokenizing":  # as was true then
        facts = replace(facts, state="queued")
    try:
        for moment in walk(peek.head, over_holes=True, without=PROMPT):
            facts = replace(_after(facts, moment), known_to=moment.id)
        for moment in walk([peek.last] if peek.last is not None else [], over_holes=True):
            facts = _after(facts, moment)
    except UndecodableEvent:
        return replace(facts, state="unreadable")
    if facts.cached_tokens is not None or facts.output_tokens:
        facts = replace(facts, known_to=SEAL)
    if holder.startswith(TOKENIZE) and facts.state == "queued":
        facts = replace(facts, state="tokenizing")
    elif holder.startswith(GENERATE):
        facts = replace(facts, engine=holder)
    if facts.state not in ENDED:
        seconds = (now_ms - (before.looked_ms or facts.submitted_ms)) / 1000
        made = facts.output_tokens - before.output_tokens
        facts = replace(facts, tokens_per_s=made / seconds if facts.output_tokens and seconds > 0 else None)
    return replace(facts, looked_ms=now_ms)


def _after(facts: RequestFacts, moment: Moment) -> RequestFacts:
    if isinstance(moment.event, End):
        facts = replace(facts, ended_ms=moment.event.ms)
    else:
        facts = replace(facts, output_tokens=max(moment.n, facts.output_tokens))
    return _told(facts, moment.event)


def _told(facts: RequestFacts, event: HistoryEvent) -> RequestFacts:
    match event:
        case Submitted():
            return replace(
                facts,
                state="queued",
                endpoint=event.endpoint,
                model=event.model,
                owner=event.owner,
                labels=event.labels if len(orjson.dumps(event.labels)) <= MOST_LABELS else {},
                replay_of=event.replay.of if event.replay is not None else "",
                submitted_ms=event.ms,
            )
        case Tokenized():
            return replace(facts, state="waiting", prompt_tokens=len(event.token_ids))
        case Admitted():
            cached = event.cached_tokens if facts.cached_tokens is None else facts.cached_tokens
            return replace(facts, state="running", engine=event.engine, epoch=event.epoch, cached_tokens=cached)
        case Preempted():
            return replace(facts, state="preempted", engine=event.engine, epoch=event.epoch)
        case TakenOver():
            return replace(facts, state="running", engine=event.engine, epoch=event.epoch)
        case TokensProduced():  # it names the epoch alone, and epochs are counted for each slot
            epoch = int(event.step.partition("-")[0] or 0)
            engine = facts.engine if epoch == facts.epoch else ""
            return replace(facts, state="running", engine=engine, epoch=epoch)
        case Finished():
            made_ms = event.timings.total_ms - event.timings.first_token_ms
            return replace(
                facts,
                state="finished",
                reason=event.reason,
                prompt_tokens=event.usage.prompt_tokens,
                cached_tokens=event.usage.cached_tokens,
                output_tokens=event.n,
                tokens_per_s=(event.n - 1) * 1000 / made_ms if made_ms > 0 else None,
            )
        case Failed():
            return replace(facts, state="failed", reason=event.code, output_tokens=event.n, tokens_per_s=None)
        case Cancelled():
            reason = f"by {event.by}"
            return replace(facts, state="cancelled", reason=reason, output_tokens=event.n, tokens_per_s=None)
        case Answered():
            counted = len(event.token_ids) or facts.prompt_tokens
            return replace(facts, state="finished", reason=f"by {event.by}", prompt_tokens=counted)


def request_view(facts: RequestFacts, now_ms: int) -> RequestView:
    """Return a request as `top` shows it."""
    return RequestView(
        uid=facts.uid,
        state=facts.state,
        reason=facts.reason,
        endpoint=facts.endpoint,
        age_ms=max(now_ms - facts.submitted_ms, 0) if facts.submitted_ms else 0,
        took_ms=max(facts.ended_ms - facts.submitted_ms, 0) if facts.ended_ms else None,
        prompt_tokens=facts.prompt_tokens,
        cached_tokens=facts.cached_tokens,
        output_tokens=facts.output_tokens,
        tokens_per_s=facts.tokens_per_s,
        engine=facts.engine,
    )
