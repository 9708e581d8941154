"""RedisLog where several requests are submitted together: all or none, whatever refuses them or breaks in between."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.commit_grounds import DurableGround
from support.log_contract import (
    ACCEPTED,
    BUSY,
    CANCELLED,
    DUPLICATE,
    FINISHED,
    LONG_MS,
    NAMES,
    ONCE,
    Detokenizer,
    Scene,
    limits,
    say_end,
    submitted,
    with_front,
)
from support.redis_servers import PLACES, LossyProxy, Servers, command

from pipeline.errors import LogFull
from pipeline.events import Submitted, Tokenized, decode, encode
from pipeline.log.operation import script_text
from pipeline.log.protocol import Entry, Once, Quota, Submission, SubmitResult
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.log.shared import REQUEST_BYTES
from pipeline.log.snapshot import HistoryEnds, HistoryQuery
from pipeline.names import LASTING, Names, sibling_uids
from pipeline.views.history import copied_history

QUOTA = Quota("ann", requests_per_minute=100, concurrent_requests=3)
LIMITS = limits(max_queued=10_000)


@pytest.fixture(autouse=True)
def _without_a_limit(scene: Scene) -> None:
    scene.log.limits = LIMITS


def events(count: int, prompt: str = "Hi") -> list[Submitted]:
    return [submitted(number=i, prompt=prompt) for i in range(count)]


def snapshot(log: RedisLog) -> dict[bytes, bytes]:
    """Return all that the server holds."""
    return {key: command(log.url, "DUMP", key) for key in command(log.url, "KEYS", "*")}


def uids_in(log: RedisLog, key: str) -> list[str]:
    """Return the uids in `submitted`, in order, or the members of a set, which has none."""
    if key == NAMES.submitted:
        return [fields[1].decode() for _, fields in command(log.url, "XRANGE", key, "-", "+")]
    words = ("ZRANGE", key, 0, -1) if key == NAMES.live else ("SMEMBERS", key)
    return sorted(member.decode() for member in command(log.url, *words))


def used_bytes(log: RedisLog) -> int:
    found = re.search(rb"^used_memory:(\d+)", command(log.url, "INFO", "memory"), re.MULTILINE)
    assert found
    return int(found[1])


def test_siblings_that_are_refused_leave_nothing(log: RedisLog) -> None:
    """But what was there before."""
    log.submit("before", events(2), Once("held", "body"), quota=QUOTA)
    log.submit("bob's", events(1), quota=Quota("bob", requests_per_minute=1))
    before = snapshot(log)

    def submit(quota: Quota, once: Once = ONCE, max_queued: int = 10_000) -> Submission:
        log.limits = replace(LIMITS, max_queued=max_queued)
        return log.submit("a", events(3), once, quota=quota).submission

    assert submit(QUOTA, max_queued=4) is BUSY
    assert submit(Quota("bob", requests_per_minute=1)) is Submission.TOO_FAST
    assert submit(Quota("ann", concurrent_requests=2)) is Submission.TOO_MANY
    assert submit(QUOTA, Once("held", "body")) is Submission.ATTACH
    assert submit(QUOTA, Once("held", "another")) is Submission.MISMATCH
    assert snapshot(log) == before
    assert submit(QUOTA) is ACCEPTED


def test_what_there_is_no_room_for_is_refused_unless_it_is_there_already(log: RedisLog) -> None:
    sizes = list[int]()

    def has_room(num_bytes: int) -> bool:
        sizes.append(num_bytes)
        return False

    log.submit("before", events(2), ONCE)
    before = snapshot(log)
    assert log.submit("a", events(3, "x" * 1000), has_room=has_room) == SubmitResult(Submission.FULL, "a")
    assert 3000 < sizes[0] - 3 * REQUEST_BYTES < 4000
    assert log.submit("a", events(2), ONCE, has_room=has_room) == SubmitResult(Submission.ATTACH, "before")
    assert log.submit("before", events(2), has_room=has_room) == SubmitResult(DUPLICATE, "before")
    assert snapshot(log) == before
    assert log.submit("a", events(3), has_room=lambda _: True) == SubmitResult(ACCEPTED, "a")


def test_before_any_engine_has_come_no_more_wait_than_may(log: RedisLog) -> None:
    with closing(RedisLog(log.url, Names("fresh"), replace(LIMITS, max_queued=3))) as fresh:
        assert [fresh.submit(uid, events(2)).submission for uid in "ab"] == [ACCEPTED, BUSY]
        assert fresh.submit("b", events(1)).submission is ACCEPTED


def test_at_maxmemory_siblings_are_refused_and_leave_nothing(log: RedisLog) -> None:
    for uid in ("a", "b", "c"):
        log.submit(uid, events(1), quota=QUOTA)
        log.end(uid, CANCELLED, frontend="web-0")  # their places may be had
    before = snapshot(log)
    command(log.url, "SCRIPT", "FLUSH")
    command(log.url, "CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(LogFull):
        log.submit("d", events(3), ONCE, quota=QUOTA)
    assert snapshot(log) == before
    command(log.url, "CONFIG", "SET", "maxmemory", 0)
    assert log.submit("d", events(3), ONCE, quota=QUOTA) == SubmitResult(ACCEPTED, "d")


def test_siblings_that_cross_maxmemory_are_written_all_or_none(log: RedisLog) -> None:
    """The limit is raised by less than they take: they begin below the first that lets them in, and end above it."""
    count, step_bytes = 64, 128 * 1024
    together, uids = events(count, "x" * 10_000), sibling_uids("a", count)
    before, used_before = snapshot(log), used_bytes(log)
    became, times_refused = None, 0
    while became is None:
        command(log.url, "CONFIG", "SET", "maxmemory", used_before + (1 + times_refused) * step_bytes)
        try:
            became = log.submit("a", together, ONCE, quota=QUOTA).submission
        except LogFull:
            times_refused += 1
            assert snapshot(log) == before
    assert became is ACCEPTED
    assert times_refused > 0 and used_bytes(log) - used_before > 2 * step_bytes
    assert uids_in(log, NAMES.submitted) == list(uids)
    assert uids_in(log, NAMES.live) == uids_in(log, NAMES.running("ann")) == sorted(uids)
    assert [decode(entry.fields) for (entry,) in log.histories(uids)]


def test_siblings_whose_answer_was_lost_are_submitted_once(log: RedisLog, tmp_path: Path) -> None:
    async def from_a_frontend(front: AsyncRedisLog) -> SubmitResult:
        return await front.submit("b", events(3), quota=QUOTA)

    command(log.url, "SCRIPT", "LOAD", script_text("submit"))
    with closing(LossyProxy(log.url, tmp_path)) as proxy, closing(RedisLog(proxy.url, NAMES, LIMITS)) as shaky:
        proxy.lose_a_reply()
        assert shaky.submit("a", events(2), ONCE, quota=QUOTA) == SubmitResult(DUPLICATE, "a")
        assert proxy.lost
        proxy.lose_a_reply()
        assert with_front(proxy.url, from_a_frontend) == SubmitResult(DUPLICATE, "b")
        assert proxy.lost
    uids = ["a.0", "a.1", "b.0", "b.1", "b.2"]
    assert uids_in(log, NAMES.submitted) == uids
    assert uids_in(log, NAMES.live) == uids_in(log, NAMES.running("ann")) == uids
    (bucket,) = command(log.url, "HMGET", NAMES.balance("ann"), "requests_per_minute")
    assert float(bucket.split()[1]) == pytest.approx(98, abs=0.5)
    assert command(log.url, "GET", NAMES.idempotency("key")) == b"a:body"


@pytest.mark.parametrize("place", PLACES)
def test_siblings_whose_end_was_never_written_down_are_all_lost(
    redis_servers: Servers, tmp_path: Path, place: str
) -> None:
    """As when the power fails while Redis writes what the commit did."""
    binary, whole = redis_servers.binary(place), tmp_path / "whole"
    whole.mkdir()
    with closing(DurableGround(binary, whole)) as ground:
        names = ground.log.names
        ground.log.submit("before", events(1))
        (written,) = whole.rglob("*.aof")
        first = written.stat().st_size
        ground.log.submit("a", choices(8), ONCE, quota=QUOTA)
        last = written.stat().st_size
    for cut in sorted({*range(first, last, (last - first) // 6), last - 1, last}):
        folder = tmp_path / str(cut)
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.sock"))
        os.truncate(folder / written.relative_to(whole), cut)
        with closing(DurableGround(binary, folder)) as ground:
            there, histories = ground.observe(), ground.log.histories(sibling_uids("a", 8))
        assert ["prompt" in entry.fields for history in histories for entry in history] == [True] * 8 * (cut == last)
        alive = {"before", *sibling_uids("a", 8)} if cut == last else {"before"}
        assert there.sets[names.live] == alive
        assert {entry.fields["uid"] for entry in there.streams[names.submitted]} == alive
        assert {key for key in there.streams if ":request:" in key} == {names.request(uid) for uid in alive}
        assert (names.idempotency("key") in there.strings) == (cut == last)


def test_siblings_that_ran_before_redis_lost_them_run_again(log: RedisLog) -> None:
    """Their old places are cleared by the submit that takes them again."""
    command(log.url, "SADD", NAMES.running("ann"), "a.0", "a.1", "b")
    assert log.submit("a", events(2), quota=QUOTA).submission is ACCEPTED
    assert uids_in(log, NAMES.running("ann")) == ["a.0", "a.1"]


def test_of_siblings_every_key_has_a_time_to_live(log: RedisLog) -> None:
    log.submit("a", events(5), ONCE, quota=QUOTA)
    log.reading(["a.1", "a.2"], "web-1")
    assert not log.abandon("a.1", CANCELLED, frontend="web-0", once=ONCE)
    assert command(log.url, "GET", NAMES.idempotency("key")) == b"a:body:left"
    for uid in ("a.2", "a.1"):
        log.abandon(uid, CANCELLED, frontend="web-0", once=ONCE)
    assert command(log.url, "GET", NAMES.idempotency("key")) == b"a:body:left"
    times = {key.decode(): command(log.url, "PTTL", key) for key in command(log.url, "KEYS", "*")}
    lasting = {key for key in times if any(fnmatch.fnmatchcase(key.partition(":0}:")[2], name) for name in LASTING)}
    assert {key for key, ttl_ms in times.items() if ttl_ms == -1} == lasting
    keys = (NAMES.shared("a"), NAMES.idempotency("key"), NAMES.running("ann"))
    for key in (*map(NAMES.request, sibling_uids("a", 5)), *keys):
        assert 2 * LONG_MS - 2000 < times[key] <= 2 * LONG_MS


@pytest.mark.parametrize(("count", "prompt"), [(1024, "Hi"), (12, "x" * 1_000_000)], ids=["many", "large"])
def test_many_and_large_siblings_are_submitted_as_well(log: RedisLog, count: int, prompt: str) -> None:
    fill_up = "for i = 1, 20000 do redis.call('SADD', KEYS[1], 'r' .. i) end"  # which have ended
    command(log.url, "EVAL", fill_up, 1, NAMES.running("ann"))
    together, uids = events(count, prompt), sibling_uids("a", count)
    log.limits = replace(LIMITS, max_queued=count - 1)
    assert log.submit("a", together, ONCE, quota=QUOTA).submission is BUSY
    log.limits = replace(LIMITS, max_queued=count)
    assert log.submit("a", together, ONCE, quota=QUOTA) == SubmitResult(ACCEPTED, "a")
    assert log.submit("a", together, ONCE, quota=QUOTA) == SubmitResult(DUPLICATE, "a")
    assert uids_in(log, NAMES.submitted) == list(uids)
    assert uids_in(log, NAMES.live) == uids_in(log, NAMES.running("ann")) == sorted(uids)
    for event, (entry,) in zip(together, log.histories(uids), strict=True):
        written = decode(entry.fields)
        assert isinstance(written, Submitted)
        assert (written.prompt, written.sampling, written.siblings) == (event.prompt, event.sampling, count)


# what they share


LONG = "all work and no play " * 500


def choices(count: int) -> list[Submitted]:
    """Return choices of one prompt, which differ in their seeds alone."""
    (first,) = events(1, LONG)
    sampling = [first.sampling.model_copy(update={"seed": i}) for i in range(count)]
    return [first.model_copy(update={"sampling": each}) for each in sampling]


def of_request(log: RedisLog, uid: str = "a") -> dict[str, int]:
    """Return key -> bytes of the histories of *uid* and its siblings, and of what they share."""
    keys = [key.decode() for key in command(log.url, "KEYS", "*")]
    mine = [key for key in keys if key.startswith((NAMES.request(uid), NAMES.shared(uid)))]
    return {key: int(command(log.url, "MEMORY", "USAGE", key, "SAMPLES", 0)) for key in mine}


def ttl_ms(log: RedisLog, key: str) -> int:
    return int(command(log.url, "PTTL", key))


def test_a_single_request_has_a_history_and_nothing_else(log: RedisLog) -> None:
    log.submit("a", choices(1))
    assert list(of_request(log)) == [NAMES.request("a")]


def test_many_choices_of_a_long_prompt_take_little_more_than_one(log: RedisLog, scene: Scene) -> None:
    log.submit("one", choices(1))
    log.submit("a", choices(100))
    scene.prepare()
    ids = tuple(range(10_000, 12_000))
    for entry in log.read(scene.submitted, "tokenize-0", max_entries=200, block_ms=0):
        log.tokenized(entry, Tokenized(token_ids=ids, fingerprint="t", by="tokenize-0"))
    (one,) = of_request(log, "one").values()
    assert sum(of_request(log).values()) < 2 * one + 100 * 5000  # an empty history takes 4 KiB
    for history in log.histories(sibling_uids("a", 100)):
        asked, tokenized = (decode(entry.fields) for entry in history)
        assert isinstance(asked, Submitted) and isinstance(tokenized, Tokenized)
        assert (asked.prompt, tokenized.token_ids) == (f"{LONG} 0", ids)


def test_what_siblings_share_expires_with_the_last_of_them(log: RedisLog, scene: Scene) -> None:
    """However they end, and whoever ends them keeps histories for however long."""
    detokenizer = Detokenizer(scene)
    log.submit("a", choices(4))
    shared = NAMES.shared("a")
    assert abs(ttl_ms(log, shared) - ttl_ms(log, NAMES.request("a.0"))) < 1000
    ends: dict[str, Callable[[], object]] = {
        "a.0": lambda: scene.end("a.0"),
        "a.1": lambda: detokenizer.say(say_end("a.1", FINISHED)),
        "a.2": lambda: scene.abandon("a.2"),
    }
    for retention_ms, (uid, end) in zip((4 * LONG_MS, 5 * LONG_MS, 6 * LONG_MS), ends.items(), strict=True):
        log.limits = replace(LIMITS, retention_s=retention_ms / 1000)
        end()
        assert retention_ms - 1000 < ttl_ms(log, shared) <= retention_ms
        assert abs(ttl_ms(log, shared) - ttl_ms(log, NAMES.request(uid))) < 1000
    log.limits = replace(LIMITS, retention_s=1)
    assert not scene.end("a.2")  # again: it counts once
    assert ttl_ms(log, shared) > 5 * LONG_MS
    scene.end("a.3")
    assert 6 * LONG_MS - 1000 < ttl_ms(log, shared) <= 6 * LONG_MS, "a.2 is still there"


def test_what_siblings_share_goes_sooner_when_all_ended_soon(log: RedisLog, scene: Scene) -> None:
    log.submit("a", choices(2))
    log.limits = replace(LIMITS, retention_s=1)
    scene.end("a.0")
    assert ttl_ms(log, NAMES.shared("a")) > LONG_MS
    scene.end("a.1")
    assert 0 < ttl_ms(log, NAMES.shared("a")) <= 1000


def test_histories_of_an_older_version_hold_everything_and_go_on(log: RedisLog, scene: Scene) -> None:
    written = [event.model_copy(update={"siblings": 2}) for event in choices(2)]
    for uid, event in zip(sibling_uids("a", 2), written, strict=True):
        words = [word for pair in encode(event).items() for word in pair]
        command(log.url, "XADD", NAMES.request(uid), "0-1", "ms", 1, "deadline_ms", 2, *words)
        command(log.url, "XADD", NAMES.submitted, "*", "uid", uid, "frontend", "web-0")
    scene.prepare()
    first, second = log.read(scene.submitted, "tokenize-0", max_entries=9, block_ms=0)
    tokens = Tokenized(token_ids=tuple(range(100)), fingerprint="t", by="tokenize-0")
    assert log.tokenized(first, tokens) and log.tokenized(second, tokens)
    assert scene.bury("a.0") and scene.end("a.1")
    for uid, event in zip(sibling_uids("a", 2), written, strict=True):
        asked, tokenized, _ = scene.events(uid)
        assert (asked, tokenized) == (event.model_copy(update={"deadline_ms": 2}), tokens)
    (letter,) = log.dead_letters(9)
    assert copied_history(letter) == scene.history("a.0")
    assert NAMES.shared("a") not in of_request(log)


def test_frontends_and_tools_see_whole_siblings(log: RedisLog) -> None:
    log.submit("a", choices(2))
    seen: list[Sequence[Entry]] = [*log.histories(["a.1"])]

    async def read(front: AsyncRedisLog) -> None:
        seen.append(list((await front.entries("a.1", ["0-1"])).values()))
        seen.append((await front.histories({"a.1": "", "a.5": ""}))["a.1"] or [])
        seen.append((await front.read_histories({"a.1": "0-0"}, block_ms=1))["a.1"])
        (stored,) = (await front.entries("a.1", ["0-1"], whole=False)).values()
        assert "prompt" not in stored.fields and stored.fields["frontend"] == "web-0"

    with_front(log.url, read)
    seen.append(log.peek({"a.1": HistoryQuery("", last=False)})["a.1"].head)
    assert len(seen) == 5
    for (entry,) in seen:
        event = decode(entry.fields)
        assert isinstance(event, Submitted) and event.prompt == f"{LONG} 0" and event.sampling.seed == 1


def test_siblings_whose_shared_texts_are_gone_are_gone(log: RedisLog) -> None:
    """As in the moment in which both expire."""
    log.submit("a", choices(2))
    command(log.url, "DEL", NAMES.shared("a"))

    async def read(front: AsyncRedisLog) -> None:
        assert await front.histories({"a.0": ""}) == {"a.0": None}
        assert await front.read_histories({"a.0": "0-0"}, block_ms=1) == {}
        assert await front.entries("a.0", ["0-1"]) == {}

    with_front(log.url, read)
    assert log.histories(["a.0", "a.1"]) == [[], []]
    assert log.peek({"a.0": HistoryQuery("", last=True)}) == {"a.0": HistoryEnds(False)}
