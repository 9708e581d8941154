"""When a client is told to send its request again."""

from __future__ import annotations

import pytest
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import chat, site, until

from pipeline.log.protocol import RequestLimits
from web.live.retry_after import LONGEST_S, RetryAfter


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_who_is_told_to_wait_is_told_how_long_a_request_takes_to_end() -> None:
    clock = Clock()
    retry_after = RetryAfter(clock)
    assert retry_after.estimate_s() == 1  # nothing runs here
    for request in range(100):
        retry_after.begun(request)
    assert retry_after.estimate_s() == 1
    clock.now_s += 6.5
    assert retry_after.estimate_s() == 7  # none has ended yet
    for request in range(4):
        clock.now_s += 3
        retry_after.ended(request)
    assert retry_after.estimate_s() == 5  # 4 in 18.5 s
    for request in range(4, 40):
        clock.now_s += 0.1
        retry_after.ended(request)
    assert retry_after.estimate_s() == 1


def test_a_server_that_stands_still_is_asked_again_more_and_more_rarely() -> None:
    clock = Clock()
    retry_after = RetryAfter(clock)
    for request in range(4):
        retry_after.begun(request)
    retry_after.ended(0)
    told = []
    for _ in range(40):
        clock.now_s += 5
        told.append(retry_after.estimate_s())
    assert told[0] == 5 and told == sorted(told) and told[-1] == LONGEST_S


def test_what_was_before_a_pause_does_not_count() -> None:
    clock = Clock()
    retry_after = RetryAfter(clock)
    retry_after.begun("a")
    clock.now_s += 20
    retry_after.ended("a")
    retry_after.ended("a")
    clock.now_s += 50
    retry_after.begun("b")
    clock.now_s += 2
    assert retry_after.estimate_s() == 2


def test_after_many_fast_ends_a_pause_is_noticed_at_once() -> None:
    clock = Clock()
    retry_after = RetryAfter(clock)
    for request in range(1000):
        retry_after.begun(request)
    for request in range(900):
        clock.now_s += 0.05
        retry_after.ended(request)
    assert retry_after.estimate_s() == 1
    clock.now_s += 7.5
    assert retry_after.estimate_s() == 8
    retry_after.ended(900)
    assert retry_after.estimate_s() == 1


@pytest.mark.parametrize("full", ["backlog", "log"])
async def test_a_server_without_room_says_when_there_is_some(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    async with site(redis_url, limits=RequestLimits(max_queued=1)) as here, here.waiting():
        await until(stand_in.requests)
        if full == "log":
            command(redis_url, "CONFIG", "SET", "maxmemory", "1")
        monkeypatch.setattr(RetryAfter, "estimate_s", lambda self: 17)
        response = await here.post(chat())
        error = (await response.get_json())["error"]
        assert (response.status_code, error["type"]) == (503, "service_unavailable")
        assert (error["code"], response.headers["Retry-After"]) == ("overloaded", "17")
