"""The byte budget of the log: what a frontend knows of it, and what clients are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import CHAT, DONE, Site, chat, error_of, received, site, until

from pipeline.errors import LogUnavailable
from pipeline.log.protocol import RequestLimits
from pipeline.names import Names
from web.live import budget as module
from web.live.budget import Budget
from web.live.retry_after import RetryAfter

PLENTY = 1 << 40
KEY = {"Idempotency-Key": "a-key"}


class Log:
    """What says how much memory Redis uses, each time that the test lets it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._answer: asyncio.Future[int] = asyncio.Future()
        self.num_dropped = 0

    async def used_bytes(self) -> int:
        self._answer = asyncio.Future()
        self.asked.set()
        return await self._answer

    async def drop_journals(self) -> None:
        self.num_dropped += 1

    async def say(self, used: int | Exception) -> None:
        """Answer, and wait for the next question."""
        self.asked.clear()
        if isinstance(used, int):
            self._answer.set_result(used)
        else:
            self._answer.set_exception(used)
        await self.asked.wait()


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_EVERY_S", 0.0)


def submit(budget: Budget, num_bytes: int) -> bool:
    with budget.submitting() as has_room:
        return has_room(num_bytes)


async def test_journals_make_room_for_requests_when_the_log_is_nearly_full() -> None:
    log, unlimited = Log(), Log()
    budgets = [Budget(log, 100), Budget(unlimited, 0)]
    reading = [asyncio.create_task(budget.run()) for budget in budgets]
    await log.asked.wait()
    await unlimited.asked.wait()
    for used, times in ((90, 0), (91, 1), (200, 2), (50, 2)):
        await log.say(used)
        assert log.num_dropped == times
    await unlimited.say(PLENTY)
    assert unlimited.num_dropped == 0
    for task in reading:
        task.cancel()


async def test_what_was_submitted_since_the_last_reading_counts_with_it() -> None:
    log = Log()
    budget = Budget(log, 100)
    reading = asyncio.create_task(budget.run())
    await log.asked.wait()
    assert [submit(budget, size) for size in (60, 41, 40, 1)] == [True, False, True, False]
    await log.say(70)  # it may have been taken before those submits
    assert not submit(budget, 1)
    await log.say(70)
    assert [submit(budget, size) for size in (30, 1)] == [True, False]
    await log.say(LogUnavailable("away"))
    assert not submit(budget, 1)
    await log.say(10)
    await log.say(10)
    assert submit(budget, 90)
    reading.cancel()


async def test_a_submit_that_is_under_way_as_redis_is_asked_counts_until_the_next_reading() -> None:
    log = Log()
    budget = Budget(log, 100)
    reading = asyncio.create_task(budget.run())
    with budget.submitting() as has_room:
        assert has_room(50)
        await log.asked.wait()
        await log.say(0)
    assert not submit(budget, 51)
    await log.say(0)  # it was asked while that was under way
    assert not submit(budget, 51)
    await log.say(50)
    assert [submit(budget, size) for size in (51, 50)] == [False, True]
    reading.cancel()


async def test_without_a_limit_there_is_always_room_and_also_for_what_the_log_had_accepted_before() -> None:
    assert submit(Budget(Log(), 0), PLENTY)
    with Budget(Log(), 10).submitting(again=True) as has_room:
        assert has_room(11)


@contextmanager
def over_budget(here: Site) -> Iterator[None]:
    """Have less room in the log than it takes already."""
    here.frontend.budget.most_bytes = 1
    yield
    here.frontend.budget.most_bytes = PLENTY


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stream=True, n=3)),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/generate", {"text": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ],
    ids=["chat", "stream", "completions", "generate", "tokenize", "detokenize"],
)
async def test_over_the_budget_requests_are_refused_and_leave_nothing(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    monkeypatch.setattr(RetryAfter, "estimate_s", lambda self: 17)
    async with site(redis_url, max_log_bytes=PLENTY) as here:
        with over_budget(here):
            response = await here.client.post(path, json=body, headers=KEY)
            assert (response.status_code, response.headers["Retry-After"]) == (503, "17")
            _, error = await error_of(here.client.post(path, json=body))
            assert (error["code"], error["type"]) == ("overloaded", "service_unavailable")
            assert error["message"] == (
                "The log may take no more memory (--max-log-bytes) until older requests expire; send it again."
            )
            metrics = await (await here.get("/metrics")).get_data(as_text=True)
            assert 'admission_rejections_total{reason="log_bytes",slot="web-0"} 2.0' in metrics
        assert command(redis_url, "KEYS", Names().idempotency("*")) == []
        assert len(command(redis_url, "KEYS", Names().request("*"))) == 1  # the probe
        assert stand_in.requests() == []
        assert (await here.client.post(path, json=body, headers=KEY)).status_code == 200


async def test_over_the_budget_what_runs_goes_on_and_what_was_sent_before_is_answered(
    redis_url: str, stand_in: StandIn
) -> None:
    async with site(redis_url, max_log_bytes=PLENTY) as here:
        before = await (await here.post(chat(), headers=KEY)).get_data(as_text=False)
        async with here.connection(chat("held", stream=True)) as stream:
            await received(stream, b"Hel")
            with over_budget(here):
                assert await (await here.post(chat(), headers=KEY)).get_data(as_text=False) == before
                status, error = await error_of(here.post(chat("other words"), headers=KEY))
                assert (status, error["code"]) == (400, "idempotency_key_reused")
                stand_in.released.set()
                assert b"lo!" in await received(stream, DONE)


async def test_a_refused_request_whose_history_is_gone_is_refused_anew_under_its_idempotency_key(
    redis_url: str, stand_in: StandIn
) -> None:
    stand_in.stages.log.limits = RequestLimits(retention_s=0.02)
    async with site(redis_url) as here:
        first = await here.post(chat("refuse"), headers=KEY)
        uid = first.headers["x-minisgl-uid"]
        await until(lambda: not command(redis_url, "EXISTS", Names().request(uid)))
        again = await here.post(chat("refuse"), headers=KEY)
        assert (first.status_code, again.status_code) == (400, 400)
        assert again.headers["x-minisgl-uid"] != uid
