"""RedisLog where clients come back: keys that expire, full memory, lost replies, and what only a frontend asks."""

from __future__ import annotations

import asyncio

import pytest
from support.log_contract import CANCELLED, LONG_MS, NAMES, ONCE, SUBMITTED, Scene, submitted, with_front
from support.redis_servers import command

from pipeline.errors import LogError, LogUnavailable
from pipeline.log.operations.requests import HISTORY_ENTRIES
from pipeline.log.operations.slots import SLOTS_PER_LOOK
from pipeline.log.protocol import Depth, Inbox, Occupancy, Submission, SubmitResult
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.names import SEAL, SUBMITTED_ID

EVENT = submitted()


def append(log: RedisLog, uid: str, *ids: str) -> None:
    for entry_id in ids:
        command(log.url, "XADD", NAMES.request(uid), entry_id, "kind", "x")


def ttl_ms(log: RedisLog, key: str) -> int:
    return int(command(log.url, "PTTL", key))


def test_readers_and_idempotency_keys_have_a_time_to_live(log: RedisLog) -> None:
    log.submit("a", [EVENT], ONCE)
    for who in ("web-1", "web-2"):
        log.reading(["a"], who)
    assert not log.abandon("a", CANCELLED, once=ONCE, frontend="web-0")
    assert LONG_MS - 1000 < ttl_ms(log, NAMES.reader("a")) <= LONG_MS
    assert 2 * LONG_MS - 1000 < ttl_ms(log, NAMES.idempotency("key")) <= 2 * LONG_MS
    assert command(log.url, "GET", NAMES.idempotency("key")) == b"a:body:left"
    for who in ("web-1", "web-2"):
        log.stop_reading("a", who)
    assert command(log.url, "EXISTS", NAMES.reader("a")) == 0


def test_a_reader_that_died_is_forgotten(log: RedisLog) -> None:
    log.submit("a", [EVENT])
    log.reading(["a"], "web-1")
    command(log.url, "PEXPIRE", NAMES.reader("a"), 1)
    while command(log.url, "EXISTS", NAMES.reader("a")):
        pass
    assert log.read_by_others(["a"]) == set()
    assert log.abandon("a", CANCELLED, frontend="web-0")


def test_a_request_that_has_ended_or_is_gone_gets_no_reader(log: RedisLog) -> None:
    log.submit("a", [EVENT])
    log.end("a", CANCELLED, frontend="web-0")
    log.reading(["a", "nobody"], "web-1")
    assert command(log.url, "KEYS", NAMES.reader("*")) == []


def test_at_maxmemory_clients_come_back_and_leave(log: RedisLog) -> None:
    log.submit("a", [EVENT], ONCE)
    command(log.url, "SCRIPT", "FLUSH")
    command(log.url, "CONFIG", "SET", "maxmemory", 1)
    assert log.submit("b", [EVENT], ONCE) == SubmitResult(Submission.ATTACH, "a")
    log.reading(["a"], "web-1")
    assert not log.abandon("a", CANCELLED, once=ONCE, frontend="web-0")
    log.stop_reading("a", "web-1")
    assert log.abandon("a", CANCELLED, once=ONCE, attached=True, frontend="web-0")


def test_a_frontend_submits_once_and_abandons_as_the_stages_do(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        assert await front.submit("a", [EVENT], ONCE) == SubmitResult(Submission.ACCEPTED, "a")
        assert log.submit("b", [EVENT], ONCE) == SubmitResult(Submission.ATTACH, "a")
        await front.reading(["a"], "web-1")
        assert log.read_by_others(["a"]) == {"a"}
        assert not await front.abandon("a", CANCELLED, once=ONCE, frontend="web-0")
        await front.stop_reading("a", "web-1")
        assert not await front.abandon("b", CANCELLED, once=ONCE, attached=True, frontend="web-0")
        assert await front.abandon("a", CANCELLED, once=ONCE, attached=True, frontend="web-0")
        assert [entry.id for entry in log.histories(["a"])[0]] == [SUBMITTED_ID, SEAL]

    with_front(log.url, act)


def test_entries_are_found_by_their_ids(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        log.submit("a", [EVENT])
        append(log, "a", "1-0", "2-0")
        found = await front.entries("a", [SUBMITTED_ID, "2-0", "3-0", SEAL])
        assert {entry_id: entry.id for entry_id, entry in found.items()} == {SUBMITTED_ID: SUBMITTED_ID, "2-0": "2-0"}
        assert await front.entries("nobody", [SUBMITTED_ID]) == {}

    with_front(log.url, act)


def test_histories_are_read_up_to_a_number_of_entries(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        append(log, "a", *(f"{n}-0" for n in range(1, 8)))
        found = await front.histories({"a": "2-0", "nobody": ""}, max_entries=3)
        assert [entry.id for entry in found["a"] or ()] == ["3-0", "4-0", "5-0"]
        assert found["nobody"] is None
        assert await front.histories({"a": SEAL}, max_entries=3) == {"a": []}

    with_front(log.url, act)


def test_one_read_waits_for_many_histories(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        append(log, "a", "1-0", "2-0")
        append(log, "b", *(f"{n}-0" for n in range(1, HISTORY_ENTRIES + 9)))
        found = await front.read_histories({"a": "1-0", "b": "0-0", "to come": "0-0"}, block_ms=0)
        assert {uid: (entries[0].id, len(entries)) for uid, entries in found.items()} == {
            "a": ("2-0", 1),
            "b": ("1-0", HISTORY_ENTRIES),
        }
        waiting = asyncio.create_task(front.read_histories({"a": "2-0", "to come": "0-0"}, block_ms=LONG_MS))
        while not command(log.url, "INFO", "clients").count(b"blocked_clients:1"):
            await asyncio.sleep(0.01)
        append(log, "to come", "1-0")
        assert list(await waiting) == ["to come"]
        assert await front.read_histories({"a": "2-0"}, block_ms=1) == {}

    with_front(log.url, act)


def test_a_cancelled_read_of_histories_loses_nothing(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        waiting = asyncio.create_task(front.read_histories({"a": "0-0"}, block_ms=LONG_MS))
        while not command(log.url, "INFO", "clients").count(b"blocked_clients:1"):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        append(log, "a", "1-0")
        found = await front.read_histories({"a": "0-0"}, block_ms=LONG_MS)
        assert [entry.id for entry in found["a"]] == ["1-0"]

    with_front(log.url, act)


def test_occupancy_says_what_waits_and_what_is_worked_on(log: RedisLog, scene: Scene) -> None:
    log.prepare(Inbox.steps(NAMES, "generate-2"))
    owner = scene.own("generate-2")

    def looks(occupancy: Occupancy) -> list[tuple[int, int, int]]:
        steps = [occupancy.steps[each] for each in sorted(occupancy.steps)]
        return [
            (depth.length, depth.pending, depth.lag) for depth in (occupancy.submitted, occupancy.tokenized, *steps)
        ]

    async def act(front: AsyncRedisLog) -> None:
        nothing = (0, 0, 0)
        before = await front.occupancy()
        assert looks(before) == [nothing] * 4 and (before.num_live, before.num_dead) == (0, 0)
        assert set(before.steps) == {"generate-0", "generate-2"}
        for uid in "abcde":
            scene.submit(uid)
        entries = log.read(SUBMITTED, "tokenize-0", max_entries=4, block_ms=0)
        assert looks(await front.occupancy())[0] == (5, 4, 1)
        for entry in entries[:3]:  # consumed ones are gone, and the rest is as it was: Redis 7 knows no lag then
            scene.tokenize(entry)
        scene.end("d", consume=entries[3])
        (first, _) = scene.take(owner, 2)
        assert looks(await front.occupancy())[:2] == [(1, 0, 1), (3, 2, 1)]
        for number in (1, 2, 3):
            scene.step(owner, number, *([first.id] if number == 1 else []))
        log.read(Inbox.steps(NAMES, "generate-2"), "detokenize-2", max_entries=2, block_ms=0)
        scene.bury("a")
        after = await front.occupancy()
        assert looks(after) == [(1, 0, 1), (2, 1, 1), nothing, (3, 2, 1)]
        assert (after.num_live, after.num_dead) == (3, 1)

    with_front(log.url, act)


def test_occupancy_of_a_log_that_nobody_has_prepared_is_nothing(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        assert await front.occupancy() == Occupancy(Depth(0, 0), Depth(0, 0), {}, 0, 0)

    with_front(log.url, act)


def test_occupancy_knows_engines_beyond_the_first_look(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        assert set((await front.occupancy()).steps) == {f"generate-{index}" for index in range(SLOTS_PER_LOOK + 2)}

    for index in range(SLOTS_PER_LOOK + 2):
        log.prepare(Inbox.steps(NAMES, f"generate-{index}"))
    with_front(log.url, act)


def test_occupancy_of_a_log_that_does_not_answer_so_raises(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        command(log.url, "SET", NAMES.dead, "no stream")
        with pytest.raises(LogError, match="WRONGTYPE"):
            await front.occupancy()

    with_front(log.url, act)


@pytest.mark.parametrize("fresh_s", [0.0, 60.0], ids=["which is checked", "which had a reply lately"])
def test_a_kept_connection_that_the_server_has_closed_is_made_again_and_threads_are_told(
    fresh_s: float, log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread sends next builds on what it sent before, and the next connection may lead to another server."""
    monkeypatch.setattr("pipeline.log.drivers.FRESH_S", fresh_s)

    def close_all() -> None:
        command(log.url, "CLIENT", "KILL", "TYPE", "normal")

    async def as_frontend(front: AsyncRedisLog) -> None:
        for _ in range(2):
            assert await front.read_replies("web-0", "0-0", block_ms=1) == ("0-0", [])
            close_all()
            await asyncio.sleep(0.01)  # the loop hears of it

    log.prepare(SUBMITTED)
    for _ in range(2):
        assert log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=1) == []
        close_all()
        with pytest.raises(LogUnavailable):
            log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=1)
    with_front(log.url, as_frontend)
