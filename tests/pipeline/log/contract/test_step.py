"""The contract of the log: step and flush."""

from __future__ import annotations

import threading

import pytest
from log_contract import (
    CANCELLED,
    LONG_MS,
    STEPS,
    TOKENIZED,
    Detokenizer,
    accept,
    another,
    end,
    own,
    own_after,
    read_one,
    step,
    step_of,
    submit,
)

from pipeline.errors import Fenced
from pipeline.events import decode
from pipeline.log.protocol import StreamLog, Submission
from pipeline.names import parse_id

# step


def test_a_step_reads_as_it_was_said_under_epoch_and_number(log: StreamLog) -> None:
    owner = own_after(log, own(log, "generate-0"))
    step(log, owner, 7)
    entry = read_one(log, STEPS, "detokenize-0")
    assert entry.id == "2-7"
    assert decode(entry.fields).model_copy(update={"ms": 0}) == step_of(n=7)
    assert int(entry.fields["ms"]) > 0


def test_a_step_is_fenced(log: StreamLog) -> None:
    accept(log, "a")
    zombie = own(log, "generate-0")
    (entry,) = log.take(zombie, 8, control_cursor="0-0").entries
    own_after(log, zombie)
    with pytest.raises(Fenced):
        step(log, zombie, 1, entry.id)
    assert log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0) == []
    assert log.pending(TOKENIZED, "generate-0") == [entry]


def test_a_retried_step_leaves_one_entry_and_answers_the_same(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    (entry,) = log.take(owner, 8, control_cursor="0-0").entries
    end(log, "a", CANCELLED)
    first = step(log, owner, 1, entry.id)
    assert step(log, owner, 1, entry.id) == first
    assert len(log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0)) == 1


def test_a_step_of_an_older_number_is_not_appended(log: StreamLog) -> None:
    owner = own(log, "generate-0")
    step(log, owner, 2)
    assert step(log, owner, 1).steps_length == 1


def test_a_step_deletes_the_entries_that_ended(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    (entry,) = log.take(owner, 8, control_cursor="0-0").entries
    assert submit(log, "b", max_queued=1) is Submission.BUSY
    step(log, owner, 1, entry.id)
    assert submit(log, "b", max_queued=1) is Submission.ACCEPTED


def test_a_step_returns_how_many_wait_for_the_detokenizer(log: StreamLog, detokenizer: Detokenizer) -> None:
    entry = detokenizer.read_step()
    assert step(log, detokenizer.engine, 2).steps_length == 2
    detokenizer.commit(entry)
    assert step(log, detokenizer.engine, 3).steps_length == 2


def test_a_step_says_whether_there_may_be_something_to_take(log: StreamLog) -> None:
    owner = own(log, "generate-0")
    assert step(log, owner, 1).newest == "0-0"
    accept(log, "a", "b")
    taken = log.take(owner, 8, control_cursor="0-0")
    assert step(log, owner, 2).newest == taken.cursor == taken.entries[-1].id
    accept(log, "c")
    assert parse_id(step(log, owner, 3).newest) > parse_id(taken.cursor)
    entries = [*taken.entries, *log.take(owner, 8, control_cursor="0-0").entries]
    assert step(log, owner, 4, *(entry.id for entry in entries)).newest == "0-0"


def test_a_step_keeps_the_lease(log: StreamLog) -> None:
    owner = own(log, "generate-0", lease_ms=LONG_MS)
    log.step(owner, 1, step_of(), ended=(), control_cursor="0-0", lease_ms=10 * LONG_MS)
    assert log.lease("generate-0").ttl_ms > LONG_MS


# flush


def test_take_and_step_say_once_that_a_flush_was_asked_for(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    assert log.take(owner, 0, control_cursor="0-0").flush == ""
    first = log.flush("web-0")
    taken = log.take(owner, 8, control_cursor="0-0")
    assert (taken.flush, taken.ended) == (first, ())
    assert log.take(owner, 8, control_cursor=taken.control_cursor).flush == ""
    second = log.flush("web-0")
    committed = step(log, owner, 1, cursor=taken.control_cursor)
    assert (committed.flush, committed.ended) == (second, ())
    assert step(log, owner, 2, cursor=committed.control_cursor).flush == ""


def test_every_engine_hears_of_a_flush_and_the_last_one_stands_for_all(log: StreamLog) -> None:
    flushes = [log.flush("web-0") for _ in range(3)]
    assert [parse_id(flush) for flush in flushes] == sorted({parse_id(flush) for flush in flushes})
    for slot in ("generate-0", "generate-1"):
        assert log.take(own(log, slot), 0, control_cursor="0-0").flush == flushes[-1]


def test_a_flush_among_ends_hides_none_of_them(log: StreamLog) -> None:
    accept(log, "a", "b")
    end(log, "a", CANCELLED)
    flush = log.flush("web-0")
    end(log, "b", CANCELLED)
    taken = log.take(own(log, "generate-0"), 0, control_cursor="0-0")
    assert (taken.ended, taken.flush) == (("a", "b"), flush)


def test_wait_returns_when_a_flush_was_asked_for(log: StreamLog) -> None:
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    waiting = another(log)
    thread = threading.Thread(target=lambda: waiting.wait(taken.cursor, taken.control_cursor, block_ms=LONG_MS))
    thread.start()
    log.flush("web-0")
    thread.join(1.5)  # less than the longest block
    assert not thread.is_alive()
