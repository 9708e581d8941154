"""GET /v1/pipeline/events: what `minisgl top --json` says, for each key its own requests. GET /v1/caller."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from support.lived_requests import LivedRequests
from support.redis_servers import until as wait_until
from support.stand_in_stages import StandIn
from support.web_process import serving
from support.web_site import ADMIN, ANN, BOB, KEYS, Site, bearer, chat, code_of, received, site, until

from pipeline.log.redis import RedisLog
from pipeline.names import new_uid
from pipeline.views.pipeline import view_of
from pipeline.views.reader import Reader, as_json
from web.http.keys import Keys, hash_of, read_keys

PATH = "/v1/pipeline/events"


async def pictures(here: Site, count: int = 1, key: str = "") -> list[dict[str, Any]]:
    response = await here.get(f"{PATH}?pictures={count}", **bearer(key))
    assert response.status_code == 200 and response.content_type == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    *frames, rest = (await response.get_data(as_text=False)).split(b"\n\n")
    assert rest == b"" and len(frames) == count
    return [orjson.loads(frame.removeprefix(b"data: ")) for frame in frames]


async def test_a_picture_is_what_top_prints(bare: Site, log: RedisLog) -> None:
    lived = LivedRequests(log)
    finished, dead, queued = (f"{1_700_000_000_000 + number:012x}" + new_uid()[12:] for number in range(3))
    lived.running(finished, labels={"user": "ann"})
    lived.tokens(finished, "Hel", "lo")
    lived.finished(finished, 2)
    lived.dead(dead)
    lived.submitted(queued)
    (told,) = await pictures(bare)
    printed = orjson.loads(as_json(view_of(Reader(log).read())))
    for each in (told, printed):  # these go on
        for name in ("at_ms", "redis", "slots"):
            each.pop(name)
        for request in each["requests"]:
            request.pop("age_ms"), request.pop("tokens_per_s")
    assert told == printed
    assert [request["state"] for request in told["requests"]] == ["queued", "failed", "finished"]
    assert (told["others"], told["error"], told["num_dead"]) == (0, "", 1)


async def test_a_key_sees_its_own_requests_and_of_the_others_how_many(keyed: Site, log: RedisLog) -> None:
    lived, uids = LivedRequests(log), {}
    for key in (ANN, BOB, ADMIN):
        lived.owner = "" if key == ADMIN else hash_of(key)
        uids[key] = lived.running()
    for key in (ANN, BOB):
        (told,) = await pictures(keyed, key=key)
        assert [request["uid"] for request in told["requests"]] == [uids[key]]
        assert (told["others"], told["num_live"]) == (2, 3)
        assert told["streams"][1]["length"] == 3, "the pipeline's numbers are for all"
    (told,) = await pictures(keyed, key=ADMIN)
    assert {request["uid"] for request in told["requests"]} == {*uids.values()} and told["others"] == 0


async def test_the_admin_key_alone_sees_where_workers_run(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, keys=KEYS) as here:
        (told,) = await pictures(here, key=ANN)
        assert told["slots"] and {(slot["host"], slot["pid"], slot["address"]) for slot in told["slots"]} == {
            ("", 0, "")
        }
        (told,) = await pictures(here, key=ADMIN)
        assert any(slot["host"] and slot["pid"] for slot in told["slots"])


async def test_the_stream_goes_on_with_what_happens_until_the_client_leaves(here: Site) -> None:
    async with here.reading(PATH) as connection:
        first = await received(connection, b"\n\n")
        response = await here.post(chat())
        uid = response.headers["x-minisgl-uid"]
        assert uid.encode() not in first
        async with asyncio.timeout(20):
            await received(connection, uid.encode())
        assert here.frontend.pictures.is_reading
        await connection.disconnect()
        await until(lambda: not here.frontend.pictures.is_reading)


async def test_a_process_that_stops_ends_the_streams_and_takes_no_new_ones(bare: Site) -> None:
    async with bare.reading(PATH) as connection:
        await received(connection, b"\n\n")
        await bare.frontend.drain(1)
        await until(lambda: not bare.frontend.pictures.is_reading)
    assert await code_of(bare.get(PATH)) == (503, "shutting_down")


async def test_the_headers_alone_take_no_picture(bare: Site) -> None:
    async with asyncio.timeout(20):
        response = await bare.client.head(PATH)
    assert (response.status_code, response.content_type) == (200, "text/event-stream; charset=utf-8")
    assert not bare.frontend.pictures.is_reading


@pytest.mark.parametrize("wrong", ["0", "-1", "1.5", "all", "1" * 10, "%D9%A3"])
async def test_a_number_of_pictures_that_is_none_is_refused(bare: Site, wrong: str) -> None:
    assert await code_of(bare.get(f"{PATH}?pictures={wrong}")) == (400, "invalid_value")


async def test_a_caller_is_told_what_its_key_may_do(redis_url: str) -> None:
    for keys, key, told in (
        (Keys(), "", {"owner": "", "admin": True, "keys": False}),
        (KEYS, ANN, {"owner": hash_of(ANN), "admin": False, "keys": True}),
        (KEYS, ADMIN, {"owner": "", "admin": True, "keys": True}),
        (read_keys((), "", ADMIN), "", {"owner": "", "admin": False, "keys": True}),
    ):
        async with site(redis_url, ready=False, keys=keys) as here:
            response = await here.get("/v1/caller", **bearer(key))
            assert await response.get_json() == told
    async with site(redis_url, ready=False, keys=KEYS) as here:
        assert await code_of(here.get("/v1/caller")) == (401, "invalid_api_key")


@pytest.mark.slow
def test_a_real_process_notices_who_leaves_and_stops_though_somebody_looks(
    redis_url: str, stand_in: StandIn, tmp_path: Path
) -> None:
    output = tmp_path / "output"

    def num_streams_over() -> int:
        return output.read_text().count("pictures=")

    with serving(redis_url, output=output) as server, httpx.Client(timeout=60) as client:
        url = f"http://127.0.0.1:{server.port}{PATH}"
        with client.stream("GET", url) as response:
            assert next(response.iter_lines()).startswith("data: {")
        wait_until(num_streams_over, timeout_s=60)
        with client.stream("GET", url) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            server.process.send_signal(signal.SIGTERM)
            assert all(line == "" or line.startswith("data: {") for line in lines), "the answer is complete"
        assert server.process.wait(60) == 0
        assert num_streams_over() == 2
