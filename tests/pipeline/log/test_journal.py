"""The journal of an engine: a step reads as it was written, and takes little room."""

from __future__ import annotations

import pytest

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    Chunk,
    EventRow,
    Score,
    StepCompleted,
    StepStats,
    TokenRow,
    decode,
    encode,
    new_uid,
)
from pipeline.log.journal import JournalReader, JournalStep, JournalWriter, Mentions, Row, steps
from pipeline.log.protocol import Entry

UIDS = [new_uid() for _ in range(64)]
ADMITTED = EventRow(uid="c", n=0, event=Admitted(engine="generate-0", epoch=3, step=9, fingerprint="w"))


def entry_of(number: int, step: StepCompleted, epoch: int = 3) -> Entry:
    return Entry(f"{epoch}-{number}", {"ms": str(1000 + number)} | encode(step))


def written(*said: tuple[int, StepCompleted]) -> list[Entry]:
    writer = JournalWriter()
    entries = [entry_of(number, step) for number, step in said]
    return [Entry(entry.id, writer.fields(entry, step)) for entry, (_, step) in zip(entries, said, strict=True)]


def decodes(n: int, uids: list[str] = UIDS) -> StepCompleted:
    figures = StepStats(decode_rows=len(uids), running=len(uids), free_pages=812, forward_ms=11.312)
    return StepCompleted(rows=tuple(TokenRow(uid=uid, n=n, token=31000 + n) for uid in uids), figures=figures)


def test_a_step_reads_as_it_was_written() -> None:
    step = StepCompleted(
        rows=(
            ADMITTED,
            TokenRow(uid="a", n=4, token=17, score=Score(logprob=-1)),
            TokenRow(uid="b", n=9, token=18, end="length"),
            TokenRow(uid="c", n=1, token=19, chunks=2),
        ),
        released=("x",),
        figures=StepStats(decode_rows=2, prefill_rows=1, forward_ms=5),
        inputs=("drop x", "add 0 7 c"),
        chunks=(Chunk(uid="c", start=4, count=3),),
        schedule="{}",
        made_ms=997,
    )
    (read,) = steps(written((9, step)))
    assert read == JournalStep(
        epoch=3,
        number=9,
        ms=1009,
        rows=(Row("a", 4, 17, None, 0), Row("b", 9, 18, "length", 0), Row("c", 1, 19, None, 2)),
        events=(ADMITTED,),
        released=step.released,
        figures=step.figures,
        inputs=step.inputs,
        chunks=step.chunks,
        schedule="{}",
        said_made_ms=997,
    )
    assert read.made_ms == 997


def test_a_step_of_an_older_version_reads_as_a_new_one() -> None:
    step = StepCompleted(rows=(), released=("x",), inputs=("drop x",))
    fields = encode(step) | {"ms": "1009"}
    old = {{"released": "let_go", "inputs": "given"}.get(name, name): value for name, value in fields.items()}
    assert decode(old) == decode(fields)
    entries = [Entry("3-9", JournalWriter().fields(Entry("3-9", each), step)) for each in (old, fields)]
    assert entries[0].fields.keys() >= {"let_go", "given"}
    assert [*steps(entries[:1])] == [*steps(entries[1:])]


def test_a_step_without_news_names_no_request() -> None:
    first, second, third = written((1, decodes(1)), (2, decodes(2)), (3, decodes(3, UIDS[1:])))
    assert "rows" in first.fields and "rows" not in second.fields and "rows" in third.fields
    assert sum(map(len, second.fields.values())) < 64 * 6 + 120
    assert [[row[:3] for row in step.rows] for step in steps([first, second])][1] == [(uid, 2, 31002) for uid in UIDS]


def test_requests_that_end_need_no_names_in_the_next_step() -> None:
    ending = StepCompleted(rows=(TokenRow(uid="a", n=1, token=5, end="stop"), TokenRow(uid="b", n=3, token=6)))
    going_on = StepCompleted(rows=(TokenRow(uid="b", n=4, token=7),))
    entries = written((1, ending), (2, going_on))
    assert "rows" not in entries[1].fields
    assert [step.rows for step in steps(entries)][1] == (Row("b", 4, 7, None, 0),)


def test_a_request_with_several_tokens_in_a_step_is_expected_once_in_the_next_one() -> None:
    several = StepCompleted(
        rows=(*(TokenRow(uid="a", n=n, token=n) for n in (1, 2, 3)), TokenRow(uid="b", n=3, token=6))
    )
    ending = StepCompleted(
        rows=(
            TokenRow(uid="a", n=4, token=7),
            TokenRow(uid="b", n=4, token=8),
            TokenRow(uid="b", n=5, token=9, end="stop"),
        )
    )
    last = StepCompleted(rows=(TokenRow(uid="a", n=5, token=10),))
    entries = written((1, several), (2, StepCompleted(rows=(ending.rows[0], ending.rows[1]))), (3, last))
    assert ["rows" in entry.fields for entry in entries] == [True, False, True]
    entries = written((1, several), (2, ending), (3, last))
    assert ["rows" in entry.fields for entry in entries] == [True, True, False]
    assert [[row[:3] for row in step.rows] for step in steps(entries)] == [
        [("a", 1, 1), ("a", 2, 2), ("a", 3, 3), ("b", 3, 6)],
        [("a", 4, 7), ("b", 4, 8), ("b", 5, 9)],
        [("a", 5, 10)],
    ]
    mentions = Mentions(["a"], lambda texts: {word for text in texts for word in ("a", "b") if word in text})
    assert [mentions.has(entry) for entry in entries] == [True] * 3


@pytest.mark.parametrize("numbers", [(1, 3), (5, 5)], ids=["a step is missing", "a step is written again"])
def test_after_a_gap_the_requests_are_named_again(numbers: tuple[int, int]) -> None:
    assert all("rows" in entry.fields for entry in written((numbers[0], decodes(1)), (numbers[1], decodes(2))))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_journal_that_is_read_in_pieces_says_the_same(length: int) -> None:
    entries = written(*((number, decodes(number)) for number in range(1, 7)))
    reader, found = JournalReader(), list[JournalStep]()
    for first in range(0, len(entries), length):
        found += reader.steps(entries[first : first + length])
    assert found == list(steps(entries)) and len(found) == 6


def test_reading_begins_with_the_first_step_that_names_its_requests() -> None:
    entries = written(*((number, decodes(number)) for number in (1, 2, 3)), (4, decodes(4, UIDS[:2])))
    assert [step.number for step in steps(entries[1:])] == [4]


@pytest.mark.parametrize("fields", [{"rows": "1:a"}, {"tokens": "1"}, {"figures": "{"}, {"tokens": "x"}], ids=str)
def test_an_entry_that_does_not_decode_is_named(fields: dict[str, str]) -> None:
    with pytest.raises(UndecodableEvent, match="3-1"):
        list(steps([Entry("3-1", {"ms": "1", "rows": "", "tokens": ""} | fields)]))
