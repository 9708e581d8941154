"""The contract of the log: take, and the wait for something to take."""

from __future__ import annotations

import itertools

import pytest
from support.log_contract import LONG_MS, TOKENIZED, Scene

from pipeline.errors import Fenced
from pipeline.log.redis import RedisLog
from pipeline.names import parse_id


def test_take_gives_at_most_so_many_and_in_order(scene: Scene) -> None:
    scene.accept("a", "b", "c")
    owner = scene.own("generate-0")
    assert [e.fields["uid"] for e in scene.take(owner, 2)] == ["a", "b"]
    assert [e.fields["uid"] for e in scene.take(owner, 2)] == ["c"]


def test_take_of_none_takes_nothing(scene: Scene) -> None:
    scene.accept("a")
    owner = scene.own("generate-0")
    assert scene.take(owner, 0) == []
    assert len(scene.take(owner, 1)) == 1


def test_taken_entries_stay_pending_until_a_step_ends_them(log: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    owner = scene.own("generate-0")
    first, second = scene.take(owner)
    assert log.pending(TOKENIZED, "generate-0") == [first, second]
    scene.step(owner, 1, first.id)
    assert log.pending(TOKENIZED, "generate-0") == [second]


def test_take_is_fenced_and_leaves_the_entries_to_the_next_owner(log: RedisLog, scene: Scene) -> None:
    scene.accept("a")
    zombie = scene.own("generate-0")
    owner = scene.own_after(zombie)
    with pytest.raises(Fenced):
        log.take(zombie, 8, control_cursor="0-0")
    assert log.pending(TOKENIZED, "generate-0") == []
    assert len(scene.take(owner)) == 1


def test_owners_of_two_slots_never_take_the_same_entry(scene: Scene) -> None:
    uids = [f"r{i}" for i in range(20)]
    scene.accept(*uids)
    owners = {slot: scene.own(slot) for slot in ("generate-0", "generate-1")}
    shares: dict[str, list[str]] = {slot: [] for slot in owners}

    def take_all(one: Scene, slot: str) -> None:
        while entries := one.take(owners[slot], 1):
            shares[slot] += [entry.fields["uid"] for entry in entries]

    scene.at_once(take_all, owners)
    assert sorted(itertools.chain(*shares.values())) == sorted(uids)


def test_the_cursor_of_take_does_not_pass_over_what_was_left(log: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    owner = scene.own("generate-0")
    nothing = log.take(owner, 0, control_cursor="0-0")
    first = log.take(owner, 1, control_cursor="0-0")
    second = log.take(owner, 1, control_cursor="0-0")
    assert parse_id(nothing.cursor) < parse_id(first.entries[0].id)
    assert first.cursor == first.entries[0].id
    assert second.cursor == second.entries[0].id
    assert log.take(owner, 1, control_cursor="0-0").cursor == second.cursor


def test_take_and_step_say_once_who_was_ended_elsewhere(log: RedisLog, scene: Scene) -> None:
    scene.accept("a", "b")
    owner = scene.own("generate-0")
    scene.end()
    taken = log.take(owner, 8, control_cursor="0-0")
    assert taken.ended == ("a",)
    assert log.take(owner, 8, control_cursor=taken.control_cursor).ended == ()
    scene.end("b")
    committed = scene.step(owner, 1, cursor=taken.control_cursor)
    assert committed.ended == ("b",)
    assert scene.step(owner, 2, cursor=committed.control_cursor).ended == ()


@pytest.mark.parametrize("what", ["a new request", "an end", "a flush"])
def test_wait_returns_when_something_new_is_there(log: RedisLog, scene: Scene, what: str) -> None:
    scene.accept("a")
    taken = log.take(scene.own("generate-0"), 8, control_cursor="0-0")

    def happens() -> None:
        match what:
            case "a new request":
                scene.accept("b")
            case "an end":
                scene.end()
            case "a flush":
                log.flush("web-0")

    scene.meanwhile(lambda log: log.wait(taken.cursor, taken.control_cursor, block_ms=LONG_MS), happens)


@pytest.mark.parametrize("block_ms", [0, 1])
def test_wait_returns_when_its_time_is_over(log: RedisLog, scene: Scene, block_ms: int) -> None:
    taken = log.take(scene.own("generate-0"), 8, control_cursor="0-0")
    scene.meanwhile(lambda log: log.wait(taken.cursor, taken.control_cursor, block_ms=block_ms))
