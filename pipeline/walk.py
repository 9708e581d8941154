"""The walk over a history with which every fold begins. Knows the ids of a history and how tokens follow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from pipeline.errors import UndecodableEvent
from pipeline.events import MOST_COUNT, End, HistoryEvent, StepCompleted, TokensProduced, decode
from pipeline.log.protocol import Entry
from pipeline.names import parse_id

PROMPT: Final = frozenset({"messages", "prompt", "prompt_ids"})
"""Fields of Submitted that can be long. Most readers need none of them."""
UNTOLD: Final = PROMPT | {"scores"}
"""PROMPT, and the log-probabilities of tokens: a story has neither."""
NOT_COMPUTED: Final = PROMPT | {"templating", "labels", "constraint"}
"""Fields of Submitted that no engine needs to compute the tokens."""


class Moment(NamedTuple):
    """One event of a history, in its place."""

    id: str
    n: int
    """Number of tokens that the request had after the event."""
    event: HistoryEvent
    missing: range
    """Numbers of the tokens that are missing in the history before the event."""


def walk(
    entries: Iterable[Entry], *, n: int = 0, over_holes: bool = False, without: Collection[str] = ()
) -> Iterator[Moment]:
    """Yield the events of a history in order, from its first entry on, or from a later one that comes after token *n*.

    *over_holes*: go on where tokens are missing; the reader handles that. *without*: fields that the reader does not
    need and that are not decoded, because prompts are long.

    Raises:
        UndecodableEvent: An entry does not decode, is a step, has no id of a history, or (unless *over_holes*) does not
            follow the one before.
    """
    for entry in entries:
        event = decode(entry.fields, without=without)
        if isinstance(event, StepCompleted):
            raise UndecodableEvent(f"entry {entry.id} is a step, which no history holds")
        after = max(event.n, n) if isinstance(event, End) else _number_in(entry.id)
        before = after - event.count if isinstance(event, TokensProduced) else after
        if isinstance(event, TokensProduced) and event.count != len(event.tokens):
            raise UndecodableEvent(f"the event {entry.id} counts {event.count} tokens and has {len(event.tokens)}")
        if before != n and not over_holes:
            raise UndecodableEvent(f"after token {n} comes the event {entry.id}")
        yield Moment(entry.id, after, event, range(n + 1, before + 1))
        n = after


def _number_in(entry_id: str) -> int:
    """Return the number of tokens in the id of an event."""
    try:
        n, _ = parse_id(entry_id)
    except ValueError:
        n = -1
    if not 0 <= n <= MOST_COUNT:
        raise UndecodableEvent(f"{entry_id[:60]!r} is not the id of an event: expected <tokens>-<number>")
    return n
