"""RedisLog where API keys have quotas: what is kept, for how long and by which clock; full memory, lost replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from redis_servers import command

from pipeline.events import Cancelled, SamplingParams, Submitted
from pipeline.log.operations import requests
from pipeline.log.protocol import Inbox, Once, Quota, RequestLimits, Submission, SubmitResult
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.names import Names

NAMES = Names("test")
LIMITS = RequestLimits(timeout_s=60, retention_s=60, max_queued=100)
LONG_MS = 60_000
EVENT = Submitted(endpoint="e", frontend="web-0", prompt="Hi", sampling=SamplingParams())
ACCEPTED, TOO_FAST, TOO_MANY = Submission.ACCEPTED, Submission.TOO_FAST, Submission.TOO_MANY


@pytest.fixture
def log(each_redis_url: str) -> Iterator[RedisLog]:
    with closing(RedisLog(each_redis_url, NAMES, LIMITS)) as log:
        log.prepare(Inbox.submitted(NAMES))
        yield log


def submit(log: RedisLog, uid: str, quota: Quota, once: Once | None = None) -> SubmitResult:
    return log.submit(uid, [EVENT], once, quota=quota)


def end(log: RedisLog, uid: str) -> None:
    assert log.end(uid, Cancelled(by="client"), frontend="web-0")


def minute_of(log: RedisLog) -> int:
    """Return the minute that Redis has."""
    return int(command(log.url, "TIME")[0]) // 60


def _ms(log: RedisLog) -> int:
    seconds, microseconds = command(log.url, "TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def counts(log: RedisLog, key: str = "key") -> dict[str, int]:
    """Return limit key -> how many were counted in it."""
    found = [each.decode() for each in command(log.url, "KEYS", "*:limit:*")]
    assert all(f":limit:{key}:" in each for each in found)
    return {each: int(command(log.url, "GET", each)) for each in found}


def test_what_is_counted_has_a_time_to_live(log: RedisLog) -> None:
    quota = Quota("key", requests_per_minute=9, concurrent_requests=9)
    submit(log, "a", quota)
    log.limits = RequestLimits(timeout_s=1, retention_s=60)
    log.submit("b", [EVENT], quota=quota)  # which ends sooner than the first
    assert sum(counts(log).values()) == 2
    for key in counts(log):
        assert 118_000 < command(log.url, "PTTL", key) <= 120_000
    assert sorted(command(log.url, "SMEMBERS", NAMES.running("key"))) == [b"a", b"b"]
    assert 2 * LONG_MS - 2000 < command(log.url, "PTTL", NAMES.running("key")) <= 2 * LONG_MS


def test_nothing_is_kept_of_a_key_without_limits(log: RedisLog) -> None:
    submit(log, "a", Quota("key"))
    submit(log, "b", Quota("key", requests_per_minute=5))
    assert command(log.url, "EXISTS", NAMES.running("key")) == 0
    submit(log, "c", Quota("other", concurrent_requests=5))
    assert sum(counts(log).values()) == 1


def test_each_minute_of_redis_has_a_count_of_its_own(log: RedisLog) -> None:
    minute = minute_of(log)
    for other in (minute - 3, minute - 2, minute - 1, minute + 2):
        command(log.url, "SET", NAMES.limit("key", other), 1000)
    assert submit(log, "a", Quota("key", requests_per_minute=10)).submission is ACCEPTED
    for this in (minute, minute + 1):  # which it may be by now
        command(log.url, "SET", NAMES.limit("key", this), 10)
    earliest_ms = _ms(log)
    refused = submit(log, "b", Quota("key", requests_per_minute=10))
    assert refused.submission is TOO_FAST
    latest_ms = _ms(log)
    the_minute_ends_ms = (latest_ms + refused.again_ms) // 60_000 * 60_000
    assert earliest_ms + refused.again_ms <= the_minute_ends_ms


@pytest.mark.parametrize("minutes", [-1000, -2, -1, 1, 2, 5])
def test_a_clock_that_is_wrong_counts_in_the_minute_of_redis_all_the_same(
    log: RedisLog, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    async def from_a_frontend() -> SubmitResult:
        front = AsyncRedisLog(log.url, NAMES, LIMITS)
        try:
            return await front.submit("b", [EVENT], quota=quota)
        finally:
            await front.close()

    quota = Quota("key", requests_per_minute=10, concurrent_requests=10)
    monkeypatch.setattr(requests, "this_minute", lambda: int(time.time()) // 60 + minutes)
    before = minute_of(log)
    assert submit(log, "a", quota, Once("k", "body")) == SubmitResult(ACCEPTED, "a")
    assert asyncio.run(from_a_frontend()) == SubmitResult(ACCEPTED, "b")
    counted = counts(log)
    assert sum(counted.values()) == 2
    assert set(counted) <= {NAMES.limit("key", minute) for minute in range(before, minute_of(log) + 1)}


def test_places_of_requests_that_have_ended_are_cleared_once_they_are_needed(log: RedisLog) -> None:
    quota = Quota("key", concurrent_requests=3)
    for uid in ("a", "b", "c"):
        submit(log, uid, quota)
    end(log, "a")
    end(log, "c")
    submit(log, "d", quota)
    assert sorted(command(log.url, "SMEMBERS", NAMES.running("key"))) == [b"b", b"d"]
