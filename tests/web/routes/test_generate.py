"""POST /generate as HTTP clients see it, with stand-in stages behind a real Redis."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quart import Response
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import DONE, IDS, Site, error_of, one_request, site, until

import web.live.listener
import web.live.open_request
from pipeline.events import Cancelled
from pipeline.names import SEAL, Names, tokens_id

GENERATE = "/generate"
FORMS: tuple[dict[str, Any], ...] = ({"prompt": "hello"}, {"text": "hello", "stream": True})


async def generate(here: Site, body: dict[str, Any], **options: Any) -> Response:
    return await here.client.post(GENERATE, json=body, **options)


async def streamed(here: Site, body: dict[str, Any], **options: Any) -> tuple[str, bytes]:
    """Return uid and bytes of a stream."""
    response = await generate(here, body, headers=IDS, **options)
    assert (response.status_code, response.content_type) == (200, "text/event-stream; charset=utf-8")
    return response.headers["x-minisgl-uid"], await response.get_data(as_text=False)


async def read(here: Site, uid: str, **headers: str) -> bytes:
    response = await here.client.get(f"/v1/requests/{uid}/events", headers=headers)
    assert response.status_code == 200
    return await response.get_data(as_text=False)


def documents(stream: bytes) -> list[Any]:
    """Return the JSON of each line but [DONE], as SGLang's own clients read them."""
    *lines, done = [line for line in stream.decode().splitlines() if line.strip()]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# SGLang's form


async def test_where_one_of_several_fails_all_have_failed(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        assert (await error_of(generate(here, {"text": ["endless", "break"]})))[0] == 500
        _, stream = await streamed(here, {"text": ["endless", "break"], "stream": True})
        assert documents(stream)[-1]["error"]["code"] == "engine_error"
        await until(lambda: not here.is_busy)
    assert command(redis_url, "ZCARD", Names().live) == 0


async def test_while_it_waits_a_client_of_sglang_reads_nothing_but_blank_lines(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "KEEP_ALIVE_S", 0.01)
    body = {"text": "silent", "stream": True}
    async with site(redis_url) as here, here.connection(body, path=GENERATE) as connection:
        assert await connection.receive() == await connection.receive() == b"\n"
        uid = await one_request(stand_in)
        await here.log.end(uid, Cancelled(by="me"), frontend="web-0")
        while not (piece := await connection.receive()).strip():
            pass
        assert b"cancelled by me" in piece and piece.endswith(DONE)


# Mini-SGLang's form


# both


@pytest.mark.parametrize("body", FORMS, ids=["mini-sglang", "sglang"])
@pytest.mark.parametrize("words", ["hello", "break"])
async def test_a_stream_is_read_again_byte_by_byte_anywhere(
    redis_url: str, stand_in: StandIn, words: str, body: dict[str, Any]
) -> None:
    sent = {name: words if value == "hello" else value for name, value in body.items()}
    async with site(redis_url) as here, site(redis_url, "web-1") as there:
        uid, stream = await streamed(here, sent)
        for place in (here, there):
            assert await read(place, uid) == stream
        rest = await read(there, uid, **{"Last-Event-ID": tokens_id(1)})
        assert stream.endswith(rest) and rest.endswith(DONE)
        num_frames = (stream.count(b"\n\n"), rest.count(b"\n\n"))
        assert num_frames[0] - num_frames[1] == 1, "all but that of the first token"
        assert await read(there, uid, **{"Last-Event-ID": SEAL}) == DONE
