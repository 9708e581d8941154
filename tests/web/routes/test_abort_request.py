"""POST /abort_request, as SGLang has it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RunningServer, Servers, running_server
from stand_in_stages import Stages, StandIn
from structlog.testing import capture_logs
from web_site import Site, chat, error_of, seal_of, site, until

from pipeline.events import SamplingParams, Submitted, new_uid
from pipeline.log.redis import RedisLog
from pipeline.names import sibling_uids
from web.live.lookup import AT_ONCE

ABORT = "/abort_request"


def submit(log: RedisLog, uid: str, count: int = 1, *, endpoint: str = "/generate") -> None:
    """Submit a request, or siblings, as another frontend would."""
    event = Submitted(endpoint=endpoint, frontend="web-9", prompt="p", sampling=SamplingParams())
    log.submit(uid, count * [event])


async def abort(here: Site, **body: Any) -> dict[str, list[str]]:
    response = await here.client.post(ABORT, json=body)
    assert response.status_code == 200
    told: dict[str, list[str]] = await response.get_json()
    assert set(told) == {"aborted", "ended", "unknown"}
    return told


@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
def test_a_request_is_ended_by_its_uid_or_the_id_of_its_answer_and_its_client_is_told(
    redis_url: str, stand_in: StandIn, prefix: str
) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here, site(redis_url, "web-1") as there:
            answer = asyncio.create_task(error_of(here.post(chat("silent"))))
            await until(stand_in.requests)
            ((uid, _),) = stand_in.requests()
            assert await abort(there, rid=prefix + uid) == {"aborted": [uid], "ended": [], "unknown": []}
            status, error = await answer
            assert (status, error["code"]) == (499, "cancelled")
            assert await abort(here, rid=uid, abort_all=False) == {"aborted": [], "ended": [uid], "unknown": []}
        with closing(stand_in.stages.log.another()) as log:
            assert seal_of(log, uid)["by"] == "client"

    asyncio.run(scenario())


def test_the_id_of_an_answer_of_generate_ends_it(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        body = {"text": "endless", "stream": True}
        async with site(redis_url) as here, here.connection(body, path="/generate") as connection:
            frame = await connection.receive()
            ((uid, _),) = stand_in.requests()
            assert f'"id":"{uid}"'.encode() in frame
            assert (await abort(here, rid=uid))["aborted"] == [uid]
            while b"[DONE]" not in frame:
                frame = await connection.receive()
            assert b"cancelled by client" in frame

    asyncio.run(scenario())


def test_siblings_are_ended_by_the_uid_that_they_have_in_common_and_each_by_its_own(
    redis_url: str, stages: Stages
) -> None:
    async def scenario() -> None:
        common = new_uid()
        uids = sibling_uids(common, 3)
        submit(stages.log, common, 3)
        async with site(redis_url, ready=False) as here:
            assert (await abort(here, rid=uids[1]))["aborted"] == [uids[1]]
            expected = {"aborted": [uids[0], uids[2]], "ended": [uids[1]], "unknown": []}
            assert await abort(here, rid=common) == expected
        assert stages.log.alive(uids) == set()

    asyncio.run(scenario())


@pytest.mark.parametrize("rid", ["x", "f" * 32, "00000000000070008000000000000000", "x" * 256])
def test_what_is_no_request_is_no_error(redis_url: str, rid: str) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            assert await abort(here, rid=rid) == {"aborted": [], "ended": [], "unknown": [rid]}

    asyncio.run(scenario())


def test_all_that_clients_have_sent_is_ended_whichever_frontend_took_it_and_nothing_else(
    redis_url: str, stages: Stages
) -> None:
    async def scenario() -> None:
        uids = [new_uid() for _ in range(2 * AT_ONCE + 3)]
        for uid in uids:
            submit(stages.log, uid)
        probe, ended = new_uid(), new_uid()
        submit(stages.log, probe, endpoint="probe")
        submit(stages.log, ended)
        async with site(redis_url, ready=False) as here:
            await abort(here, rid=ended)
            with capture_logs() as lines:
                told = await abort(here, abort_all=True)
            assert (sorted(told["aborted"]), told["ended"], told["unknown"]) == (sorted(uids), [], [])
            (line,) = [line for line in lines if line["event"] == "requests_aborted"]
            assert (line["all"], line["aborted"]) == (True, len(uids))
            assert (await abort(here, abort_all=True, rid=""))["aborted"] == []
        assert set(stages.log.living()) == {probe}, "it belongs to no client, and says whether the server is ready"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "rid"),
        ({"rid": None, "abort_all": None}, "rid"),
        ({"rid": "", "abort_all": False}, "rid"),
        ({"rid": ["x"]}, "rid"),
        ({"rid": "x" * 257}, "rid"),
        ({"abort_all": "yes"}, "abort_all"),
        ({"rid": "x", "abort_message": "a word"}, "abort_message"),
        ([], None),
    ],
)
def test_a_request_to_end_nothing_is_refused(redis_url: str, body: Any, param: str | None) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            status, error = await error_of(here.client.post(ABORT, json=body))
            assert (status, error["param"]) == (400, param)

    asyncio.run(scenario())


def test_unknown_fields_are_named(redis_url: str) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            response = await here.client.post(ABORT, json={"rid": "x", "zeta": 1})
            assert response.headers["x-minisgl-unknown-fields"] == "zeta"

    asyncio.run(scenario())


def test_without_redis_nothing_is_said_to_have_ended(redis_servers: Servers, tmp_path: Path) -> None:
    async def scenario(server: RunningServer) -> None:
        async with site(server.url, ready=False) as here:
            server.process.kill()
            server.process.wait()
            for body in ({"rid": new_uid()}, {"abort_all": True}):
                status, error = await error_of(here.client.post(ABORT, json=body))
                assert (status, error["code"]) == (503, "overloaded")

    with running_server(redis_servers.binary("embedded"), tmp_path) as server:
        asyncio.run(scenario(server))
