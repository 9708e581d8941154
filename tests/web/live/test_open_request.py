"""The life of one request: refused, left by its client, past its deadline, cancelled."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RunningServer, Servers, command, running_server
from stand_in_stages import Stages, StandIn, finished, tokens
from structlog.testing import capture_logs
from web_site import CHAT, chat, error_of, seal_of, site, until

import web.live.open_request
from pipeline.errors import RequestError
from pipeline.events import Cancelled, SamplingParams, Submitted
from pipeline.log.protocol import RequestLimits
from pipeline.names import SEAL, Names
from web.live.open_request import open_request

DONE = b"data: [DONE]\n\n"


async def received(connection: Any, wanted: bytes) -> bytes:
    """Return what comes up to and with *wanted*."""
    got = b""
    while wanted not in got:
        got += await connection.receive()
    return got


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["endless", "silent"])
def test_a_client_that_leaves_cancels_its_request(redis_url: str, stand_in: StandIn, words: str, stream: bool) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            async with here.connection(chat(words, stream=stream)) as connection:
                await until(stand_in.requests)
                if words == "endless" and stream:
                    assert b"assistant" in await connection.receive()
            ((uid, _),) = stand_in.requests()
            await until(lambda: not here.frontend.is_busy)
            assert here.frontend.tail.listeners == ()
        with closing(stand_in.stages.log.another()) as log:
            (end,) = [entry for entry in log.histories([uid])[0] if entry.id == SEAL]
            assert end.fields["kind"] == "cancelled" and end.fields["by"] == "client"

    asyncio.run(scenario())


def test_a_client_that_leaves_at_once_cancels_what_it_had_submitted(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for _ in range(20):
                async with here.connection(chat("endless")):
                    await until(lambda: here.frontend.tail.listeners)
                await until(lambda: not here.frontend.is_busy)
        assert command(redis_url, "ZCARD", Names().live) == 0

    asyncio.run(scenario())


def test_a_request_that_somebody_cancels_ends_with_an_error(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            answer = asyncio.create_task(error_of(here.post(chat("silent"))))
            await until(stand_in.requests)
            ((uid, _),) = stand_in.requests()
            await here.log.end(uid, Cancelled(by="operator"), frontend="web-0")
            status, error = await answer
            assert (status, error["code"]) == (499, "cancelled")

    asyncio.run(scenario())


def test_a_request_past_its_deadline_ends_with_504(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            here.log.limits = RequestLimits(timeout_s=0.2)
            status, error = await error_of(here.post(chat("silent")))
            assert (status, error["code"]) == (504, "timeout")

    asyncio.run(scenario())


def test_a_deadline_that_the_log_cannot_hear_of_reaches_the_client_all_the_same(
    redis_servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: RunningServer) -> None:
        stand_in = StandIn(server.url)
        with capture_logs() as lines:
            async with site(server.url) as here:
                here.log.limits = RequestLimits(timeout_s=1)
                answer = asyncio.create_task(error_of(here.post(chat("silent"))))
                await until(stand_in.requests)
                stand_in.close()
                server.process.kill()
                server.process.wait()
                status, error = await answer
                assert (status, error["code"]) == (504, "timeout")
        assert [line["status"] for line in lines if line["event"] == "request"] == [504]
        assert [line["tries"] for line in lines if line["event"] == "request_never_ended"] == [2]

    monkeypatch.setattr(web.live.open_request, "END_TRIES", 2)
    monkeypatch.setattr(web.live.open_request, "LOG_PATIENCE_S", 0.2)
    with running_server(redis_servers.binary("embedded"), tmp_path) as server:
        asyncio.run(scenario(server))


def test_too_many_requests_get_503_and_when_to_come_again(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        limits = RequestLimits(max_queued=1)
        async with site(redis_url, limits=limits) as here, here.connection(chat("silent")):
            await until(stand_in.requests)
            response = await here.post(chat())
            assert response.status_code == 503 and 1 <= int(response.headers["Retry-After"]) <= 30
            assert (await response.get_json())["error"]["code"] == "overloaded"

    asyncio.run(scenario())


def test_a_full_redis_refuses_new_work_with_503(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            command(redis_url, "CONFIG", "SET", "maxmemory", "1")
            status, error = await error_of(here.post(chat()))
            assert (status, error["code"]) == (503, "overloaded")

    asyncio.run(scenario())


def test_our_own_bug_before_the_submit_is_logged_as_ours(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            unsayable = Submitted(
                endpoint="test", frontend="web-0", prompt="p", sampling=SamplingParams(), labels={"user": 10**30}
            )
            with capture_logs() as lines:
                (error,) = await asyncio.gather(open_request(here.frontend, [unsayable]), return_exceptions=True)
                await until(lambda: not here.frontend.is_busy)
            assert isinstance(error, RequestError) and error.status == 500 and "our bug" in error.message
            (broke,) = [line for line in lines if line["event"] == "request_broke"]
            (line,) = [line for line in lines if line["event"] == "request"]
            assert broke["exc_info"] and broke["uid"] == line["uid"]
            assert (line["status"], line["error"]) == (500, "internal_error")

    asyncio.run(scenario())


def test_a_request_is_cancelled_when_its_clients_grace_is_over(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url, disconnect_grace_s=0.5) as here:
            async with here.connection(chat("endless", stream=True)) as connection:
                await received(connection, b"id: 1-0\n")
            ((uid, _),) = stand_in.requests()
            await until(lambda: not here.frontend.is_busy)
            left_s = time.monotonic()
            with closing(stand_in.stages.log.another()) as log:
                assert not seal_of(log, uid)
                await until(lambda: seal_of(log, uid))
                assert seal_of(log, uid)["by"] == "client" and time.monotonic() - left_s > 0.3

    asyncio.run(scenario())


@pytest.mark.parametrize("reader", ["web-0", "web-1"])
@pytest.mark.parametrize("grace_s", [0.0, 0.3])
def test_a_request_that_its_client_left_goes_on_while_somebody_reads_it(
    redis_url: str, stand_in: StandIn, grace_s: float, reader: str
) -> None:
    async def scenario() -> None:
        async with (
            site(redis_url, disconnect_grace_s=grace_s) as here,
            site(redis_url, "web-1") as there,
        ):
            place = here if reader == "web-0" else there
            async with here.connection(chat("endless", stream=True)) as connection:
                await received(connection, b"id: 1-0\n")
                ((uid, _),) = stand_in.requests()
                async with place.reading(f"/v1/requests/{uid}/events") as reading:
                    await received(reading, b"id: 1-0\n")
                    await connection.disconnect()
                    await until(lambda: len(here.frontend.tail.listeners) == (place is here))
                    await until(lambda: not here.frontend._in_grace)
                    await until(lambda: not here.frontend._background)
                    with closing(stand_in.stages.log.another()) as log:
                        assert not seal_of(log, uid)
                        log.end(uid, Cancelled(by="me"), frontend="web-0")
                    assert b"cancelled by me" in await received(reading, DONE)

    asyncio.run(scenario())


@pytest.mark.parametrize("choices", [1, 2])
def test_a_request_that_the_log_lost_before_its_first_token_is_submitted_again(
    redis_url: str, stages: Stages, choices: int
) -> None:
    async def scenario() -> None:
        with capture_logs() as lines:
            async with site(redis_url, ready=False) as here:
                stages.say_phase("ready")
                await until(lambda: here.frontend.readiness.models)
                answer = asyncio.create_task(here.post(chat(n=choices)))
                uids = await chats(stages, choices)
                command(redis_url, "DEL", *map(Names().request, uids))
                assert await chats(stages, choices) == uids
                for uid in uids:
                    stages.say(uid, 1, tokens(1, "a"), finished(1), frontend="web-0")
                told = await (await answer).get_json()
                assert [choice["message"]["content"] for choice in told["choices"]] == choices * ["a"]
        assert len([line for line in lines if line["event"] == "submitted_again"]) == 1

    asyncio.run(scenario())


def test_a_request_that_the_log_lost_after_a_token_of_a_sibling_fails(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            stages.say_phase("ready")
            await until(lambda: here.frontend.readiness.models)
            async with here.connection(chat(n=2, stream=True)) as connection:
                uids = await chats(stages, 2)
                stages.say(uids[0], 1, tokens(1, "a"), frontend="web-0")
                assert b"assistant" in await connection.receive()
                command(redis_url, "DEL", Names().request(uids[1]))
                assert b'"code":"log_lost"' in await connection.receive()

    asyncio.run(scenario())


async def chats(stages: Stages, count: int) -> list[str]:
    """Take in requests until there are so many chats; return their uids in order."""
    uids: list[str] = []
    while len(uids) < count:
        uids += [uid for uid, event in await asyncio.to_thread(stages.take_in) if event.endpoint == CHAT]
    return sorted(uids)
