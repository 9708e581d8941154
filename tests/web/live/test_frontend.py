"""How a web process stops: its drain."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

from redis_servers import RunningServer, Servers, command, running_server
from stand_in_stages import StandIn
from web_site import chat, error_of, seal_of, site, text_of, until

from pipeline.names import SEAL, Names


def test_a_drain_lets_streams_end_and_takes_nothing_new(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            endless = asyncio.create_task(here.chunks(chat("endless")))
            await until(lambda: len(here.frontend.tail.listeners) == 1)
            short = asyncio.create_task(here.chunks(chat()))
            await until(lambda: len(stand_in.requests()) == 2)
            drain = asyncio.create_task(here.frontend.drain(0.5))
            await until(lambda: here.frontend.draining)
            status, error = await error_of(here.post(chat()))
            assert (status, error["code"]) == (503, "shutting_down")
            assert (await (await here.client.get("/ready")).get_json())["status"] == "draining"
            assert text_of(await short) == "Hello\u2028!"
            *_, last = await endless
            assert last["error"]["code"] == "shutting_down"
            await drain
        ((uid, _),) = [request for request in stand_in.requests() if request[1].messages[0]["content"] == "endless"]
        end = command(redis_url, "XRANGE", Names().request(uid), SEAL, SEAL)
        assert b"shutting_down" in end[0][1]

    asyncio.run(scenario())


def test_without_redis_a_drain_still_tells_its_clients(redis_servers: Servers, tmp_path: Path) -> None:
    async def scenario(server: RunningServer) -> None:
        stand_in = StandIn(server.url)
        async with site(server.url) as here, here.connection(chat("silent", stream=True)) as connection:
            await until(stand_in.requests)
            stand_in.close()
            server.process.kill()
            server.process.wait()
            status, error = await error_of(here.post(chat()))
            assert (status, error["code"]) == (503, "overloaded")
            await here.frontend.drain(0.1)
            piece = await connection.receive()
            assert b'"code":"shutting_down"' in piece

    with running_server(redis_servers.binary("embedded"), tmp_path) as server:
        asyncio.run(scenario(server))


def test_a_drain_leaves_a_request_in_its_grace_to_the_log(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url, disconnect_grace_s=0.2) as here:
            async with here.connection(chat("silent")):
                async with here.connection(chat("silent")):
                    await until(lambda: len(stand_in.requests()) == 2)
                await until(lambda: here.frontend._in_grace)
                drain = asyncio.create_task(here.frontend.drain(5))
                await until(lambda: here.frontend.draining)
            await drain
            await asyncio.sleep(0.4)  # there is no event for what must not happen
        with closing(stand_in.stages.log.another()) as log:
            assert [seal_of(log, uid) for uid, _ in stand_in.requests()] == [{}, {}]

    asyncio.run(scenario())
