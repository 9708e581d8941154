"""RedisLog where API keys have quotas: what is kept, for how long and by which clock; full memory, lost replies."""

from __future__ import annotations

import time

import pytest
from log_contract import ACCEPTED, LONG_MS, NAMES, TOO_FAST, Scene, submitted, with_front
from redis_servers import command

from pipeline.log.operations import requests
from pipeline.log.protocol import Once, Quota, RequestLimits, SubmitResult
from pipeline.log.redis import AsyncRedisLog, RedisLog

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
