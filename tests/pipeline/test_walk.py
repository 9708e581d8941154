"""The walk over a history: which events it gives, where, and what it finds missing."""

from __future__ import annotations

import pytest
from support.histories import entries_of, moments_of

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    AnyEvent,
    Cancelled,
    SamplingParams,
    StepCompleted,
    Submitted,
    TakenOver,
    Tokenized,
    TokensProduced,
)
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID
from pipeline.walk import walk


def tokens(*ids: int) -> TokensProduced:
    return TokensProduced(count=len(ids), tokens=ids, text="x" * len(ids), step="1-1")


def takeover() -> TakenOver:
    return TakenOver(engine="generate-0", epoch=2)


HISTORY: list[tuple[str, AnyEvent]] = [
    (SUBMITTED_ID, Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams())),
    (TOKENIZED_ID, Tokenized(token_ids=(1, 2), fingerprint="f", by="tokenize-0")),
    ("1-0", tokens(7)),
    ("1-1", takeover()),
    ("3-0", tokens(8, 9)),
    (SEAL, Cancelled(n=3, by="client")),
]


def test_each_event_comes_with_its_id_and_how_many_tokens_there_were() -> None:
    assert [(entry_id, n, event) for entry_id, n, event, _ in walk(entries_of(HISTORY))] == [
        (entry_id, n, event) for (entry_id, event), n in zip(HISTORY, (0, 0, 1, 1, 3, 3), strict=True)
    ]
    assert not any(moment.missing for moment in walk(entries_of(HISTORY)))


def test_a_history_that_is_not_there_has_no_events() -> None:
    assert list(walk([])) == []


@pytest.mark.parametrize(
    ("entry_id", "event", "missing"),
    [
        ("3-0", tokens(9), range(2, 3)),
        ("5-0", tokens(8, 9), range(2, 4)),
        ("3-1", takeover(), range(2, 4)),
        (SEAL, Cancelled(n=4, by="client"), range(2, 5)),
    ],
)
def test_tokens_that_are_missing_are_named_or_refused(entry_id: str, event: AnyEvent, missing: range) -> None:
    history = [*HISTORY[:3], (entry_id, event)]
    assert moments_of(history)[-1].missing == missing
    with pytest.raises(UndecodableEvent, match=entry_id):
        list(walk(entries_of(history)))


def test_a_walk_may_begin_in_the_middle() -> None:
    assert [moment.n for moment in walk(entries_of(HISTORY[3:]), n=1)] == [1, 3, 3]
    assert next(walk(entries_of(HISTORY[4:]), n=0, over_holes=True)).missing == range(1, 2)


def test_tokens_that_are_there_twice_are_refused() -> None:
    with pytest.raises(UndecodableEvent, match="2-0"):
        list(walk(entries_of([*HISTORY[:3], ("2-0", tokens(7, 8))])))


def test_an_end_that_counts_fewer_tokens_takes_none_away() -> None:
    (*_, last) = walk(entries_of([*HISTORY[:3], (SEAL, Cancelled(n=0, by="client"))]))
    assert (last.n, last.missing) == (1, range(2, 2))


def test_a_step_belongs_into_no_history() -> None:
    with pytest.raises(UndecodableEvent, match="4-0"):
        list(walk(entries_of([("4-0", StepCompleted(rows=()))])))


def test_the_walk_gives_what_it_can_before_an_entry_that_does_not_decode() -> None:
    moments = walk([*entries_of(HISTORY[:1]), Entry("1-0", {"kind": "nonsense"})])
    assert next(moments).id == SUBMITTED_ID
    with pytest.raises(UndecodableEvent, match="unknown kind"):
        next(moments)
