"""`--acks`: a submit is done once replicas have it, or disks; on every version of Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.log_contract import NAMES, submitted
from support.redis_servers import STARTED, LossyProxy, Pair, Servers, command, paired, running_server

from pipeline.errors import ConfigError, LogUnavailable
from pipeline.events import Cancelled, new_uid
from pipeline.log.check import check_server
from pipeline.log.operations import requests
from pipeline.log.protocol import Once, RequestLimits, Submission, SubmitResult
from pipeline.log.redis import AsyncRedisLog, RedisLog

ACCEPTED, DUPLICATE, ATTACH = Submission.ACCEPTED, Submission.DUPLICATE, Submission.ATTACH
UNACKNOWLEDGED = Submission.UNACKNOWLEDGED
ONE = RequestLimits(acks=1)
ON_DISK = RequestLimits(acks_disk=True)


@pytest.fixture(scope="module", params=STARTED)
def whole_pair(
    request: pytest.FixtureRequest, redis_servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with paired(redis_servers.binary(request.param), tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture
def pair(whole_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A pair whose replica gets everything, until a test holds that back; then 0.2 s are long."""
    monkeypatch.setattr(requests, "ACK_MS", 200)
    yield whole_pair
    whole_pair.replication.go_on()


@dataclass(frozen=True)
class Sender:
    """Submits as a frontend, each time over a new connection."""

    url: str
    limits: RequestLimits = ONE

    def __call__(self, uid: str, once: Once | None = None, *, count: int = 1) -> SubmitResult:
        async def submit() -> SubmitResult:
            log = AsyncRedisLog(self.url, NAMES, self.limits)
            try:
                return await log.submit(uid, [submitted(number=number) for number in range(count)], once)
            finally:
                await log.close()

        return asyncio.run(submit())


def test_a_submit_is_done_once_a_replica_has_it(pair: Pair) -> None:
    submit, uid = Sender(pair.url), new_uid()
    assert submit(uid).submission is ACCEPTED
    assert command(pair.replica.url, "EXISTS", NAMES.request(uid)) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_what_no_replica_has_is_not_acknowledged_though_the_server_has_it(pair: Pair, count: int) -> None:
    submit, uid, once = Sender(pair.url), new_uid(), Once(new_uid(), "d")
    pair.replication.hold()
    unheard = SubmitResult(UNACKNOWLEDGED, uid, acks="0 of 1 replicas within 0.2 s (--acks 1)")
    assert submit(uid, once, count=count) == unheard
    with closing(RedisLog(pair.url, NAMES)) as log:
        assert uid in {each.partition(".")[0] for each in log.living()}
    # Nothing is new, and the connection has written nothing before.
    assert submit(uid, once, count=count) == unheard
    assert submit(new_uid(), once, count=count) == unheard
    pair.replication.go_on()
    assert submit(uid, once, count=count).submission is DUPLICATE
    assert submit(new_uid(), once, count=count) == SubmitResult(ATTACH, uid)


def test_a_refusal_stays_what_it_is(pair: Pair) -> None:
    submit, once = Sender(pair.url), Once(new_uid(), "d")
    uid = submit(new_uid(), once).uid
    pair.replication.hold()
    assert submit(new_uid(), Once(once.key, "e")) == SubmitResult(Submission.MISMATCH, uid)


def test_a_submit_whose_reply_is_lost_is_sent_again_and_waits_again(pair: Pair, tmp_path: Path) -> None:
    proxy = LossyProxy(pair.url, tmp_path)
    try:
        submit, uid = Sender(proxy.url), new_uid()
        submit(new_uid())  # the server knows the script
        proxy.lose_a_reply()
        assert submit(uid).submission is DUPLICATE and proxy.lost
        pair.replication.hold()
        proxy.lose_a_reply()
        assert submit(new_uid()).submission is UNACKNOWLEDGED and proxy.lost
    finally:
        proxy.close()


def test_a_server_that_has_forgotten_the_script_gets_it_and_waits(pair: Pair) -> None:
    submit = Sender(pair.url)
    pair.replication.hold()
    command(pair.master.url, "SCRIPT", "FLUSH")
    assert submit(new_uid()).submission is UNACKNOWLEDGED


def test_a_dead_letter_is_sent_again_without_waiting_because_it_comes_back_where_its_request_is_lost(
    pair: Pair,
) -> None:
    submit = Sender(pair.url)
    pair.replication.hold()

    async def again() -> SubmitResult:
        log = AsyncRedisLog(submit.url, NAMES, ONE)
        try:
            return await log.submit(new_uid(), [submitted()], letter="1-1")
        finally:
            await log.close()

    assert asyncio.run(again()).submission is Submission.GONE


def test_submits_for_which_no_connection_becomes_free_are_refused_and_no_other_command_waits_for_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "ACK_MS", 2500)
    pair.replication.hold()

    async def ask() -> tuple[list[object], float]:
        log = AsyncRedisLog(pair.url, NAMES, ONE)
        try:
            asked = [asyncio.create_task(log.submit(new_uid(), [submitted()])) for _ in range(10)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            began_s = time.monotonic()
            assert not await log.end(new_uid(), Cancelled(by="me"), frontend="web-0")
            took_s = time.monotonic() - began_s
            return [*await asyncio.gather(*asked, return_exceptions=True)], took_s
        finally:
            await log.close()

    outcomes, took_s = asyncio.run(ask())
    assert sum(isinstance(outcome, LogUnavailable) for outcome in outcomes) == 2 and took_s < 0.5
    assert sum(isinstance(outcome, SubmitResult) for outcome in outcomes) == 8


def test_a_disk_acknowledges_what_it_has(redis_servers: Servers, tmp_path: Path) -> None:
    aof = ("--appendonly", "yes", "--appendfsync", "always")
    with paired(redis_servers.binary("embedded"), tmp_path, *aof) as pair:
        assert Sender(pair.url, ON_DISK)(new_uid()).submission is ACCEPTED
        both = RequestLimits(acks=1, acks_disk=True)
        assert Sender(pair.url, both)(new_uid()).submission is ACCEPTED
        command(pair.replica.url, "CONFIG", "SET", "appendonly", "no")
        told = Sender(pair.url, both)(new_uid())
        assert (told.submission, told.acks) == (UNACKNOWLEDGED, "1 of 2 disks within 2.5 s (--acks-disk --acks 1)")


def checked(redis_servers: Servers, place: str, folder: Path, *more: str) -> None:
    with running_server(redis_servers.binary(place), folder, *more) as server:
        check_server(server.url)
        check_server(server.url, acks_disk=True)


def test_a_server_that_cannot_tell_what_is_on_its_disk_is_refused_for_acks_of_disks(
    redis_servers: Servers, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--acks-disk: Redis 6\.2.* cannot say .* upgrade it"):
        checked(redis_servers, "oldest", tmp_path, "--appendonly", "yes")
    with pytest.raises(ConfigError, match=r"--acks-disk: .* no append-only file; run: redis-cli CONFIG SET appendonly"):
        checked(redis_servers, "embedded", tmp_path)
    # Valkey 9.1 confirms what it has not synced.
    with pytest.raises(ConfigError, match=r"a write is on disk before it is, .* CONFIG SET appendfsync always"):
        checked(redis_servers, "embedded", tmp_path, "--appendonly", "yes")
    checked(redis_servers, "embedded", tmp_path, "--appendonly", "yes", "--appendfsync", "always")
