"""RedisLog where it meets what only a server does: full memory, lost data, broken connections, times to live."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError
from support.log_contract import (
    ACCEPTED,
    BUSY,
    CANCELLED,
    DUPLICATE,
    FAILED,
    LONG_MS,
    NAMES,
    ONCE,
    STEPS,
    SUBMITTED,
    TOKENIZED,
    Scene,
    say_tokens,
    submitted,
    with_front,
)
from support.redis_servers import PLACES, LossyProxy, Servers, command, running_server

from pipeline.errors import Fenced, GroupLost, LogError, LogFull, LogReadOnly, LogUnavailable
from pipeline.events import Cancelled, decode
from pipeline.log.drivers import translate
from pipeline.log.operation import script_text
from pipeline.log.protocol import Entry, Inbox, Owner, Produced, RequestLimits, SubmitResult
from pipeline.log.ranks import Formation, formation_to_join
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.names import LASTING, SEAL, slot_name

COMMITS = [path.stem for path in Path("pipeline/log/commits").resolve().glob("*.lua") if path.stem != "lib"]


def produced(scene: Scene, owner: Owner, entry: Entry) -> bool:
    return scene.log.produced(owner, [entry], "generate-0", [say_tokens("a", 1)])


# full memory


def fill(log: RedisLog) -> None:
    """Put the server at its memory limit."""
    command(log.url, "SCRIPT", "FLUSH")
    command(log.url, "CONFIG", "SET", "maxmemory", 1)


def test_at_maxmemory_a_request_in_flight_goes_its_whole_way(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    fill(log)
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    assert scene.tokenize(entry)
    engine, detokenizer = scene.own("generate-0"), scene.own("detokenize-0")
    (taken,) = scene.take(engine)
    assert scene.step(engine, 1).steps_length == 1
    start = log.open_replies("web-0")
    assert produced(scene, detokenizer, scene.read_one(STEPS, "detokenize-0"))
    assert len(log.read_replies("web-0", start, block_ms=0)[1]) == 1
    assert scene.end()
    assert scene.step(engine, 2, taken.id).steps_length == 1
    assert [e.id for e in log.histories(["a"])[0]] == ["0-1", "0-2", "1-0", SEAL]
    assert log.backlog(TOKENIZED) == 0


def test_at_maxmemory_a_request_that_kills_its_workers_ends_and_leaves_its_letter(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    fill(log)
    assert scene.bury("a")
    assert [letter.fields["uid"] for letter in log.dead_letters(9)] == ["a"]


def test_at_maxmemory_a_worker_can_start_and_take_over(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    before = scene.own("tokenize-0")
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    fill(log)
    assert log.release(before)
    owner = scene.own("tokenize-1")
    assert log.renew(owner, LONG_MS, "{}")
    log.prepare(SUBMITTED)
    log.prepare(Inbox.steps(NAMES, "generate-3"))
    assert log.claim(SUBMITTED, owner, 8) == [entry]
    assert log.statuses("tokenize") == {"tokenize-1": "{}"}


def test_at_maxmemory_ranks_form_and_join_and_what_they_leave_expires(log: RedisLog, scene: Scene) -> None:
    formation, owner = Formation(scene.own("rank-0-0"), "n", 2, "s", "f"), scene.own("rank-1-0")
    fill(log)
    entry_id = log.form("g", formation, ttl_ms=LONG_MS)
    found = formation_to_join(log, owner, "g", block_ms=0)
    assert found is not None and found[0].id == entry_id
    log.joined(owner, "g", [found[0]])
    assert 0 < command(log.url, "PTTL", log.names.ranks("g")) <= LONG_MS


def test_at_maxmemory_the_engines_can_be_told_to_flush(log: RedisLog, scene: Scene) -> None:
    engine = scene.own("generate-0")
    fill(log)
    flush = log.flush("web-0")
    assert log.take(engine, 0, control_cursor="0-0").flush == flush


# lost data


def test_after_a_flush_reads_say_group_lost_and_prepare_heals_it(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    command(log.url, "FLUSHALL")
    owner = scene.own("generate-0")
    with pytest.raises(GroupLost):
        log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=0)
    with pytest.raises(GroupLost):
        log.pending(SUBMITTED, "tokenize-0")
    with pytest.raises(GroupLost):
        log.take(owner, 8, control_cursor="0-0")
    with pytest.raises(GroupLost):
        log.claim(TOKENIZED, owner, 8)
    scene.prepare()
    assert scene.submit() is ACCEPTED
    assert scene.tokenize(scene.read_one(SUBMITTED, "tokenize-0"))
    assert len(scene.take(owner)) == 1


def test_after_a_flush_commits_of_before_are_refused(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    engine = scene.own("generate-0")
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    command(log.url, "FLUSHALL")
    assert not scene.tokenize(entry)
    assert not scene.end()
    with pytest.raises(Fenced):
        scene.step(engine, 1)
    assert not log.renew(engine, LONG_MS, "{}")
    assert fnmatch.filter(keys(log), "*request*") == []


def test_a_key_of_another_type_reads_as_lost(log: RedisLog, scene: Scene) -> None:
    command(log.url, "SET", NAMES.tokenized, "somebody else's")
    with pytest.raises(GroupLost):
        log.take(scene.own("generate-0"), 8, control_cursor="0-0")
    with pytest.raises(GroupLost):
        log.prepare(TOKENIZED)


def test_commits_work_after_the_script_cache_was_flushed(log: RedisLog, scene: Scene) -> None:
    assert scene.submit("a") is ACCEPTED
    command(log.url, "SCRIPT", "FLUSH")
    assert scene.submit("b") is ACCEPTED
    assert scene.tokenize(scene.read_one(SUBMITTED, "tokenize-0"))


# a server that cannot be reached


def test_a_read_only_replica_is_unavailable(log: RedisLog, scene: Scene) -> None:
    command(log.url, "REPLICAOF", "127.0.0.1", 1)
    with pytest.raises(LogUnavailable):
        scene.submit()
    with pytest.raises(LogUnavailable):
        log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=0)
    with pytest.raises(LogUnavailable):
        log.prepare(SUBMITTED)


@pytest.mark.parametrize("place", PLACES)
def test_after_a_failover_the_server_that_takes_writes_is_found_under_the_same_address(
    redis_servers: Servers, tmp_path: Path, place: str
) -> None:
    address = tmp_path / "redis.sock"
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
    with (
        running_server(redis_servers.binary(place), folders[0]) as before,
        running_server(redis_servers.binary(place), folders[1]),
        closing(RedisLog(f"unix://{address}", NAMES)) as log,
    ):
        address.symlink_to(folders[0] / "redis.sock")
        scene = Scene(log)

        async def act(front: AsyncRedisLog) -> None:
            await front.open_replies("web-0")
            address.unlink()
            address.symlink_to(folders[1] / "redis.sock")
            command(before.url, "REPLICAOF", "127.0.0.1", 1)
            with pytest.raises(LogReadOnly):
                await front.open_replies("web-0")
            await front.open_replies("web-0")

        scene.prepare()
        assert scene.submit() is ACCEPTED
        with_front(log.url, act)
        with pytest.raises(LogReadOnly):
            scene.submit("b")
        scene.prepare()
        assert scene.submit("b") is ACCEPTED


@pytest.mark.parametrize("place", PLACES)
def test_without_a_server_everything_is_unavailable(redis_servers: Servers, tmp_path: Path, place: str) -> None:
    with running_server(redis_servers.binary(place), tmp_path) as server:
        log = RedisLog(server.url, NAMES)
        scene = Scene(log)
        scene.prepare()
        scene.submit()
    owner = Owner("generate-0", 1, "n")
    calls: list[Callable[[], object]] = [
        scene.submit,
        scene.end,
        scene.history,
        lambda: log.alive(["a"]),
        lambda: scene.take(owner),
        lambda: log.wait("0-0", "0-0", block_ms=1),
        scene.prepare,
        lambda: log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=1),
        lambda: log.pending(SUBMITTED, "tokenize-0"),
        lambda: log.claim(SUBMITTED, owner, 1),
        lambda: log.lease("generate-0"),
        lambda: log.statuses("generate"),
        lambda: log.read_replies("web-0", "0-0", block_ms=1),
    ]
    for call in calls:
        with pytest.raises(LogUnavailable):
            call()
    log.close()


def test_a_server_that_is_not_there_is_unavailable_for_a_frontend_too(tmp_path: Path) -> None:
    async def act(front: AsyncRedisLog) -> None:
        for question in (
            front.submit("a", [submitted()], ONCE),
            front.abandon("a", CANCELLED, frontend="web-0"),
            front.reading(["a"], "web-1"),
            front.stop_reading("a", "web-1"),
            front.entries("a", [SEAL]),
            front.histories({"a": ""}),
            front.read_histories({"a": "0-0"}, block_ms=1),
            front.statuses("generate"),
            front.read_replies("web-0", "0-0", block_ms=1),
        ):
            with pytest.raises(LogUnavailable):
                await question

    with_front(f"unix://{tmp_path / 'nobody.sock'}", act)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", LogFull),
        ("READONLY You can't write against a read only replica.", LogReadOnly),
        ("MISCONF Redis is configured to save RDB snapshots, but it is currently not able to ...", LogUnavailable),
        ("NOREPLICAS Not enough good replicas to write.", LogReadOnly),
        ("LOADING Redis is loading the dataset in memory", LogReadOnly),
        ("BUSY Redis is busy running a script.", LogUnavailable),
        ("MASTERDOWN Link with MASTER is down", LogReadOnly),
        ("CLUSTERDOWN Hash slot not served", LogReadOnly),
        ("TRYAGAIN Multiple keys request during rehashing of slot", LogReadOnly),
        ("NOAUTH Authentication required.", LogUnavailable),
        ("NOPERM this user has no permissions to run the 'get' command", LogUnavailable),
        ("MOVED 15495 127.0.0.1:7000", LogReadOnly),
        ("ASK 15495 127.0.0.1:7000", LogReadOnly),
        ("CROSSSLOT Keys in request don't hash to the same slot", LogError),
        ("NOGROUP No such key 'x:ROOM' or consumer group 'g' in XREADGROUP with GROUP option", GroupLost),
        ("UNBLOCKED the stream key no longer exists", GroupLost),
        ("UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)", LogReadOnly),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", GroupLost),
    ],
)
@pytest.mark.parametrize(
    "before",
    [
        "",
        "Error running script (call to f_3c44): @user_script:1: ",
        "Error running script (call to f_3c44): @user_script:1: @user_script: 1: -",
        "@user_script: 1: -",
    ],
    ids=["plain", "in a script of 6.2", "before a command in a script of 6.2", "passed on by a script of 6.2"],
)
def test_an_error_of_redis_is_told_by_its_code(before: str, text: str, kind: type[LogError]) -> None:
    told = translate(ResponseError(before + text))
    assert type(told) is kind
    if not before:
        by_class = translate(BaseParser.parse_error(text))
        assert type(by_class) is kind, "redis-py takes some codes out of the text"


def test_a_server_that_misses_its_replicas_makes_all_wait_and_does_nothing_by_halves(
    log: RedisLog, scene: Scene
) -> None:
    def writes(uid: str) -> list[Callable[[], object]]:
        return [
            lambda: scene.submit(uid),
            lambda: scene.tokenize(submitted_entry),
            lambda: log.take(engine, 8, control_cursor="0-0"),
            lambda: scene.step(engine, 2),
            lambda: produced(scene, detokenizer, step_entry),
            lambda: log.end("c", CANCELLED, frontend="web-0"),
            lambda: log.renew(engine, LONG_MS, "{}"),
            lambda: log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=0),
            lambda: log.acquire("generate-1", "n", LONG_MS),
        ]

    async def submit(front: AsyncRedisLog) -> None:
        with pytest.raises(LogUnavailable, match=r"^NOREPLICAS "):
            await front.submit("d", [submitted()])
        with pytest.raises(LogUnavailable, match=r"^NOREPLICAS "):
            await front.end("c", CANCELLED, frontend="web-0")

    for uid in "abc":
        scene.submit(uid)
    scene.tokenize(scene.read_one(SUBMITTED, "tokenize-0"))
    submitted_entry = scene.read_one(SUBMITTED, "tokenize-0")
    engine, detokenizer = scene.own("generate-0"), scene.own("detokenize-0")
    scene.step(engine, 1)
    step_entry = scene.read_one(STEPS, "detokenize-0")
    command(log.url, "CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        lengths = [len(history) for history in log.histories(["a", "b", "c"])]
        for write in writes("d"):
            with pytest.raises(LogError, match=r"^NOREPLICAS ") as raised:
                write()
            assert type(raised.value) is LogReadOnly
        with_front(log.url, submit)
        assert [len(history) for history in log.histories(["a", "b", "c"])] == lengths
        assert log.backlog(STEPS) == 1 and log.alive(["a", "b", "c", "d"]) == {"a", "b", "c"}
    finally:
        command(log.url, "CONFIG", "SET", "min-replicas-to-write", 0)
    done = [write() for write in writes("d")]
    assert done[0] is ACCEPTED and done[1] is True and done[4] is True and done[5] is True and done[6] is True
    assert log.histories(["c"])[0][-1].id == SEAL


# a reply that is lost on its way


@pytest.fixture
def proxy(log: RedisLog, tmp_path: Path) -> Iterator[LossyProxy]:
    for name in COMMITS:
        command(log.url, "SCRIPT", "LOAD", script_text(name))
    with closing(LossyProxy(log.url, tmp_path)) as proxy:
        yield proxy


@pytest.fixture
def shaky(proxy: LossyProxy) -> Iterator[Scene]:
    """The log through the proxy."""
    with closing(RedisLog(proxy.url, NAMES)) as log:
        yield Scene(log)


def test_a_commit_whose_reply_was_lost_counts_once_and_says_so(
    log: RedisLog, scene: Scene, shaky: Scene, proxy: LossyProxy
) -> None:
    proxy.lose_a_reply()
    assert shaky.submit() is DUPLICATE
    entry = scene.read_one(SUBMITTED, "tokenize-0")
    proxy.lose_a_reply()
    assert not shaky.tokenize(entry)
    proxy.lose_a_reply()
    engine, detokenizer = shaky.own("generate-0"), scene.own("detokenize-0")
    assert engine.epoch == 1
    proxy.lose_a_reply()
    with pytest.raises(LogUnavailable):  # who builds on what it said before must hear of it
        shaky.step(engine, 1)
    assert shaky.step(engine, 1).steps_length == 1
    entry = scene.read_one(STEPS, "detokenize-0")
    proxy.lose_a_reply()
    with pytest.raises(LogUnavailable):
        produced(shaky, detokenizer, entry)
    assert not produced(shaky, detokenizer, entry)
    proxy.lose_a_reply()
    assert not shaky.end()
    assert proxy.lost
    assert [e.id for e in log.histories(["a"])[0]] == ["0-1", "0-2", "1-0", SEAL]
    assert log.backlog(TOKENIZED) == 1
    assert log.backlog(STEPS) == 0


@pytest.mark.parametrize("how", ["read", "take", "claim"])
def test_what_brought_entries_and_broke_is_not_repeated_and_they_are_found_by_pending(
    scene: Scene, shaky: Scene, proxy: LossyProxy, how: str
) -> None:
    inbox, slot = (TOKENIZED, "generate-0") if how == "take" else (SUBMITTED, "tokenize-1")
    scene.submit()
    if how != "read":
        entry = scene.read_one(SUBMITTED, "tokenize-0")
        assert how == "claim" or scene.tokenize(entry)
    owner = scene.own(slot)
    brings: dict[str, Callable[[], object]] = {
        "read": lambda: shaky.log.read(SUBMITTED, slot, max_entries=8, block_ms=1000),
        "take": lambda: shaky.log.take(owner, 8, control_cursor="0-0"),
        "claim": lambda: shaky.log.claim(SUBMITTED, owner, 8),
    }
    proxy.lose_a_reply(after=int(how == "claim"))  # after that of the look at the consumers
    with pytest.raises(LogUnavailable):
        brings[how]()
    assert [entry.fields["uid"] for entry in shaky.log.pending(inbox, slot)] == ["a"]
    assert shaky.log.claim(inbox, owner, 8) == []


@pytest.mark.parametrize("how", ["pending", "claim"])
def test_entries_that_were_deleted_are_forgotten(log: RedisLog, scene: Scene, how: str) -> None:
    scene.submit("a")
    scene.submit("b")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=0)
    command(log.url, "XDEL", SUBMITTED.stream, first.id)
    owner = scene.own("tokenize-1")
    found = log.pending(SUBMITTED, "tokenize-0") if how == "pending" else log.claim(SUBMITTED, owner, 8)
    assert found == [second]
    assert command(log.url, "XPENDING", SUBMITTED.stream, SUBMITTED.group)[0] == 1


def test_pending_and_claim_are_no_read(log: RedisLog, scene: Scene) -> None:
    scene.submit()
    scene.read_one(SUBMITTED, "tokenize-0")
    log.pending(SUBMITTED, "tokenize-0")
    (item,) = command(log.url, "XPENDING", SUBMITTED.stream, SUBMITTED.group, "-", "+", 9)
    assert item[3] == 1  # times delivered


# times to live


def keys(log: RedisLog) -> list[str]:
    return [key.decode() for key in command(log.url, "KEYS", "*")]


def test_every_key_has_a_time_to_live_but_the_lasting_ones(log: RedisLog, scene: Scene) -> None:
    engine, detokenizer = scene.own("generate-0"), scene.own("detokenize-0")
    for owner in (engine, detokenizer):
        log.renew(owner, LONG_MS, "{}")
    log.open_replies("web-0")
    for uid in ("a", "b", "c"):
        scene.submit(uid)
    for _ in ("a", "b"):
        scene.tokenize(scene.read_one(SUBMITTED, "tokenize-0"))
    taken = log.take(engine, 8, control_cursor="0-0")
    scene.step(engine, 1, taken.entries[0].id)
    produced(scene, detokenizer, scene.read_one(STEPS, "detokenize-0"))
    scene.end()
    scene.bury("c")
    there = keys(log)
    lasting = [key for key in there if any(fnmatch.fnmatchcase(key.partition(":0}:")[2], name) for name in LASTING)]
    times = {key: command(log.url, "PTTL", key) for key in there}
    assert len(there) > 12
    assert {key for key, ttl_ms in times.items() if ttl_ms == -1} == set(lasting)
    usage_ms = 40 * 86_400_000
    of_usage = (NAMES.users, NAMES.usage("", 0).removesuffix("0"))
    most_ms = {key: usage_ms if key.startswith(of_usage) else 2 * LONG_MS + 1000 for key in there}
    assert all(0 < ttl_ms <= most_ms[key] for key, ttl_ms in times.items() if key not in lasting)


def test_the_history_of_a_refused_request_has_a_minute_to_live(log: RedisLog, scene: Scene) -> None:
    for uid, event, most_s in (("a", FAILED, 60), ("b", CANCELLED, 600)):
        scene.submit(uid, retention_ms=600_000)
        scene.end(uid, event)
        assert most_s - 10 < command(log.url, "PTTL", NAMES.request(uid)) / 1000 <= most_s


def test_of_the_dead_letters_only_the_last_are_kept(log: RedisLog, scene: Scene) -> None:
    fill_up = "for i = 1, 10200 do redis.call('XADD', KEYS[1], '*', 'uid', i) end"
    command(log.url, "EVAL", fill_up, 1, NAMES.dead)
    scene.submit()
    assert scene.bury("a")
    assert 10000 <= command(log.url, "XLEN", NAMES.dead) <= 10100  # Redis trims whole nodes of 100
    assert log.dead_letters(1)[0].fields["uid"] == "a"


def test_a_whole_request_leaves_the_work_streams_empty(log: RedisLog, scene: Scene) -> None:
    engine, detokenizer = scene.own("generate-0"), scene.own("detokenize-0")
    scene.submit()
    scene.tokenize(scene.read_one(SUBMITTED, "tokenize-0"))
    taken = log.take(engine, 8, control_cursor="0-0")
    scene.step(engine, 1, *(entry.id for entry in taken.entries))
    entry = scene.read_one(STEPS, "detokenize-0")
    said = [Produced("a", SEAL, 0, CANCELLED, "web-0")]
    assert log.produced(detokenizer, [entry], "generate-0", said)
    for inbox in (SUBMITTED, TOKENIZED, STEPS):
        assert log.backlog(inbox) == 0
        assert command(log.url, "XPENDING", inbox.stream, inbox.group)[0] == 0
    assert command(log.url, "ZCARD", NAMES.live) == 0


def test_an_entry_of_control_that_is_not_known_is_passed_over(log: RedisLog, scene: Scene) -> None:
    """A server of a later version may say there what this one has no word for."""
    scene.submit()
    command(log.url, "XADD", NAMES.control, "*", "a word of tomorrow", "1")
    scene.end()
    taken = log.take(scene.own("generate-0"), 0, control_cursor="0-0")
    assert (taken.ended, taken.flush) == (("a",), "")


def test_control_keeps_only_the_last_entries(log: RedisLog) -> None:
    for _ in range(1300):
        log.flush("web-0")
    assert 1000 <= command(log.url, "XLEN", NAMES.control) < 1200


# asyncio


def test_the_asynchronous_log_agrees_with_the_synchronous_one(log: RedisLog, scene: Scene) -> None:
    event, frontend = submitted(), "web-0"

    async def act(front: AsyncRedisLog) -> None:
        start = await front.open_replies(frontend)
        assert start == log.open_replies(frontend)
        assert await front.submit("a", [event]) == SubmitResult(ACCEPTED, "a")
        assert log.submit("a", [event]) == await front.submit("a", [event]) == SubmitResult(DUPLICATE, "a")
        assert log.submit("b", [event]) == SubmitResult(ACCEPTED, "b")
        assert await front.submit("c", [event]) == SubmitResult(BUSY, "c")

        assert await front.end("a", CANCELLED, frontend=frontend)
        assert not log.end("a", CANCELLED, frontend=frontend)
        assert not await front.end("a", CANCELLED, frontend=frontend)
        cursor, replies = heard = await front.read_replies(frontend, start, block_ms=0)
        assert heard == log.read_replies(frontend, start, block_ms=1)
        assert [reply.uid for reply in replies] == ["a"]
        assert await front.read_replies(frontend, cursor, block_ms=1) == (cursor, [])

        whole, rest = log.histories(["a"])[0], log.histories(["a"], after="0-1")[0]
        assert await front.histories({"a": ""}) == {"a": whole}
        assert await front.histories({"a": "0-1", "nobody": ""}) == {"a": rest, "nobody": None}
        assert await front.histories({"a": SEAL}) == {"a": []}
        assert await front.histories({}) == {}
        assert isinstance(decode(rest[-1].fields), Cancelled)

        flush = await front.flush(frontend)
        assert log.take(scene.own("generate-20"), 0, control_cursor="0-0").flush == flush

        for index in range(17):
            log.renew(scene.own(slot_name("generate", index)), LONG_MS, f"{{{index}}}")
        assert await front.statuses("generate") == log.statuses("generate")
        assert len(await front.statuses("generate")) == 17

    with_front(log.url, act, RequestLimits(max_queued=2))


def test_a_cancelled_asynchronous_read_loses_no_reply(log: RedisLog, scene: Scene) -> None:
    async def act(front: AsyncRedisLog) -> None:
        start = await front.open_replies("web-0")
        reading = asyncio.create_task(front.read_replies("web-0", start, block_ms=LONG_MS))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        scene.submit()
        scene.end()
        _, replies = await front.read_replies("web-0", start, block_ms=LONG_MS)
        assert [reply.uid for reply in replies] == ["a"]

    with_front(log.url, act)
