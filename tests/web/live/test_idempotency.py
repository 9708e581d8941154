"""Requests that are sent twice under one Idempotency-Key."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
from structlog.testing import capture_logs
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import (
    DONE,
    Site,
    bytes_of,
    chat,
    error_of,
    one_request,
    received,
    request_lines,
    seal_of,
    site,
    until,
)

import web.live.listener
from pipeline.events import Cancelled, Failed
from pipeline.log.protocol import RequestLimits
from pipeline.names import Names, tokens_id

KEY = {"Idempotency-Key": "a-key"}


def lives(stand_in: StandIn, uid: str) -> bool:
    with closing(stand_in.stages.log.another()) as log:
        return log.alive([uid]) == {uid}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["hello", "refuse"])
async def test_what_was_answered_is_answered_again_in_the_same_bytes(
    here: Site, there: Site, stand_in: StandIn, stream: bool, words: str
) -> None:
    body = chat(words, stream=stream, zeta=1) | ({"stream_options": {"include_usage": True}} if stream else {})
    answers = []
    for place in (here, here, there):
        response = await place.post(body, headers=KEY)
        content = await response.get_data(as_text=False)
        names = ("x-minisgl-uid", "content-type", "x-minisgl-unknown-fields")
        answers.append((response.status_code, content, *(response.headers.get(name) for name in names)))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == (400 if words == "refuse" else 200)
    assert len(stand_in.requests()) == (0 if words == "refuse" else 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_of_two_that_are_sent_at_once_one_is_computed_and_both_are_answered(
    here: Site, there: Site, stand_in: StandIn, stream: bool, elsewhere: bool
) -> None:
    places = (here, there if elsewhere else here)
    for number in range(5):
        headers = {"Idempotency-Key": str(number)}
        posts = [place.post(chat(stream=stream), headers=headers) for place in places]
        first, second = await asyncio.gather(*posts)
        assert first.headers["x-minisgl-uid"] == second.headers["x-minisgl-uid"]
        assert await bytes_of(first) == await bytes_of(second) != b""
    assert len(stand_in.requests()) == 5


async def test_one_that_is_sent_again_while_it_runs_gets_all_of_it_as_it_comes(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 1000.0)  # what comes is what was waited for
    body = chat("endless", stream=True)
    with capture_logs() as lines:
        async with (
            site(redis_url) as here,
            site(redis_url, "web-1") as there,
            here.connection(body, KEY) as first,
        ):
            sent = await received(first, b"id: 3-0\n")
            async with here.connection(body, KEY) as second, there.connection(body, KEY) as third:
                others = [await received(each, b"id: 30-0\n") for each in (second, third)]
                uid = await one_request(stand_in)
                await here.log.end(uid, Cancelled(by="me"), frontend="web-0")
                others[0] += await received(second, DONE)
                others[1] += await received(third, DONE)
            assert others == 2 * [sent + await received(first, DONE)]
    said = request_lines(lines)
    assert [line["uid"] for line in said] == 3 * [uid]
    assert sorted(bool(line.get("attached")) for line in said) == [False, True, True]


async def test_another_body_under_a_key_is_refused(here: Site, stand_in: StandIn) -> None:
    await here.post(chat(), headers=KEY)
    status, error = await error_of(here.post(chat(seed=1), headers=KEY))
    assert (status, error["code"], error["param"]) == (400, "idempotency_key_reused", "Idempotency-Key")
    assert len(stand_in.requests()) == 1
    assert (await here.post(chat(seed=1), headers={"Idempotency-Key": "another"})).status_code == 200


async def test_a_key_whose_request_has_expired_is_free(here: Site, redis_url: str, stand_in: StandIn) -> None:
    uids = []
    for _ in range(2):
        response = await here.post(chat(), headers=KEY)
        uids.append(response.headers["x-minisgl-uid"])
        command(redis_url, "DEL", Names().request(uids[0]))
    assert uids[0] != uids[1] == (await here.post(chat(), headers=KEY)).headers["x-minisgl-uid"]
    assert len(stand_in.requests()) == 2


@pytest.mark.parametrize(
    "end", [Cancelled(by="client"), Failed(status=503, code="shutting_down", message="Send it again.")]
)
async def test_what_ended_in_vain_is_computed_anew_once(
    here: Site, there: Site, stand_in: StandIn, end: Cancelled | Failed
) -> None:
    first = asyncio.create_task(error_of(here.post(chat("silent"), headers=KEY)))
    uid = await one_request(stand_in)
    await here.log.end(uid, end, frontend="web-0")
    assert (await first)[0] in (499, 503)
    again = [asyncio.create_task(error_of(place.post(chat("silent"), headers=KEY))) for place in (here, there)]
    await until(lambda: len(stand_in.requests()) == 2)
    uid = stand_in.requests()[1][0]
    tails = [place.frontend.tail for place in (here, there)]
    await until(lambda: all({listener.uid for listener in tail.listeners} == {uid} for tail in tails))
    await here.log.end(uid, Cancelled(by="me"), frontend="web-0")
    assert [error["message"] for _, error in await asyncio.gather(*again)] == 2 * ["The request was cancelled by me."]
    assert len(stand_in.requests()) == 2


async def test_a_full_server_still_answers_what_it_was_asked_before(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, limits=RequestLimits(max_queued=1)) as here:
        answer = await bytes_of(here.post(chat(), headers=KEY))
        async with here.waiting():
            await until(lambda: len(stand_in.requests()) == 2)
            assert (await here.post(chat())).status_code == 503
            assert await bytes_of(here.post(chat(), headers=KEY)) == answer
            command(redis_url, "CONFIG", "SET", "maxmemory", "1")
            assert await bytes_of(here.post(chat(), headers=KEY)) == answer


# clients that leave


@pytest.mark.parametrize("first_leaves", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_when_one_client_leaves_the_request_goes_on_for_the_other(
    here: Site, there: Site, stand_in: StandIn, elsewhere: bool, first_leaves: bool
) -> None:
    body = chat("endless", stream=True)
    place = there if elsewhere else here
    async with here.connection(body, KEY) as first:
        sent = await received(first, b"id: 1-0\n")
        uid = await one_request(stand_in)
        async with place.connection(body, KEY) as second:
            sent += await received(second, b"id: 1-0\n")
            leaves, stays, where = (first, second, here) if first_leaves else (second, first, place)
            await leaves.disconnect()
            await until(lambda: len(where.frontend._clients) == (0 if elsewhere else 1))
            await until(lambda: not where.frontend._background)
            assert lives(stand_in, uid)
            await received(stays, b"id: " + tokens_id(sent.count(b"id: ") + 20).encode())
    await until(lambda: not (here.is_busy or there.is_busy))
    assert not lives(stand_in, uid)  # nobody is left


async def test_clients_that_leave_at_once_leave_nothing_behind(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        for _ in range(20):
            async with here.connection(chat("endless"), KEY), here.connection(chat("endless"), KEY):
                await until(lambda: here.frontend.tail.listeners)
            await until(lambda: not here.is_busy)
        assert here.frontend.tail.listeners == ()
        await until(lambda: command(redis_url, "ZCARD", Names().live) == 0)
    assert command(redis_url, "KEYS", Names().reader("*")) == []


async def test_a_drain_ends_what_was_sent_here_and_not_what_was_come_to(
    here: Site, there: Site, stand_in: StandIn
) -> None:
    body = chat("endless", stream=True)
    async with here.connection(body, KEY) as first, there.connection(body, KEY) as second:
        await received(first, b"id: 1-0\n")
        await received(second, b"id: 1-0\n")
        uid = await one_request(stand_in)
        await there.frontend.drain(0.1)
        assert b'"code":"shutting_down"' in await received(second, DONE)
        assert lives(stand_in, uid)
    await until(lambda: not here.is_busy)
    assert seal_of(stand_in.stages.log, uid)["by"] == "client"
