"""What a web process counts: the byte budget of the log, and when there may be room again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import CHAT, DONE, Site, chat, error_of, received, site, until

from pipeline.errors import LogUnavailable
from pipeline.log.protocol import RequestLimits
from pipeline.names import Names
from web.live import counts as module
from web.live.counts import LONGEST_S, Budget, Readers, RetryAfter

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
    here: Site, redis_url: str, stand_in: StandIn
) -> None:
    stand_in.stages.log.limits = RequestLimits(retention_s=0.02)
    first = await here.post(chat("refuse"), headers=KEY)
    uid = first.headers["x-minisgl-uid"]
    await until(lambda: not command(redis_url, "EXISTS", Names().request(uid)))
    again = await here.post(chat("refuse"), headers=KEY)
    assert (first.status_code, again.status_code) == (400, 400)
    assert again.headers["x-minisgl-uid"] != uid


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def retry_after(clock: Clock) -> RetryAfter:
    return RetryAfter(clock)


def test_who_is_told_to_wait_is_told_how_long_a_request_takes_to_end(clock: Clock, retry_after: RetryAfter) -> None:
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


def test_a_server_that_stands_still_is_asked_again_more_and_more_rarely(clock: Clock, retry_after: RetryAfter) -> None:
    for request in range(4):
        retry_after.begun(request)
    retry_after.ended(0)
    told = []
    for _ in range(40):
        clock.now_s += 5
        told.append(retry_after.estimate_s())
    assert told[0] == 5 and told == sorted(told) and told[-1] == LONGEST_S


def test_what_was_before_a_pause_does_not_count(clock: Clock, retry_after: RetryAfter) -> None:
    retry_after.begun("a")
    clock.now_s += 20
    retry_after.ended("a")
    retry_after.ended("a")
    clock.now_s += 50
    retry_after.begun("b")
    clock.now_s += 2
    assert retry_after.estimate_s() == 2


def test_after_many_fast_ends_a_pause_is_noticed_at_once(clock: Clock, retry_after: RetryAfter) -> None:
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


async def test_a_reader_that_leaves_while_all_are_told_to_the_log_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    told, has_left = set[str](), asyncio.Event()

    class Log:
        async def reading(self, uids: Sequence[str], who: str) -> None:
            if not has_left.is_set():
                has_left.set()
                readers.remove("a")
                await readers.tell("a")
            told.update(uids)

        async def stop_reading(self, uid: str, who: str) -> None:
            told.discard(uid)

    readers = Readers(Log(), "web-0")  # type: ignore[arg-type]
    for uid in ("a", "b"):
        readers.add(uid)
    running = asyncio.create_task(readers.run())
    await has_left.wait()
    async with asyncio.timeout(5):
        await until(lambda: told == {"b"})
    running.cancel()
