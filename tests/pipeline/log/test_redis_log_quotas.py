"""RedisLog where API keys have quotas: what is kept, for how long and by which clock; full memory, lost replies."""

from __future__ import annotations

import re

import pytest
from support.log_contract import ACCEPTED, LONG_MS, NAMES, TOO_FAST, TOO_MUCH, Scene, submitted
from support.redis_servers import command

from pipeline.log.protocol import Quota, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.log.shared import REQUEST_BYTES

EVENT = submitted()


def now_ms(log: RedisLog) -> int:
    """Return the moment that Redis has."""
    seconds, microseconds = command(log.url, "TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def counted(log: RedisLog, owner: str = "key") -> dict[str, float]:
    """Return how much was taken out of each token bucket of *owner*."""
    words = [word.decode() for word in command(log.url, "HGETALL", NAMES.balance(owner))]
    pairs = {name: told.split() for name, told in zip(words[::2], words[1::2], strict=True) if name != "ms"}
    return {name: float(most) - float(left) for name, (most, left) in pairs.items()}


def test_what_is_counted_has_a_time_to_live(log: RedisLog, scene: Scene) -> None:
    quota = Quota("key", requests_per_minute=9, concurrent_requests=9)
    scene.submit_as("a", quota)
    log.limits = RequestLimits(timeout_s=1, retention_s=60)
    log.submit("b", [EVENT], quota=quota)  # which ends sooner than the first
    assert counted(log) == {"requests_per_minute": pytest.approx(2, abs=0.1)}
    assert 60_000 < command(log.url, "PTTL", NAMES.balance("key")) <= 2 * LONG_MS
    assert sorted(command(log.url, "SMEMBERS", NAMES.running("key"))) == [b"a", b"b"]
    assert 2 * LONG_MS - 2000 < command(log.url, "PTTL", NAMES.running("key")) <= 2 * LONG_MS


def test_nothing_is_kept_of_a_key_without_limits(log: RedisLog, scene: Scene) -> None:
    scene.submit_as("a", Quota("key"))
    scene.submit_as("b", Quota("key", requests_per_minute=5))
    assert command(log.url, "EXISTS", NAMES.running("key")) == 0
    scene.submit_as("c", Quota("other", concurrent_requests=5))
    assert counted(log) and not counted(log, "other")


@pytest.mark.parametrize(("period", "period_ms"), [("minute", 60_000), ("day", 86_400_000)])
def test_a_bucket_is_filled_again_by_the_clock_of_redis(
    log: RedisLog, scene: Scene, period: str, period_ms: int
) -> None:
    name = f"requests_per_{period}"
    quota = Quota("key", **{name: 10})

    def left(requests: float, ago_ms: int = 0) -> None:
        command(log.url, "HSET", NAMES.balance("key"), "ms", now_ms(log) - ago_ms, name, f"10 {requests}")

    left(0.5)
    refused = scene.submit_as("a", quota)
    assert (refused.submission, refused.limit) == (TOO_FAST, name)
    assert period_ms // 20 - 2000 < refused.again_ms <= period_ms // 20
    left(0.5, period_ms // 20)
    assert scene.submit_as("a", quota).submission is ACCEPTED
    left(5, 10 * period_ms)
    outcomes = [scene.submit_as(f"b{number}", quota).submission for number in range(11)]
    assert outcomes == [*[ACCEPTED] * 10, TOO_FAST], "it never holds more than the limit"


def test_a_smaller_limit_counts_at_once_and_a_larger_one_gives_nothing_back(log: RedisLog, scene: Scene) -> None:
    for number in range(3):
        scene.submit_as(f"a{number}", Quota("key", requests_per_day=5))
    assert scene.submit_as("b", Quota("key", requests_per_day=1)).submission is ACCEPTED
    assert scene.submit_as("c", Quota("key", requests_per_day=1)).submission is TOO_FAST
    assert scene.submit_as("d", Quota("key", requests_per_day=100)).submission is TOO_FAST
    assert scene.submit_as("d", Quota("key", requests_per_day=100, requests_per_minute=1)).limit == "requests_per_day"
    assert scene.submit_as("e", Quota("key", requests_per_minute=1)).submission is ACCEPTED


def test_places_of_requests_that_have_ended_are_cleared_once_they_are_needed(log: RedisLog, scene: Scene) -> None:
    quota = Quota("key", concurrent_requests=3)
    for uid in ("a", "b", "c"):
        scene.submit_as(uid, quota)
    scene.end("a")
    scene.end("c")
    scene.submit_as("d", quota)
    assert sorted(command(log.url, "SMEMBERS", NAMES.running("key"))) == [b"b", b"d"]


def test_the_bytes_of_a_key_are_one_value_with_few_parts_and_a_time_to_live(log: RedisLog, scene: Scene) -> None:
    key, quota = NAMES.limit("key"), Quota("key", log_bytes=1 << 30)
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
    key, retention_ms, part_ms = NAMES.limit("key"), 160_000, 10_000
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
    assert "get" not in plain and plain["set"] == 1, "the account"
    assert commands("b", Quota("key")) == plain
    assert commands("c", Quota("key", log_bytes=1 << 30)) == plain | {"get": 1, "set": 2}
