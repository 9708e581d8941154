"""Requests that prefer an engine: it takes them first; others take them when it has no room, is gone, or is late."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import redis
from support.log_contract import NAMES, SUBMITTED, Scene
from support.redis_servers import QUERY, command, until
from support.selection import by_night

from pipeline.events import Tokenized
from pipeline.log.protocol import Owner, Turn
from pipeline.log.redis import RedisLog

LATE_S = 60.0
A, B = "generate-0", "generate-1"
OF_ANN = Turn("ann")
STORIES = by_night(20, 500)


def wait(scene: Scene, *uids: str, prefer: str = "", turn: Turn = OF_ANN) -> None:
    """Let requests wait that prefer an engine."""
    for uid in uids:
        scene.submit(uid, max_queued=10_000)
    entries = {entry.fields["uid"]: entry for entry in scene.log.read(SUBMITTED, "t", max_entries=10_000, block_ms=0)}
    turn = Turn(turn.owner, turn.weight, turn.tokens, turn.priority, turn.overtakes, prefer)
    for uid in uids:
        event = Tokenized(token_ids=(5,), fingerprint="t", by="tokenize-0")
        assert scene.log.tokenized(entries[uid], event, turn=turn)


def taken(scene: Scene, engine: Owner, most: int = 8, *, spare: int = 100, late_s: float = LATE_S) -> Sequence[str]:
    took = scene.log.take(engine, most, control_cursor="0-0", spare=spare, steal_after_s=late_s)
    return [entry.fields["uid"] for entry in took.entries]


def test_an_engine_takes_what_prefers_it_first_and_leaves_the_others_theirs(scene: Scene) -> None:
    first, second = scene.own(A), scene.own(B)
    wait(scene, "a0", prefer=B)
    wait(scene, "a1", prefer=A)
    wait(scene, "a2", "a3", prefer=B)
    took = scene.log.take(first, 8, control_cursor="0-0", spare=8)
    assert [entry.fields["uid"] for entry in took.entries] == ["a1"]
    assert (took.num_left, took.cursor) == (3, "0-0")
    assert taken(scene, second) == ["a0", "a2", "a3"]


def test_what_prefers_no_engine_is_taken_in_its_turn(scene: Scene) -> None:
    first, second = scene.own(A), scene.own(B)
    wait(scene, "a0")
    wait(scene, "a1", prefer=A)
    wait(scene, "a2")
    wait(scene, "a3", prefer=B)
    assert taken(scene, second, 1) == ["a0"]
    assert taken(scene, first, 8) == ["a1", "a2"]
    assert taken(scene, second) == ["a3"]


def test_another_engine_takes_what_an_engine_without_room_leaves_until_it_has_some(scene: Scene) -> None:
    first, second = scene.own(A), scene.own(B)
    wait(scene, *"abcdef", prefer=A)
    assert taken(scene, first, 2, spare=10) == ["a", "b"]
    assert taken(scene, second) == [], "the first has room, and only asked for less"
    assert taken(scene, first, 1, spare=1) == ["c"]
    assert taken(scene, second, 1) == ["d"], "at once"
    assert taken(scene, first, 1, spare=2) == ["e"]
    assert taken(scene, second) == []


def test_another_engine_takes_what_prefers_a_dead_engine_at_once(scene: Scene) -> None:
    first, second = scene.own(A), scene.own(B)
    wait(scene, *"ab", prefer=A)
    assert taken(scene, second) == []
    scene.log.release(first)
    assert taken(scene, second) == ["a", "b"]
    wait(scene, "c", prefer="generate-7")
    wait(scene, "d", prefer=f"generate-1 {NAMES.live}")  # no name of a slot
    assert sorted(taken(scene, second)) == ["c", "d"]


def test_another_engine_takes_what_was_left_for_too_long(scene: Scene) -> None:
    scene.own(A)
    second = scene.own(B)
    wait(scene, *"ab", prefer=A)
    assert taken(scene, second) == []
    began_s = time.monotonic()
    found: list[str] = []

    def took_both() -> bool:
        found.extend(taken(scene, second, late_s=0.2))
        return len(found) == 2

    until(took_both)
    assert found == ["a", "b"] and time.monotonic() - began_s < 2


def test_what_prefers_an_engine_does_not_pass_over_others_for_ever(scene: Scene) -> None:
    first = scene.own(A)
    scene.own(B)
    wait(scene, "a", prefer=B)
    wait(scene, "b", prefer=A)
    assert taken(scene, first, 1, late_s=0.0) == ["a"], "it has waited for long"


def test_priority_and_the_turns_of_owners_come_first(scene: Scene) -> None:
    first = scene.own(A)
    scene.own(B)
    wait(scene, "a0", "a1", "a2", prefer=A, turn=Turn("ann", tokens=100))
    wait(scene, "a3", prefer=A, turn=Turn("ann", tokens=100, priority=-1))
    wait(scene, "b0", "b1", turn=Turn("bob", tokens=100))
    wait(scene, "c0", prefer=B, turn=Turn("carl", tokens=100))
    assert sorted(taken(scene, first, 4)) == ["a0", "a3", "b0", "b1"]
    assert taken(scene, first) == ["a1", "a2"], "carl's is for the other engine"


def test_what_is_more_urgent_and_for_another_engine_does_not_hold_up_the_rest(scene: Scene) -> None:
    first, second = scene.own(A), scene.own(B)
    wait(scene, "a0", prefer=A)
    wait(scene, "a1", prefer=B, turn=Turn("ann", priority=-1))
    wait(scene, "b0", prefer=A, turn=Turn("bob"))
    assert sorted(taken(scene, first)) == ["a0", "b0"]
    wait(scene, "a2", prefer=B)
    assert taken(scene, second) == ["a1", "a2"]


def test_who_has_room_again_is_not_full_however_it_took_before(log: RedisLog, scene: Scene) -> None:
    first, second = scene.own(A), scene.own(B)
    wait(scene, "a")
    assert taken(scene, first, 1, spare=1) == ["a"], "not from a queue"
    wait(scene, "b", prefer=A)
    assert taken(scene, second) == ["b"], "the first has no room"
    assert taken(scene, first) == []
    wait(scene, "c", prefer=A)
    assert taken(scene, second) == []
    assert taken(scene, first, 0, spare=0) == [], "it has none without a take"
    assert taken(scene, second) == ["c"]


def test_an_id_ahead_of_the_clock_counts_as_late(log: RedisLog, scene: Scene) -> None:
    scene.own(A)
    second = scene.own(B)
    command(log.url, "XADD", NAMES.tokenized, f"{2**43}-0", "uid", "other", "frontend", "web-0")
    wait(scene, "a", prefer=A)
    assert sorted(taken(scene, second)) == ["a", "other"]


@pytest.mark.parametrize(("owners", "each"), [(64, 20), (600, 1)])
def test_what_is_left_to_others_costs_a_bounded_number_of_looks(
    log: RedisLog, scene: Scene, owners: int, each: int
) -> None:
    scene.own(A)
    second = scene.own(B)
    for number in range(owners):
        uids = [f"{number}-{index}" for index in range(each)]
        for uid in uids:
            command(log.url, "XADD", NAMES.tokenized, "*", "uid", uid, "owner", f"o{number}", "prefer", A)
    wait(scene, "last", prefer=A, turn=Turn("z"))

    def looks() -> int:
        return sum(one["calls"] for name, one in stats().items() if name.startswith("cmdstat_z"))

    def stats() -> dict[str, dict[str, int]]:
        with redis.Redis.from_url(log.url.removesuffix(QUERY), driver_info=None) as client:
            return dict(client.info("commandstats"))

    assert taken(scene, second) == []
    before = looks()
    assert taken(scene, second) == []
    assert looks() - before < 30


def test_one_engine_alone_takes_in_the_order_of_arrival_and_nothing_is_left_behind(log: RedisLog, scene: Scene) -> None:
    only = scene.own(A)
    wait(scene, *"abc", prefer=A)
    assert taken(scene, only, spare=3) == ["a", "b", "c"]
    assert command(log.url, "SMEMBERS", NAMES.full) == [A.encode()] and command(log.url, "PTTL", NAMES.full) > 0
    assert taken(scene, only) == []
    wait(scene, "d", prefer=A)
    assert taken(scene, only) == ["d"]
    assert command(log.url, "KEYS", NAMES.queue("*")) == command(log.url, "KEYS", NAMES.full) == []


@pytest.mark.parametrize("seed", range(2))
def test_in_random_stories_each_is_taken_once_and_none_is_left(log: RedisLog, scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    for story in range(STORIES):
        command(log.url, "FLUSHALL")
        scene.prepare()
        engines = {slot: scene.own(slot, nonce=f"s{story}") for slot in (A, B)}
        sent: list[str] = []
        found: list[str] = []
        for _ in range(chance.randint(5, 30)):
            match chance.choice(["send", "send", "take", "leave"]):
                case "send":
                    uids = [f"{story}-{len(sent) + number}" for number in range(chance.randint(1, 4))]
                    turn = Turn(chance.choice("xyz"), priority=chance.choice([0, 0, 1]))
                    wait(scene, *uids, prefer=chance.choice(["", A, B, "generate-5"]), turn=turn)
                    sent += uids
                case "take" if engines:
                    engine = chance.choice(list(engines.values()))
                    found += taken(scene, engine, chance.randint(1, 8), spare=chance.randint(1, 20))
                case "leave" if len(engines) == 2:
                    log.release(engines.pop(chance.choice([A, B])))
        left = next(iter(engines.values()))
        for other in engines.values():
            if other is not left:
                log.release(other)
        while more := taken(scene, left):
            found += more
        assert sorted(found) == sorted(sent)
