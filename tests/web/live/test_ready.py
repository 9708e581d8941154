"""GET /health_generate: whether a token goes through every stage now; and /ping."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RunningServer, Servers, command, running_server
from stand_in_stages import Stages, StandIn, finished, tokens
from web_site import Site, chat, seal_of, site, until

import web.live.ready
from pipeline.log.protocol import Quota, RequestLimits
from pipeline.names import Names
from web.keys import Keys, hash_of

PATH = "/health_generate"


@pytest.fixture
def stand_in(redis_url: str) -> Iterator[StandIn]:
    with closing(StandIn(redis_url)) as stand_in:
        yield stand_in


@pytest.fixture
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before counts for nobody."""
    monkeypatch.setattr(web.live.ready, "TRIAL_COUNTS_S", 0.0)


async def health(here: Site) -> tuple[int, dict[str, Any]]:
    response = await here.client.get(PATH)
    return response.status_code, await response.get_json()


def probes(stand_in: StandIn) -> list[str]:
    return [uid for uid, event in stand_in.seen if event.endpoint == "probe"]


OK: dict[str, Any] = {"status": "ok", "waiting_for": [], "detail": ""}


def test_each_time_a_token_goes_through_every_stage(redis_url: str, stand_in: StandIn, always_new: None) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for num_probes in (2, 3):  # the first one was that of the start
                assert await health(here) == (200, OK)
                assert len(probes(stand_in)) == num_probes
            _, event = stand_in.seen[-1]
            assert (event.sampling.max_tokens, event.sampling.temperature) == (1, 0)
        assert command(redis_url, "ZCARD", Names().live) == 0

    asyncio.run(scenario())


def test_those_who_ask_at_once_share_one_token_and_none_who_leaves_takes_it_along(
    redis_url: str, always_new: None
) -> None:
    async def scenario(stages: Stages) -> None:
        async with site(redis_url, ready=False) as here:
            await until(lambda: here.frontend.readiness.waiting_for == ("probe",))
            await asyncio.to_thread(answer_one, stages)  # that of the start
            await until(lambda: here.frontend.readiness.probed)
            async with here.reading(PATH):
                asking = [asyncio.create_task(health(here)) for _ in range(5)]
                await until(lambda: here.frontend.tail.listeners)
            await asyncio.to_thread(answer_one, stages)
            assert await asyncio.gather(*asking) == 5 * [(200, OK)]
            assert await asyncio.to_thread(stages.take_in) == []

    with closing(Stages(redis_url)) as stages:
        stages.say_phase("ready")
        asyncio.run(scenario(stages))


def answer_one(stages: Stages) -> None:
    while not (came := stages.take_in()):
        pass
    ((uid, _),) = came
    stages.say(uid, 1, tokens(1), finished(1), frontend="web-0")


def test_a_token_of_the_last_second_counts_whoever_it_was_for(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here, here.connection(chat("endless", stream=True)) as connection:
            await connection.receive()
            assert await health(here) == (200, OK)
        assert len(probes(stand_in)) == 1

    asyncio.run(scenario())


def test_a_stage_that_is_not_there_is_named_at_once(redis_url: str, stand_in: StandIn, always_new: None) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            command(redis_url, "DEL", Names().status("generate-0"))
            await until(lambda: here.frontend.readiness.missing)
            assert await health(here) == (503, {"status": "loading", "waiting_for": ["generate"], "detail": ""})
        assert len(probes(stand_in)) == 1

    asyncio.run(scenario())


def test_a_token_that_does_not_come_is_waited_for_and_cancelled_and_nobody_asks_for_another_at_once(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            stand_in.answers_probes = False
            expected = {"status": "failing", "waiting_for": ["probe"], "detail": "nothing within 0.2 s"}
            for counts_s in (0.0, 60.0):
                monkeypatch.setattr(web.live.ready, "TRIAL_COUNTS_S", counts_s)
                assert await health(here) == (503, expected)
            _, uid = probes(stand_in)
            await until(lambda: not here.frontend.is_busy)
            assert (await here.client.get("/health")).status_code == 200, "the process lives all the same"
        with closing(stand_in.stages.log.another()) as log:
            assert seal_of(log, uid)["by"] == "web"

    monkeypatch.setattr(web.live.ready, "TRIAL_PATIENCE_S", 0.2)
    asyncio.run(scenario())


def test_behind_much_work_the_tokens_of_others_show_that_every_stage_works(
    redis_url: str, stand_in: StandIn, always_new: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here, here.connection(chat("endless", stream=True)) as connection:
            await connection.receive()
            stand_in.answers_probes = False
            assert await health(here) == (200, OK)
        assert len(probes(stand_in)) == 2

    monkeypatch.setattr(web.live.ready, "TRIAL_PATIENCE_S", 0.2)
    asyncio.run(scenario())


def test_a_server_that_takes_nothing_more_is_not_well(redis_url: str, stand_in: StandIn, always_new: None) -> None:
    async def scenario() -> None:
        async with site(redis_url, limits=RequestLimits(max_queued=1)) as here, here.connection(chat("silent")):
            await until(stand_in.requests)
            status, body = await health(here)
            assert (status, body["detail"]) == (503, "too many requests are waiting")

    asyncio.run(scenario())


def test_a_server_that_goes_down_says_so(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            await here.frontend.drain(0.1)
            assert await health(here) == (503, {"status": "draining", "waiting_for": [], "detail": ""})

    asyncio.run(scenario())


def test_without_redis_nobody_waits_for_long_and_nothing_is_said_of_where_it_is(
    redis_servers: Servers, tmp_path: Path, always_new: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: RunningServer) -> None:
        stand_in = StandIn(server.url)
        async with site(server.url) as here:
            stand_in.close()
            server.process.kill()
            server.process.wait()
            status, body = await health(here)
            assert (status, body["detail"]) == (503, "the log does not answer")

    monkeypatch.setattr(web.live.ready, "TRIAL_PATIENCE_S", 0.2)
    monkeypatch.setattr(web.live.ready, "TRIAL_LOG_PATIENCE_S", 0.2)
    with running_server(redis_servers.binary("embedded"), tmp_path) as server:
        asyncio.run(scenario(server))


@pytest.mark.parametrize("path", [PATH, "/ping"])
def test_probes_have_no_key(redis_url: str, stand_in: StandIn, path: str) -> None:
    async def scenario() -> None:
        async with site(redis_url, keys=Keys([Quota(hash_of("secret"))])) as here:
            assert (await here.client.get(path)).status_code == 200

    asyncio.run(scenario())


def test_ping_is_health(redis_url: str) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            answers = [await here.client.get(path) for path in ("/ping", "/health")]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert await answers[0].get_json() == await answers[1].get_json()

    asyncio.run(scenario())
