"""The contract of the log: step and flush."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.log_contract import LONG_MS, STEPS, TOKENIZED, Detokenizer, Scene, step_of

from pipeline.errors import Fenced, LogUnavailable
from pipeline.events import decode
from pipeline.log.protocol import Entry, StepCommitted
from pipeline.log.redis import RedisLog
from pipeline.names import parse_id

# step


def test_a_step_reads_as_it_was_said_under_epoch_and_number(scene: Scene) -> None:
    owner = scene.own_after(scene.own("generate-0"))
    scene.step(owner, 7)
    entry = scene.read_one(STEPS, "detokenize-0")
    assert entry.id == "2-7"
    assert decode(entry.fields).model_copy(update={"ms": 0}) == step_of(n=7)
    assert int(entry.fields["ms"]) > 0


def test_a_step_is_fenced(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    zombie = scene.own("generate-0")
    (entry,) = scene.take(zombie)
    scene.own_after(zombie)
    with pytest.raises(Fenced):
        scene.step(zombie, 1, entry.id)
    assert log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0) == []
    assert log.pending(TOKENIZED, "generate-0") == [entry]


def test_a_retried_step_leaves_one_entry_and_answers_the_same(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    owner = scene.own("generate-0")
    (entry,) = scene.take(owner)
    scene.end()
    first = scene.step(owner, 1, entry.id)
    again = scene.step(owner, 1, entry.id)
    assert again == replace(first, ms=again.ms)
    assert len(log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0)) == 1


def test_a_commit_without_steps_says_what_is_new_and_is_fenced(log: RedisLog, scene: Scene) -> None:
    def asked() -> StepCommitted:
        return log.step(owner, {}, ended=[], control_cursor=cursor, lease_ms=LONG_MS)

    owner, cursor = scene.own("generate-0"), "0-0"
    assert (asked().steps_length, list(asked().ended)) == (0, [])
    scene.accept("a", "b")
    before = scene.step(owner, 1)
    cursor = before.control_cursor
    scene.end("a")
    told = asked()
    assert (told.steps_length, told.newest, list(told.ended)) == (1, before.newest, ["a"])
    assert [entry.id for entry in log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0)] == ["1-1"]
    scene.own_after(owner)
    with pytest.raises(Fenced):
        asked()


def test_several_steps_are_one_commit(log: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    owner = scene.own("generate-0")
    ended = [entry.id for entry in scene.take(owner)]
    scene.step(owner, 1)
    steps = {number: step_of(n=number) for number in (2, 3, 5)}
    for _ in range(2):  # the second time as an engine does it that did not hear the answer
        done = log.step(owner, steps, ended=ended, control_cursor="0-0", lease_ms=LONG_MS)
        assert done.steps_length == 4 and log.backlog(TOKENIZED) == 0
    entries = log.read(STEPS, "detokenize-0", max_entries=9, block_ms=0)
    assert [entry.id for entry in entries] == ["1-1", "1-2", "1-3", "1-5"]
    assert [decode(entry.fields).model_copy(update={"ms": 0}) for entry in entries[1:]] == list(steps.values())


def test_several_steps_that_were_consumed_meanwhile_are_not_appended_again(
    log: RedisLog, detokenizer: Detokenizer
) -> None:
    steps = {number: step_of(n=number) for number in (1, 2, 3)}

    def commit() -> int:
        return log.step(detokenizer.engine, steps, ended=(), control_cursor="0-0", lease_ms=LONG_MS).steps_length

    assert commit() == 3
    for left in (2, 1, 0):
        (entry,) = log.read(STEPS, "detokenize-0", max_entries=1, block_ms=0)
        assert detokenizer.commit(entry) and commit() == left


def test_of_several_steps_none_is_appended_where_one_cannot_be(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-0")
    scene.step(owner, 2)
    steps = {number: step_of(n=number) for number in (1, 2, 3)}
    with pytest.raises(LogUnavailable, match="1-1"):
        log.step(owner, steps, ended=(), control_cursor="0-0", lease_ms=LONG_MS)
    assert log.backlog(STEPS) == 1


def test_who_waits_for_steps_gets_all_that_are_committed_together(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-0")
    steps = {number: step_of(n=number) for number in (1, 2, 3)}

    def commit() -> None:
        log.step(owner, steps, ended=(), control_cursor="0-0", lease_ms=LONG_MS)

    def wait(log: RedisLog) -> list[Entry]:
        return log.read(STEPS, "detokenize-0", max_entries=16, block_ms=1000)

    assert [entry.id for entry in scene.meanwhile(wait, commit)] == ["1-1", "1-2", "1-3"]


def test_a_step_of_an_older_number_is_not_appended(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-0")
    scene.step(owner, 2)
    with pytest.raises(LogUnavailable, match="1-1"):
        scene.step(owner, 1)
    assert log.backlog(STEPS) == 1


def test_a_step_deletes_the_entries_that_ended(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    owner = scene.own("generate-0")
    (entry,) = scene.take(owner)
    assert log.backlog(TOKENIZED) == 1
    scene.step(owner, 1, entry.id)
    assert log.backlog(TOKENIZED) == 0


def test_a_step_returns_how_many_wait_for_the_detokenizer(scene: Scene, detokenizer: Detokenizer) -> None:
    entry = detokenizer.read_step()
    assert scene.step(detokenizer.engine, 2).steps_length == 2
    detokenizer.commit(entry)
    assert scene.step(detokenizer.engine, 3).steps_length == 2


def test_a_step_says_whether_there_may_be_something_to_take(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-0")
    assert scene.step(owner, 1).newest == "0-0"
    scene.accept("a", "b")
    taken = log.take(owner, 8, control_cursor="0-0")
    assert scene.step(owner, 2).newest == taken.cursor == taken.entries[-1].id
    scene.accept("c")
    assert parse_id(scene.step(owner, 3).newest) > parse_id(taken.cursor)
    entries = [*taken.entries, *scene.take(owner)]
    assert scene.step(owner, 4, *(entry.id for entry in entries)).newest == "0-0"


def test_a_step_keeps_the_lease(log: RedisLog, scene: Scene) -> None:
    owner = scene.own("generate-0", lease_ms=LONG_MS)
    log.step(owner, {1: step_of()}, ended=(), control_cursor="0-0", lease_ms=10 * LONG_MS)
    assert log.lease("generate-0").ttl_ms > LONG_MS


# flush


def test_take_and_step_say_once_that_a_flush_was_asked_for(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    owner = scene.own("generate-0")
    assert log.take(owner, 0, control_cursor="0-0").flush == ""
    first = log.flush("web-0")
    taken = log.take(owner, 8, control_cursor="0-0")
    assert (taken.flush, taken.ended) == (first, ())
    assert log.take(owner, 8, control_cursor=taken.control_cursor).flush == ""
    second = log.flush("web-0")
    committed = scene.step(owner, 1, cursor=taken.control_cursor)
    assert (committed.flush, committed.ended) == (second, ())
    assert scene.step(owner, 2, cursor=committed.control_cursor).flush == ""


def test_every_engine_hears_of_a_flush_and_the_last_one_stands_for_all(log: RedisLog, scene: Scene) -> None:
    flushes = [log.flush("web-0") for _ in range(3)]
    assert [parse_id(flush) for flush in flushes] == sorted({parse_id(flush) for flush in flushes})
    for slot in ("generate-0", "generate-1"):
        assert log.take(scene.own(slot), 0, control_cursor="0-0").flush == flushes[-1]


def test_a_flush_among_ends_hides_none_of_them(log: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    scene.end()
    flush = log.flush("web-0")
    scene.end("b")
    taken = log.take(scene.own("generate-0"), 0, control_cursor="0-0")
    assert (taken.ended, taken.flush) == (("a", "b"), flush)
