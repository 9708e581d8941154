"""The contract of the log: take, and the wait for something to take."""

from __future__ import annotations

import itertools
import threading

import pytest
from log_contract import CANCELLED, LONG_MS, TOKENIZED, accept, another, end, own, own_after, step

from pipeline.errors import Fenced
from pipeline.log.protocol import Owner, StreamLog
from pipeline.names import parse_id


def test_take_gives_at_most_so_many_and_in_order(log: StreamLog) -> None:
    accept(log, "a", "b", "c")
    owner = own(log, "generate-0")
    assert [e.fields["uid"] for e in log.take(owner, 2, control_cursor="0-0").entries] == ["a", "b"]
    assert [e.fields["uid"] for e in log.take(owner, 2, control_cursor="0-0").entries] == ["c"]


def test_take_of_none_takes_nothing(log: StreamLog) -> None:
    accept(log, "a")
    owner = own(log, "generate-0")
    assert log.take(owner, 0, control_cursor="0-0").entries == ()
    assert len(log.take(owner, 1, control_cursor="0-0").entries) == 1


def test_taken_entries_stay_pending_until_a_step_ends_them(log: StreamLog) -> None:
    accept(log, "a", "b")
    owner = own(log, "generate-0")
    first, second = log.take(owner, 8, control_cursor="0-0").entries
    assert log.pending(TOKENIZED, "generate-0") == [first, second]
    step(log, owner, 1, first.id)
    assert log.pending(TOKENIZED, "generate-0") == [second]


def test_take_is_fenced_and_leaves_the_entries_to_the_next_owner(log: StreamLog) -> None:
    accept(log, "a")
    zombie = own(log, "generate-0")
    owner = own_after(log, zombie)
    with pytest.raises(Fenced):
        log.take(zombie, 8, control_cursor="0-0")
    assert log.pending(TOKENIZED, "generate-0") == []
    assert len(log.take(owner, 8, control_cursor="0-0").entries) == 1


def test_owners_of_two_slots_never_take_the_same_entry(log: StreamLog) -> None:
    uids = [f"r{i}" for i in range(20)]
    accept(log, *uids)
    owners = [own(log, "generate-0"), own(log, "generate-1")]
    shares: dict[str, list[str]] = {owner.slot: [] for owner in owners}

    def take_all(owner: Owner, mine: StreamLog) -> None:
        while entries := mine.take(owner, 1, control_cursor="0-0").entries:
            shares[owner.slot] += [entry.fields["uid"] for entry in entries]

    threads = [threading.Thread(target=take_all, args=(owner, another(log))) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*shares.values())) == sorted(uids)


def test_the_cursor_of_take_does_not_pass_over_what_was_left(log: StreamLog) -> None:
    accept(log, "a", "b")
    owner = own(log, "generate-0")
    nothing = log.take(owner, 0, control_cursor="0-0")
    first = log.take(owner, 1, control_cursor="0-0")
    second = log.take(owner, 1, control_cursor="0-0")
    assert parse_id(nothing.cursor) < parse_id(first.entries[0].id)
    assert first.cursor == first.entries[0].id
    assert second.cursor == second.entries[0].id
    assert log.take(owner, 1, control_cursor="0-0").cursor == second.cursor


def test_take_and_step_say_once_who_was_ended_elsewhere(log: StreamLog) -> None:
    accept(log, "a", "b")
    owner = own(log, "generate-0")
    end(log, "a", CANCELLED)
    taken = log.take(owner, 8, control_cursor="0-0")
    assert taken.ended == ("a",)
    assert log.take(owner, 8, control_cursor=taken.control_cursor).ended == ()
    end(log, "b", CANCELLED)
    committed = step(log, owner, 1, cursor=taken.control_cursor)
    assert committed.ended == ("b",)
    assert step(log, owner, 2, cursor=committed.control_cursor).ended == ()


@pytest.mark.parametrize("what", ["a new request", "an end"])
def test_wait_returns_when_something_new_is_there(log: StreamLog, what: str) -> None:
    accept(log, "a")
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    waiting = another(log)
    thread = threading.Thread(target=lambda: waiting.wait(taken.cursor, taken.control_cursor, block_ms=LONG_MS))
    thread.start()
    if what == "an end":
        end(log, "a", CANCELLED)
    else:
        accept(log, "b")
    thread.join(1.5)  # less than the longest block
    assert not thread.is_alive()


@pytest.mark.parametrize("block_ms", [0, 1])
def test_wait_returns_when_its_time_is_over(log: StreamLog, block_ms: int) -> None:
    taken = log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    waiting = another(log)
    thread = threading.Thread(target=lambda: waiting.wait(taken.cursor, taken.control_cursor, block_ms=block_ms))
    thread.start()
    thread.join(1.5)
    assert not thread.is_alive()
