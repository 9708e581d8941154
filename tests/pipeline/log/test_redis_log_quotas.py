"""RedisLog where API keys have quotas: what is kept, for how long and by which clock; full memory, lost replies."""

from __future__ import annotations

import re
import time

import pytest
from support.log_contract import ACCEPTED, LONG_MS, NAMES, TOO_FAST, TOO_MUCH, Scene, submitted, with_front
from support.redis_servers import command

from pipeline.log.operations import requests
from pipeline.log.protocol import Once, Quota, RequestLimits, SubmitResult
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.log.shared import REQUEST_BYTES

EVENT = submitted()


def now_ms(log: RedisLog) -> int:
    """Return the moment that Redis has."""
    seconds, microseconds = command(log.url, "TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def minute_of(log: RedisLog) -> int:
    return now_ms(log) // 60_000


def counts(log: RedisLog, key: str = "key") -> dict[str, int]:
    """Return limit key -> how many were counted in it."""
    found = [each.decode() for each in command(log.url, "KEYS", "*:limit:*")]
    assert all(f":limit:{key}:" in each for each in found)
    return {each: int(command(log.url, "GET", each)) for each in found}


def test_what_is_counted_has_a_time_to_live(log: RedisLog, scene: Scene) -> None:
    quota = Quota("key", requests_per_minute=9, concurrent_requests=9)
    scene.submit_as("a", quota)
    log.limits = RequestLimits(timeout_s=1, retention_s=60)
    log.submit("b", [EVENT], quota=quota)  # which ends sooner than the first
    assert sum(counts(log).values()) == 2
    for key in counts(log):
        assert 118_000 < command(log.url, "PTTL", key) <= 120_000
    assert sorted(command(log.url, "SMEMBERS", NAMES.running("key"))) == [b"a", b"b"]
    assert 2 * LONG_MS - 2000 < command(log.url, "PTTL", NAMES.running("key")) <= 2 * LONG_MS


def test_nothing_is_kept_of_a_key_without_limits(log: RedisLog, scene: Scene) -> None:
    scene.submit_as("a", Quota("key"))
    scene.submit_as("b", Quota("key", requests_per_minute=5))
    assert command(log.url, "EXISTS", NAMES.running("key")) == 0
    scene.submit_as("c", Quota("other", concurrent_requests=5))
    assert sum(counts(log).values()) == 1


def test_each_minute_of_redis_has_a_count_of_its_own(log: RedisLog, scene: Scene) -> None:
    minute = minute_of(log)
    for other in (minute - 3, minute - 2, minute - 1, minute + 2):
        command(log.url, "SET", NAMES.limit("key", other), 1000)
    assert scene.submit_as("a", Quota("key", requests_per_minute=10)).submission is ACCEPTED
    for this in (minute, minute + 1):  # which it may be by now
        command(log.url, "SET", NAMES.limit("key", this), 10)
    earliest_ms = now_ms(log)
    refused = scene.submit_as("b", Quota("key", requests_per_minute=10))
    assert refused.submission is TOO_FAST
    latest_ms = now_ms(log)
    the_minute_ends_ms = (latest_ms + refused.again_ms) // 60_000 * 60_000
    assert earliest_ms + refused.again_ms <= the_minute_ends_ms


@pytest.mark.parametrize("minutes", [-1000, -2, -1, 1, 2, 5])
def test_a_clock_that_is_wrong_counts_in_the_minute_of_redis_all_the_same(
    log: RedisLog, scene: Scene, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    async def from_a_frontend(front: AsyncRedisLog) -> SubmitResult:
        return await front.submit("b", [EVENT], quota=quota)

    quota = Quota("key", requests_per_minute=10, concurrent_requests=10)
    monkeypatch.setattr(requests, "this_minute", lambda: int(time.time()) // 60 + minutes)
    before = minute_of(log)
    assert scene.submit_as("a", quota, Once("k", "body")) == SubmitResult(ACCEPTED, "a")
    assert with_front(log.url, from_a_frontend) == SubmitResult(ACCEPTED, "b")
    counted = counts(log)
    assert sum(counted.values()) == 2
    assert set(counted) <= {NAMES.limit("key", minute) for minute in range(before, minute_of(log) + 1)}


def test_places_of_requests_that_have_ended_are_cleared_once_they_are_needed(log: RedisLog, scene: Scene) -> None:
    quota = Quota("key", concurrent_requests=3)
    for uid in ("a", "b", "c"):
        scene.submit_as(uid, quota)
    scene.end("a")
    scene.end("c")
    scene.submit_as("d", quota)
    assert sorted(command(log.url, "SMEMBERS", NAMES.running("key"))) == [b"b", b"d"]


def test_the_bytes_of_a_key_are_one_value_with_few_parts_and_a_time_to_live(log: RedisLog, scene: Scene) -> None:
    key, quota = NAMES.limit("key", "bytes"), Quota("key", log_bytes=1 << 30)
    retention_ms, part_ms = 16_000, 1000
    begin_ms = now_ms(log) // part_ms * part_ms
    begins_ms = [begin_ms - part_ms * age for age in range(40, 0, -1)]
    command(log.url, "SET", key, " ".join(f"{each}:100" for each in begins_ms))  # as if nothing had left
    scene.submit_as("a", quota, retention_ms=retention_ms)
    scene.submit_as("b", quota, retention_ms=retention_ms)
    parts = dict(part.split(":") for part in command(log.url, "GET", key).decode().split())
    assert 16 <= len(parts) <= 19
    assert set(begins_ms[-14:]) <= set(map(int, parts)) and sum(map(int, parts.values())) > 1400 + 2 * REQUEST_BYTES
    assert retention_ms < command(log.url, "PTTL", key) <= retention_ms + part_ms


def test_who_has_used_a_share_is_told_when_its_oldest_requests_expire(log: RedisLog, scene: Scene) -> None:
    key, retention_ms, part_ms = NAMES.limit("key", "bytes"), 160_000, 10_000
    begin_ms = now_ms(log) // part_ms * part_ms
    command(log.url, "SET", key, " ".join(f"{begin_ms - age * part_ms}:100" for age in (9, 5, 2)))
    for share, age in ((201, 9), (200, 5), (101, 5), (100, 2), (1, 2)):
        earliest_ms = now_ms(log)
        refused = scene.submit_as("a", Quota("key", log_bytes=share), retention_ms=retention_ms)
        free_ms = begin_ms - age * part_ms + part_ms + retention_ms
        assert (refused.submission, refused.used_bytes) == (TOO_MUCH, 300)
        assert free_ms - now_ms(log) <= refused.again_ms <= free_ms - earliest_ms
    assert scene.submit_as("a", Quota("key", log_bytes=301), retention_ms=retention_ms).submission is ACCEPTED


def test_without_a_share_a_submit_calls_no_more_commands(log: RedisLog, scene: Scene) -> None:
    def commands(uid: str, quota: Quota | None) -> dict[str, int]:
        command(log.url, "CONFIG", "RESETSTAT")
        log.submit(uid, [EVENT], quota=quota)
        stats = command(log.url, "INFO", "commandstats").decode()
        return {name: int(calls) for name, calls in re.findall(r"cmdstat_(\w+):calls=(\d+)", stats)}

    scene.submit_as("first", Quota("key"))  # which sends the script
    plain = commands("a", None)
    assert not {"get", "set"} & plain.keys()
    assert commands("b", Quota("key")) == plain
    assert commands("c", Quota("key", log_bytes=1 << 30)) == plain | {"get": 1, "set": 1}
