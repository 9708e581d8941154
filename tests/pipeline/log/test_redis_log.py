"""RedisLog where it meets what only a server does: full memory, lost data, broken connections, times to live."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError
from redis_servers import PLACES, LossyProxy, Servers, command, running_server

from pipeline.errors import Fenced, GroupLost, LogError, LogFull, LogReadOnly, LogUnavailable
from pipeline.events import (
    Cancelled,
    SamplingParams,
    StepCompleted,
    Submitted,
    Tokenized,
    TokenRow,
    TokensProduced,
    decode,
)
from pipeline.log.drivers import translate
from pipeline.log.operation import script_text
from pipeline.log.protocol import DeadLetter, Entry, Inbox, Owner, Produced, RequestLimits, Submission, SubmitResult
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.names import LASTING, SEAL, Names, slot_name, tokens_id

NAMES = Names("test")
SUBMITTED = Inbox.submitted(NAMES)
TOKENIZED = Inbox.tokenized(NAMES)
STEPS = Inbox.steps(NAMES, "generate-0")
LONG_MS = 60_000
LIMITS = RequestLimits(timeout_s=60, retention_s=60, max_queued=100)
CANCELLED = Cancelled(by="client")
COMMITS = [path.stem for path in Path("pipeline/log/commits").resolve().glob("*.lua") if path.stem != "lib"]


@pytest.fixture
def log(each_redis_url: str) -> Iterator[RedisLog]:
    with_groups = RedisLog(each_redis_url, NAMES, LIMITS)
    prepare(with_groups)
    yield with_groups
    with_groups.close()


def prepare(log: RedisLog) -> None:
    for inbox in (SUBMITTED, TOKENIZED, STEPS):
        log.prepare(inbox)


def submitted(frontend: str = "web-0") -> Submitted:
    return Submitted(endpoint="/v1/completions", frontend=frontend, prompt="Hi", sampling=SamplingParams(seed=1))


def submit(log: RedisLog, uid: str = "a") -> Submission:
    return log.submit(uid, [submitted()]).submission


def read_one(log: RedisLog, inbox: Inbox, consumer: str) -> Entry:
    (entry,) = log.read(inbox, consumer, max_entries=1, block_ms=0)
    return entry


def tokenize(log: RedisLog, entry: Entry) -> bool:
    return log.tokenized(entry, Tokenized(token_ids=(5, 6, 7), fingerprint="t", by="tokenize-0"))


def own(log: RedisLog, slot: str) -> Owner:
    owner = log.acquire(slot, "n", LONG_MS)
    assert owner is not None
    return owner


def step(log: RedisLog, owner: Owner, number: int, *ended: str) -> int:
    event = StepCompleted(rows=(TokenRow(uid="a", n=number, token=7),))
    return log.step(owner, number, event, ended=ended, control_cursor="0-0", lease_ms=LONG_MS).steps_length


def produced(log: RedisLog, owner: Owner, entry: Entry, uid: str = "a", n: int = 1) -> bool:
    event = TokensProduced(count=1, tokens=(7,), text="x", step=entry.id)
    said = [Produced(uid, tokens_id(n), n, event, "web-0")]
    return log.produced(owner, entry, "generate-0", said)


def end(log: RedisLog, uid: str = "a") -> bool:
    return log.end(uid, CANCELLED, frontend="web-0")


def bury(log: RedisLog, uid: str) -> bool:
    letter = DeadLetter(stage="generate", entry={"uid": uid}, deaths=3, error="exit code -9")
    return log.end(uid, CANCELLED, frontend="web-0", dead=letter)


# full memory


def fill(log: RedisLog) -> None:
    """Put the server at its memory limit."""
    command(log.url, "SCRIPT", "FLUSH")
    command(log.url, "CONFIG", "SET", "maxmemory", 1)


def test_at_maxmemory_submit_is_refused_and_leaves_nothing(log: RedisLog) -> None:
    fill(log)
    with pytest.raises(LogFull):
        submit(log)
    assert log.histories(["a"]) == [[]]
    assert log.alive(["a"]) == set()
    assert log.backlog(SUBMITTED) == 0


def test_at_maxmemory_a_request_in_flight_goes_its_whole_way(log: RedisLog) -> None:
    submit(log)
    fill(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    assert tokenize(log, entry)
    engine, detokenizer = own(log, "generate-0"), own(log, "detokenize-0")
    (taken,) = log.take(engine, 8, control_cursor="0-0").entries
    assert step(log, engine, 1) == 1
    start = log.open_replies("web-0")
    assert produced(log, detokenizer, read_one(log, STEPS, "detokenize-0"))
    assert len(log.read_replies("web-0", start, block_ms=0)[1]) == 1
    assert end(log)
    assert step(log, engine, 2, taken.id) == 1
    assert [e.id for e in log.histories(["a"])[0]] == ["0-1", "0-2", "1-0", SEAL]
    assert log.backlog(TOKENIZED) == 0


def test_at_maxmemory_a_request_that_kills_its_workers_ends_and_leaves_its_letter(log: RedisLog) -> None:
    submit(log)
    fill(log)
    assert bury(log, "a")
    assert [letter.fields["uid"] for letter in log.dead_letters(9)] == ["a"]


def test_at_maxmemory_a_worker_can_start_and_take_over(log: RedisLog) -> None:
    submit(log)
    before = own(log, "tokenize-0")
    entry = read_one(log, SUBMITTED, "tokenize-0")
    fill(log)
    assert log.release(before)
    owner = log.acquire("tokenize-1", "n", LONG_MS)
    assert owner is not None
    assert log.renew(owner, LONG_MS, "{}")
    log.prepare(SUBMITTED)
    log.prepare(Inbox.steps(NAMES, "generate-3"))
    assert log.claim(SUBMITTED, owner, 8) == [entry]
    assert log.statuses("tokenize") == {"tokenize-1": "{}"}


def test_at_maxmemory_the_engines_can_be_told_to_flush(log: RedisLog) -> None:
    engine = own(log, "generate-0")
    fill(log)
    flush = log.flush("web-0")
    assert log.take(engine, 0, control_cursor="0-0").flush == flush


# lost data


def test_after_a_flush_reads_say_group_lost_and_prepare_heals_it(log: RedisLog) -> None:
    submit(log)
    command(log.url, "FLUSHALL")
    owner = own(log, "generate-0")
    with pytest.raises(GroupLost):
        log.read(SUBMITTED, "tokenize-0", max_entries=1, block_ms=0)
    with pytest.raises(GroupLost):
        log.pending(SUBMITTED, "tokenize-0")
    with pytest.raises(GroupLost):
        log.take(owner, 8, control_cursor="0-0")
    with pytest.raises(GroupLost):
        log.claim(TOKENIZED, owner, 8)
    prepare(log)
    assert submit(log) is Submission.ACCEPTED
    assert tokenize(log, read_one(log, SUBMITTED, "tokenize-0"))
    assert len(log.take(owner, 8, control_cursor="0-0").entries) == 1


def test_after_a_flush_commits_of_before_are_refused(log: RedisLog) -> None:
    submit(log)
    engine = own(log, "generate-0")
    entry = read_one(log, SUBMITTED, "tokenize-0")
    command(log.url, "FLUSHALL")
    assert not tokenize(log, entry)
    assert not end(log)
    with pytest.raises(Fenced):
        step(log, engine, 1)
    assert not log.renew(engine, LONG_MS, "{}")
    assert fnmatch.filter(keys(log), "*request*") == []


def test_a_key_of_another_type_reads_as_lost(log: RedisLog) -> None:
    command(log.url, "SET", NAMES.tokenized, "somebody else's")
    with pytest.raises(GroupLost):
        log.take(own(log, "generate-0"), 8, control_cursor="0-0")
    with pytest.raises(GroupLost):
        log.prepare(TOKENIZED)


def test_commits_work_after_the_script_cache_was_flushed(log: RedisLog) -> None:
    assert submit(log, "a") is Submission.ACCEPTED
    command(log.url, "SCRIPT", "FLUSH")
    assert submit(log, "b") is Submission.ACCEPTED
    assert tokenize(log, read_one(log, SUBMITTED, "tokenize-0"))


# a server that cannot be reached


def test_a_read_only_replica_is_unavailable(log: RedisLog) -> None:
    command(log.url, "REPLICAOF", "127.0.0.1", 1)
    with pytest.raises(LogUnavailable):
        submit(log)
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
    ):
        address.symlink_to(folders[0] / "redis.sock")
        log, front = RedisLog(f"unix://{address}", NAMES), AsyncRedisLog(f"unix://{address}", NAMES)

        async def asked() -> None:
            await front.open_replies("web-0")
            address.unlink()
            address.symlink_to(folders[1] / "redis.sock")
            command(before.url, "REPLICAOF", "127.0.0.1", 1)
            with pytest.raises(LogReadOnly):
                await front.open_replies("web-0")
            await front.open_replies("web-0")
            await front.close()

        prepare(log)
        assert submit(log) is Submission.ACCEPTED
        asyncio.run(asked())
        with pytest.raises(LogReadOnly):
            submit(log, "b")
        prepare(log)
        assert submit(log, "b") is Submission.ACCEPTED
        log.close()


@pytest.mark.parametrize("place", PLACES)
def test_without_a_server_everything_is_unavailable(redis_servers: Servers, tmp_path: Path, place: str) -> None:
    with running_server(redis_servers.binary(place), tmp_path) as server:
        log = RedisLog(server.url, NAMES)
        prepare(log)
        submit(log)
    owner = Owner("generate-0", 1, "n")
    calls: list[Callable[[], object]] = [
        lambda: submit(log),
        lambda: end(log),
        lambda: log.histories(["a"]),
        lambda: log.alive(["a"]),
        lambda: log.take(owner, 1, control_cursor="0-0"),
        lambda: log.wait("0-0", "0-0", block_ms=1),
        lambda: log.prepare(SUBMITTED),
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
    async def ask() -> None:
        log = AsyncRedisLog(f"unix://{tmp_path / 'nobody.sock'}", NAMES)
        try:
            with pytest.raises(LogUnavailable):
                await log.submit("a", [submitted()])
            with pytest.raises(LogUnavailable):
                await log.histories({"a": ""})
            with pytest.raises(LogUnavailable):
                await log.statuses("generate")
            with pytest.raises(LogUnavailable):
                await log.read_replies("web-0", "0-0", block_ms=1)
        finally:
            await log.close()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", LogFull),
        ("READONLY You can't write against a read only replica.", LogReadOnly),
        ("MISCONF Redis is configured to save RDB snapshots, but it is currently not able to ...", LogUnavailable),
        ("NOGROUP No such key 'x:ROOM' or consumer group 'g' in XREADGROUP with GROUP option", GroupLost),
        ("UNBLOCKED the stream key no longer exists", GroupLost),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", GroupLost),
    ],
)
@pytest.mark.parametrize(
    "before",
    [
        "",
        "Error running script (call to f_3c44): @user_script:1: ",
        "Error running script (call to f_3c44): @user_script:1: @user_script: 1: -",
    ],
    ids=["plain", "in a script of 6.2", "before a command in a script of 6.2"],
)
def test_an_error_of_redis_is_told_by_its_code(before: str, text: str, kind: type[LogError]) -> None:
    assert type(translate(ResponseError(before + text))) is kind


# a reply that is lost on its way


@pytest.fixture
def proxy(log: RedisLog, tmp_path: Path) -> Iterator[LossyProxy]:
    for name in COMMITS:
        command(log.url, "SCRIPT", "LOAD", script_text(name))
    proxy = LossyProxy(log.url, tmp_path)
    yield proxy
    proxy.close()


@pytest.fixture
def shaky(proxy: LossyProxy) -> Iterator[RedisLog]:
    """The log through the proxy."""
    log = RedisLog(proxy.url, NAMES)
    yield log
    log.close()


def test_a_commit_whose_reply_was_lost_counts_once_and_says_so(
    log: RedisLog, shaky: RedisLog, proxy: LossyProxy
) -> None:
    proxy.lose_a_reply()
    assert submit(shaky) is Submission.DUPLICATE
    entry = read_one(log, SUBMITTED, "tokenize-0")
    proxy.lose_a_reply()
    assert not tokenize(shaky, entry)
    proxy.lose_a_reply()
    engine, detokenizer = own(shaky, "generate-0"), own(log, "detokenize-0")
    assert engine.epoch == 1
    proxy.lose_a_reply()
    with pytest.raises(LogUnavailable):  # who builds on what it said before must hear of it
        step(shaky, engine, 1)
    assert step(shaky, engine, 1) == 1
    entry = read_one(log, STEPS, "detokenize-0")
    proxy.lose_a_reply()
    with pytest.raises(LogUnavailable):
        produced(shaky, detokenizer, entry)
    assert not produced(shaky, detokenizer, entry)
    proxy.lose_a_reply()
    assert not end(shaky)
    assert proxy.lost
    assert [e.id for e in log.histories(["a"])[0]] == ["0-1", "0-2", "1-0", SEAL]
    assert log.backlog(TOKENIZED) == 1
    assert log.backlog(STEPS) == 0


def test_entries_of_a_broken_read_are_found_by_pending(log: RedisLog, shaky: RedisLog, proxy: LossyProxy) -> None:
    submit(log)
    proxy.lose_a_reply()
    with pytest.raises(LogUnavailable):
        shaky.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=1000)
    assert [entry.fields["uid"] for entry in shaky.pending(SUBMITTED, "tokenize-0")] == ["a"]


def test_a_broken_take_is_not_repeated_and_its_entries_are_found_by_pending(
    log: RedisLog, shaky: RedisLog, proxy: LossyProxy
) -> None:
    submit(log)
    tokenize(log, read_one(log, SUBMITTED, "tokenize-0"))
    owner = own(log, "generate-0")
    proxy.lose_a_reply()
    with pytest.raises(LogUnavailable):
        shaky.take(owner, 8, control_cursor="0-0")
    assert [entry.fields["uid"] for entry in shaky.pending(TOKENIZED, "generate-0")] == ["a"]


def test_a_broken_claim_is_not_repeated_and_its_entries_are_found_by_pending(
    log: RedisLog, shaky: RedisLog, proxy: LossyProxy
) -> None:
    submit(log)
    entry = read_one(log, SUBMITTED, "tokenize-0")
    owner = own(log, "tokenize-1")
    proxy.lose_a_reply(after=1)  # after that of the look at the consumers
    with pytest.raises(LogUnavailable):
        shaky.claim(SUBMITTED, owner, 8)
    assert shaky.pending(SUBMITTED, "tokenize-1") == [entry]
    assert shaky.claim(SUBMITTED, owner, 8) == []


def test_pending_forgets_entries_that_were_deleted(log: RedisLog) -> None:
    submit(log, "a")
    submit(log, "b")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=0)
    command(log.url, "XDEL", SUBMITTED.stream, first.id)
    assert log.pending(SUBMITTED, "tokenize-0") == [second]
    assert command(log.url, "XPENDING", SUBMITTED.stream, SUBMITTED.group)[0] == 1


def test_claim_forgets_entries_that_were_deleted(log: RedisLog) -> None:
    submit(log, "a")
    submit(log, "b")
    first, second = log.read(SUBMITTED, "tokenize-0", max_entries=8, block_ms=0)
    command(log.url, "XDEL", SUBMITTED.stream, first.id)
    owner = own(log, "tokenize-1")
    assert log.claim(SUBMITTED, owner, 8) == [second]
    assert command(log.url, "XPENDING", SUBMITTED.stream, SUBMITTED.group)[0] == 1


def test_pending_and_claim_are_no_read(log: RedisLog) -> None:
    submit(log)
    read_one(log, SUBMITTED, "tokenize-0")
    log.pending(SUBMITTED, "tokenize-0")
    (item,) = command(log.url, "XPENDING", SUBMITTED.stream, SUBMITTED.group, "-", "+", 9)
    assert item[3] == 1  # times delivered


# times to live


def keys(log: RedisLog) -> list[str]:
    return [key.decode() for key in command(log.url, "KEYS", "*")]


def test_every_key_has_a_time_to_live_but_the_lasting_ones(log: RedisLog) -> None:
    engine, detokenizer = own(log, "generate-0"), own(log, "detokenize-0")
    for owner in (engine, detokenizer):
        log.renew(owner, LONG_MS, "{}")
    log.open_replies("web-0")
    for uid in ("a", "b", "c"):
        submit(log, uid)
    for _ in ("a", "b"):
        tokenize(log, read_one(log, SUBMITTED, "tokenize-0"))
    taken = log.take(engine, 8, control_cursor="0-0")
    step(log, engine, 1, taken.entries[0].id)
    produced(log, detokenizer, read_one(log, STEPS, "detokenize-0"))
    end(log, "a")
    bury(log, "c")
    there = keys(log)
    lasting = [key for key in there if any(fnmatch.fnmatchcase(key.partition(":0}:")[2], name) for name in LASTING)]
    times = {key: command(log.url, "PTTL", key) for key in there}
    assert len(there) > 12
    assert {key for key, ttl_ms in times.items() if ttl_ms == -1} == set(lasting)
    assert all(0 < ttl_ms <= 2 * LONG_MS + 1000 for key, ttl_ms in times.items() if key not in lasting)


def test_of_the_dead_letters_only_the_last_are_kept(log: RedisLog) -> None:
    fill_up = "for i = 1, 10200 do redis.call('XADD', KEYS[1], '*', 'uid', i) end"
    command(log.url, "EVAL", fill_up, 1, NAMES.dead)
    submit(log)
    assert bury(log, "a")
    assert 10000 <= command(log.url, "XLEN", NAMES.dead) <= 10100  # Redis trims whole nodes of 100
    assert log.dead_letters(1)[0].fields["uid"] == "a"


def test_a_whole_request_leaves_the_work_streams_empty(log: RedisLog) -> None:
    engine, detokenizer = own(log, "generate-0"), own(log, "detokenize-0")
    submit(log)
    tokenize(log, read_one(log, SUBMITTED, "tokenize-0"))
    taken = log.take(engine, 8, control_cursor="0-0")
    step(log, engine, 1, *(entry.id for entry in taken.entries))
    entry = read_one(log, STEPS, "detokenize-0")
    said = [Produced("a", SEAL, 0, CANCELLED, "web-0")]
    assert log.produced(detokenizer, entry, "generate-0", said)
    for inbox in (SUBMITTED, TOKENIZED, STEPS):
        assert log.backlog(inbox) == 0
        assert command(log.url, "XPENDING", inbox.stream, inbox.group)[0] == 0
    assert command(log.url, "ZCARD", NAMES.live) == 0


def test_an_entry_of_control_that_is_not_known_is_passed_over(log: RedisLog) -> None:
    """A server of a later version may say there what this one has no word for."""
    submit(log)
    command(log.url, "XADD", NAMES.control, "*", "a word of tomorrow", "1")
    end(log)
    taken = log.take(own(log, "generate-0"), 0, control_cursor="0-0")
    assert (taken.ended, taken.flush) == (("a",), "")


def test_control_keeps_only_the_last_entries(log: RedisLog) -> None:
    for _ in range(1300):
        log.flush("web-0")
    assert 1000 <= command(log.url, "XLEN", NAMES.control) < 1200


# asyncio


def test_the_asynchronous_log_agrees_with_the_synchronous_one(log: RedisLog) -> None:
    event, frontend = submitted(), "web-0"

    async def act() -> None:
        front = AsyncRedisLog(log.url, NAMES, RequestLimits(max_queued=2))
        try:
            start = await front.open_replies(frontend)
            assert start == log.open_replies(frontend)
            assert await front.submit("a", [event]) == SubmitResult(Submission.ACCEPTED, "a")
            assert log.submit("a", [event]) == SubmitResult(Submission.DUPLICATE, "a")
            assert await front.submit("a", [event]) == SubmitResult(Submission.DUPLICATE, "a")
            assert log.submit("b", [event]) == SubmitResult(Submission.ACCEPTED, "b")
            assert await front.submit("c", [event]) == SubmitResult(Submission.BUSY, "c")

            assert await front.end("a", CANCELLED, frontend=frontend)
            assert not log.end("a", CANCELLED, frontend=frontend)
            assert not await front.end("a", CANCELLED, frontend=frontend)
            assert await front.read_replies(frontend, start, block_ms=1) == log.read_replies(
                frontend, start, block_ms=1
            )
            cursor, replies = await front.read_replies(frontend, start, block_ms=0)
            assert [reply.uid for reply in replies] == ["a"]
            assert await front.read_replies(frontend, cursor, block_ms=0) == (cursor, [])

            whole, rest = log.histories(["a"])[0], log.histories(["a"], after="0-1")[0]
            assert await front.histories({"a": ""}) == {"a": whole}
            assert await front.histories({"a": "0-1", "nobody": ""}) == {"a": rest, "nobody": None}
            assert await front.histories({"a": SEAL}) == {"a": []}
            assert await front.histories({}) == {}
            assert isinstance(decode(rest[-1].fields), Cancelled)

            flush = await front.flush(frontend)
            assert log.take(own(log, "generate-20"), 0, control_cursor="0-0").flush == flush

            for index in range(17):
                log.renew(own(log, slot_name("generate", index)), LONG_MS, f"{{{index}}}")
            assert await front.statuses("generate") == log.statuses("generate")
            assert len(await front.statuses("generate")) == 17
        finally:
            await front.close()

    asyncio.run(act())


def test_a_cancelled_asynchronous_read_loses_no_reply(log: RedisLog) -> None:
    async def act() -> None:
        front = AsyncRedisLog(log.url, NAMES)
        try:
            start = await front.open_replies("web-0")
            reading = asyncio.create_task(front.read_replies("web-0", start, block_ms=LONG_MS))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            submit(log)
            end(log)
            _, replies = await front.read_replies("web-0", start, block_ms=LONG_MS)
            assert [reply.uid for reply in replies] == ["a"]
        finally:
            await front.close()

    asyncio.run(act())
