"""How a web process stops: its drain."""

from __future__ import annotations

import asyncio

import pytest
from support.redis_servers import RunningServer, command
from support.stand_in_stages import StandIn
from support.web_site import chat, code_of, seal_of, site, text_of, until

import web.live.frontend
from pipeline.names import SEAL, Names


async def test_a_drain_lets_streams_end_and_takes_nothing_new(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        endless = asyncio.create_task(here.chunks(chat("endless")))
        await until(lambda: len(here.frontend.tail.listeners) == 1)
        short = asyncio.create_task(here.chunks(chat()))
        await until(lambda: len(stand_in.requests()) == 2)
        drain = asyncio.create_task(here.frontend.drain(0.5))
        await until(lambda: here.frontend.draining)
        assert await code_of(here.post(chat())) == (503, "shutting_down")
        assert (await (await here.client.get("/ready")).get_json())["status"] == "draining"
        assert text_of(await short) == "Hello\u2028!"
        *_, last = await endless
        assert last["error"]["code"] == "shutting_down"
        await drain
    ((uid, _),) = [request for request in stand_in.requests() if request[1].messages[0]["content"] == "endless"]
    end = command(redis_url, "XRANGE", Names().request(uid), SEAL, SEAL)
    assert b"shutting_down" in end[0][1]


async def test_without_redis_a_drain_still_tells_its_clients(
    own_redis: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.frontend, "SHUT_DOWN_S", 0.5)
    stand_in = StandIn(own_redis.url)
    async with site(own_redis.url) as here, here.connection(chat("silent", stream=True)) as connection:
        await until(stand_in.requests)
        stand_in.close()
        own_redis.process.kill()
        own_redis.process.wait()
        assert await code_of(here.post(chat())) == (503, "overloaded")
        await here.frontend.drain(0.1)
        piece = await connection.receive()
        assert b'"code":"shutting_down"' in piece


async def test_a_drain_leaves_a_request_in_its_grace_to_the_log(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, disconnect_grace_s=0.2) as here:
        async with here.connection(chat("silent")):
            async with here.connection(chat("silent")):
                await until(lambda: len(stand_in.requests()) == 2)
            await until(lambda: here.frontend._in_grace)
            drain = asyncio.create_task(here.frontend.drain(5))
            await until(lambda: here.frontend.draining)
        await drain
        await asyncio.sleep(0.4)  # there is no event for what must not happen
    assert [seal_of(stand_in.stages.log, uid) for uid, _ in stand_in.requests()] == [{}, {}]
