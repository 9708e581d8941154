"""The contract of the log: tokenized."""

from __future__ import annotations

from log_contract import CANCELLED, SUBMITTED, accept, end, events, history, ids, own, read_one, submit, tokenize

from pipeline.events import Tokenized
from pipeline.log.protocol import Entry, StreamLog, Submission
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, parse_id


def test_tokenized_writes_the_tokens_and_hands_the_request_to_the_engines(log: StreamLog) -> None:
    submit(log, frontend="web-3")
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert tokenize(log, entry)
    assert ids(log) == [SUBMITTED_ID, TOKENIZED_ID]
    assert events(log)[1] == Tokenized(token_ids=(5, 6, 7), fingerprint="t", by="tokenize-0")
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    assert [entry.fields for entry in taken.entries] == [{"uid": "a", "frontend": "web-3"}]


def test_a_repeated_tokenized_is_lost_and_changes_nothing(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert tokenize(log, entry)
    before = history(log)
    assert not tokenize(log, entry)
    assert history(log) == before
    assert len(log.take(own(log, "generate-0"), 8, control_cursor="0-0").entries) == 1


def test_tokenized_consumes_its_entry(log: StreamLog) -> None:
    accept(log, "a")
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert submit(log, "b", max_queued=2) is Submission.ACCEPTED


def test_tokenized_of_an_entry_that_nobody_read_is_lost_and_the_entry_stays(log: StreamLog) -> None:
    submit(log, "a")
    submit(log, "b")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=2, block_ms=0)
    submit(log, "c")
    unread = Entry(f"{parse_id(second.id)[0] + 10**9}-0", first.fields)
    assert not tokenize(log, unread)
    assert read_one(log, SUBMITTED, "tokenize-0").fields["uid"] == "c"


def test_tokenized_after_a_cancel_consumes_the_entry_and_writes_nothing(log: StreamLog) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    end(log, "a", CANCELLED)
    assert not tokenize(log, entry)
    assert ids(log) == [SUBMITTED_ID, SEAL]
    assert log.pending(SUBMITTED, "tokenize-0") == []
    assert log.take(own(log, "generate-0"), 8, control_cursor="0-0").entries == ()
