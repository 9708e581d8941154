"""The life of one request: refused, left by its client, past its deadline, cancelled."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.redis_servers import RunningServer, command
from support.stand_in_stages import Stages, StandIn, finished, tokens
from support.web_site import CHAT, DONE, Site, chat, code_of, one_request, received, request_lines, seal_of, site, until

import pipeline.log.operations.requests
import web.live.counts
import web.live.listener
import web.live.open_request
from pipeline.errors import LogUnavailable, RequestError
from pipeline.events import Cancelled, SamplingParams, Submitted
from pipeline.log.protocol import RequestLimits
from pipeline.names import Names
from web.live.open_request import open_request


async def test_a_client_that_leaves_at_once_cancels_what_it_had_submitted(here: Site, redis_url: str) -> None:
    for _ in range(20):
        async with here.connection(chat("endless")):
            await until(lambda: here.frontend.tail.listeners)
        await until(lambda: not here.is_busy)
    assert command(redis_url, "ZCARD", Names().live) == 0


async def test_a_deadline_that_the_log_cannot_hear_of_reaches_the_client_all_the_same(
    own_redis: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.open_request, "END_TRIES", 2)
    monkeypatch.setattr(web.live.open_request, "LOG_PATIENCE_S", 0.2)
    stand_in = StandIn(own_redis.url)
    with capture_logs() as lines:
        async with site(own_redis.url) as here:
            here.log.limits = RequestLimits(timeout_s=1)
            answer = asyncio.create_task(code_of(here.post(chat("silent"))))
            await until(stand_in.requests)
            stand_in.close()
            own_redis.process.kill()
            own_redis.process.wait()
            assert await answer == (504, "timeout")
    assert [line["status"] for line in lines if line["event"] == "request"] == [504]
    assert [line["tries"] for line in lines if line["event"] == "request_never_ended"] == [2]


async def test_our_own_bug_before_the_submit_is_logged_as_ours(here: Site) -> None:
    unsayable = Submitted(
        endpoint="test", frontend="web-0", prompt="p", sampling=SamplingParams(), labels={"user": 10**30}
    )
    with capture_logs() as lines:
        (error,) = await asyncio.gather(open_request(here.frontend, [unsayable]), return_exceptions=True)
        await until(lambda: not here.is_busy)
    assert isinstance(error, RequestError) and error.status == 500 and "our bug" in error.message
    (broke,) = [line for line in lines if line["event"] == "request_broke"]
    (line,) = request_lines(lines)
    assert broke["exc_info"] and broke["uid"] == line["uid"]
    assert (line["status"], line["error"]) == (500, "internal_error")


async def test_a_request_is_cancelled_when_its_clients_grace_is_over(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, disconnect_grace_s=0.5) as here:
        async with here.connection(chat("endless", stream=True)) as connection:
            await received(connection, b"id: 1-0\n")
        uid = await one_request(stand_in)
        await until(lambda: not here.is_busy)
        left_s = time.monotonic()
        assert not seal_of(stand_in.stages.log, uid)
        await until(lambda: seal_of(stand_in.stages.log, uid))
        assert seal_of(stand_in.stages.log, uid)["by"] == "client" and time.monotonic() - left_s > 0.3


@pytest.mark.parametrize("reader", ["web-0", "web-1"])
@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_a_request_that_its_client_left_goes_on_while_somebody_reads_it(
    redis_url: str, stand_in: StandIn, grace_s: float, reader: str
) -> None:
    async with site(redis_url, disconnect_grace_s=grace_s) as here, site(redis_url, "web-1") as there:
        place = here if reader == "web-0" else there
        async with here.connection(chat("endless", stream=True)) as connection:
            await received(connection, b"id: 1-0\n")
            uid = await one_request(stand_in)
            async with place.reading(f"/v1/requests/{uid}/events") as reading:
                await received(reading, b"id: 1-0\n")
                await connection.disconnect()
                await until(lambda: len(here.frontend.tail.listeners) == (place is here))
                await until(lambda: not here.frontend._in_grace)
                await until(lambda: not here.frontend._background)
                assert not seal_of(stand_in.stages.log, uid)
                await here.log.end(uid, Cancelled(by="me"), frontend="web-0")
                assert b"cancelled by me" in await received(reading, DONE)


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_request_that_the_log_lost_before_its_first_token_is_submitted_again(
    redis_url: str, stages: Stages, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 0.1)
    with capture_logs() as lines:
        async with site(redis_url, ready=False) as here:
            stages.say_phase("ready")
            await until(lambda: here.frontend.readiness.models)
            answer = asyncio.create_task(here.post(chat(n=choices)))
            uids = await chats(stages, choices)
            here.frontend.budget.most_bytes = 1  # what is known of the log may be older than its loss
            command(redis_url, "DEL", *map(Names().request, uids))
            assert await chats(stages, choices) == uids
            for uid in uids:
                stages.say(uid, 1, tokens(1, "a"), finished(1), frontend="web-0")
            told = await (await answer).get_json()
            assert [choice["message"]["content"] for choice in told["choices"]] == choices * ["a"]
    assert len([line for line in lines if line["event"] == "submitted_again"]) == 1


async def test_a_request_that_the_log_lost_after_a_token_of_a_sibling_fails(
    bare: Site, redis_url: str, stages: Stages
) -> None:
    stages.say_phase("ready")
    await until(lambda: bare.frontend.readiness.models)
    async with bare.connection(chat(n=2, stream=True)) as connection:
        uids = await chats(stages, 2)
        stages.say(uids[0], 1, tokens(1, "a"), frontend="web-0")
        assert b"assistant" in await connection.receive()
        command(redis_url, "DEL", Names().request(uids[1]))
        assert b'"code":"log_lost"' in await connection.receive()


async def of_model(here: Site, stages: Stages) -> None:
    stages.say_phase("ready")
    await until(lambda: here.frontend.readiness.models)


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_request_that_the_log_lost_after_tokens_begins_again_and_its_client_gets_the_rest(
    bare: Site, redis_url: str, stages: Stages, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 0.1)
    await of_model(bare, stages)
    key = {"Idempotency-Key": "k"}
    async with bare.connection(chat(n=choices, stream=True), key) as connection:
        uids = await chats(stages, choices)
        stages.say(uids[0], 1, tokens(1, "one "), frontend="web-0")
        got = await received(connection, b"one ")
        async with bare.reading(f"/v1/requests/{uids[0]}/events") as reader:
            read = await received(reader, b"one ")
            keys = [*map(Names().request, uids), *command(redis_url, "KEYS", Names().idempotency("*"))]
            assert command(redis_url, "DEL", *keys) == choices + 1
            assert await chats(stages, choices) == uids
            for uid in uids:
                stages.say(uid, 2, tokens(2, "one two ", count=2), frontend="web-0")
                stages.say(uid, 3, tokens(3, "three"), finished(3), frontend="web-0")
            got += await received(connection, DONE)
            read += await received(reader, DONE)
    assert [got.count(word) for word in (b"one ", b"two ", b"three")] == [choices] * 3
    assert [read.count(word) for word in (b"one ", b"two ", b"three")] == [1] * 3
    assert b"error" not in got + read
    again = await bare.post(chat(n=choices, stream=True), headers=key)  # the key leads to it, as before
    assert again.headers["x-minisgl-uid"] == uids[0].partition(".")[0]
    await again.get_data()


@pytest.mark.parametrize("why", ["other tokens", "batch", "slow client", "deadline", "large"])
async def test_a_request_that_the_log_lost_after_tokens_fails_where_it_cannot_go_on(
    bare: Site, redis_url: str, stages: Stages, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 0.1)
    if why == "large":
        monkeypatch.setattr(web.live.counts, "MOST_KEPT_BYTES", 1)
    stages.batch_invariant = why != "batch"
    await of_model(bare, stages)
    async with bare.connection(chat(stream=True)) as connection:
        (uid,) = await chats(stages, 1)
        stages.say(uid, 1, tokens(1, "one "), frontend="web-0")
        await received(connection, b"one ")
        (client,) = bare.frontend._clients
        if why == "slow client":
            client.listeners[0].is_slow = True
        if why == "deadline":
            client._since_s -= bare.frontend.limits.timeout_s
        command(redis_url, "DEL", Names().request(uid))
        if why == "other tokens":
            assert await chats(stages, 1) == [uid]
            stages.say(uid, 1, tokens(1, "another "), frontend="web-0")
        assert b'"code":"log_lost"' in await received(connection, DONE)
    await until(lambda: not bare.is_busy)
    assert bare.frontend.budget._kept_bytes == 0


async def test_when_one_of_several_prompts_is_refused_none_is_kept_for_long(here: Site, redis_url: str) -> None:
    body = {"prompt": ["silent", "refuse", "silent"]}
    assert (await here.client.post("/v1/completions", json=body)).status_code == 400
    await until(lambda: not here.is_busy)
    keys = command(redis_url, "KEYS", Names().request("*.*"))
    assert len(keys) == 3
    assert all(command(redis_url, "PTTL", key) <= 60_000 for key in keys)


UNHEARD = "Only 0 of 1 replicas within 0.1 s (--acks 1) have the request, so it was not accepted. Send it again; "
UNHEARD += "if this continues, look after the replicas of Redis."


def lose_the_replicas(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on requests must be on a replica, and there is none."""
    monkeypatch.setattr(pipeline.log.operations.requests, "ACK_MS", 100)
    here.log.limits = RequestLimits(acks=1)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}], ids=str)
async def test_what_no_replica_has_is_refused_and_taken_back(
    here: Site, redis_url: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    lose_the_replicas(here, monkeypatch)
    key = {"Idempotency-Key": "k"}
    response = await here.post(chat(**fields), headers=key)
    told = (await response.get_json())["error"]
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (told["code"], told["message"]) == ("not_replicated", UNHEARD)
    await until(lambda: not here.is_busy)
    assert command(redis_url, "ZCARD", Names().live) == 0
    here.log.limits = RequestLimits()
    again = await here.post(chat(**fields), headers=key)
    assert again.status_code == 200 and await again.get_data()


async def test_a_request_of_another_client_is_not_taken_back_where_no_replica_acknowledges_it(
    here: Site, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, body = {"Idempotency-Key": "k"}, chat("endless", stream=True)
    async with here.connection(body, key) as connection:
        await received(connection, b"id: 1-0\n")
        lose_the_replicas(here, monkeypatch)
        assert await code_of(here.post(body, headers=key)) == (503, "not_replicated")
        await until(lambda: len(here.frontend._clients) == 1 and not here.frontend._background)
        assert not seal_of(stand_in.stages.log, await one_request(stand_in))


async def test_what_no_client_waits_for_is_refused_and_taken_back_too(
    here: Site, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_replicas(here, monkeypatch)
    body = {"input": "hello", "background": True, "model": "tiny"}
    assert await code_of(here.client.post("/v1/responses", json=body)) == (503, "not_replicated")
    await until(lambda: not here.is_busy)
    assert command(redis_url, "ZCARD", Names().live) == 0


def lose_the_answers(here: Site, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on requests are submitted, but *here* is not told. None is ended before the event that is returned."""
    log, is_back = here.log, asyncio.Event()
    submit, end, abandon = log.submit, log.end, log.abandon

    async def lost(*args: Any, **more: Any) -> Any:
        await submit(*args, **more)
        raise LogUnavailable("its answer is lost")

    async def late(way: Any, *args: Any, **more: Any) -> Any:
        await is_back.wait()
        return await way(*args, **more)

    monkeypatch.setattr(log, "submit", lost)
    monkeypatch.setattr(log, "end", functools.partial(late, end))
    monkeypatch.setattr(log, "abandon", functools.partial(late, abandon))
    return is_back


async def test_what_was_submitted_though_its_answer_was_lost_goes_on_for_who_comes_to_it_under_its_key(
    here: Site, there: Site, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back = lose_the_answers(here, monkeypatch)
    key, body = {"Idempotency-Key": "k"}, chat("endless", stream=True)
    assert await code_of(here.post(body, headers=key)) == (503, "overloaded")
    async with there.connection(body, key) as connection:
        await received(connection, b"id: 1-0\n")
        is_back.set()
        await until(lambda: not here.is_busy)
        assert not seal_of(stand_in.stages.log, await one_request(stand_in))
    await until(lambda: not there.is_busy)
    assert seal_of(stand_in.stages.log, await one_request(stand_in)), "the second one has left"


async def test_what_nobody_comes_to_is_ended_though_the_answer_to_its_submit_was_lost(
    here: Site, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_answers(here, monkeypatch).set()
    for path, body in (("/v1/chat/completions", chat("silent")), ("/v1/responses", {"input": "silent"})):
        background = {"background": True} if "input" in body else {}
        assert await code_of(here.client.post(path, json=body | background)) == (503, "overloaded")
        await until(lambda: not here.is_busy and not command(redis_url, "ZCARD", Names().live))


async def test_what_runs_in_the_background_goes_on_though_the_answer_to_its_submit_was_lost(
    here: Site, there: Site, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back = lose_the_answers(here, monkeypatch)
    key, body = {"Idempotency-Key": "k"}, {"input": "held", "background": True}
    assert await code_of(here.client.post("/v1/responses", json=body, headers=key)) == (503, "overloaded")
    again = await (await there.client.post("/v1/responses", json=body, headers=key)).get_json()
    is_back.set()
    await until(lambda: not here.is_busy)
    stand_in.released.set()
    await there.read(f"/v1/responses/{again['id']}?stream=true")  # until it has ended
    assert json.loads(await there.read(f"/v1/responses/{again['id']}"))["status"] == "completed"


async def test_a_server_without_its_replicas_is_not_ready_and_says_so(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.log.operations.requests, "ACK_MS", 100)
    async with site(redis_url, ready=False, limits=RequestLimits(acks=1)) as here:
        await until(lambda: here.frontend.readiness.probe_failure)
        response = await here.get("/ready")
        told = await response.get_json()
        assert (response.status_code, told["waiting_for"]) == (503, ["probe"])
        assert told["detail"] == "only 0 of 1 replicas within 0.1 s (--acks 1) have it"
        here.log.limits = RequestLimits()
        await until(lambda: here.frontend.readiness.probed)
        assert "detail" not in await (await here.get("/ready")).get_json()


async def chats(stages: Stages, count: int) -> list[str]:
    """Take in requests until there are so many chats; return their uids in order."""
    uids: list[str] = []
    while len(uids) < count:
        uids += [uid for uid, event in await asyncio.to_thread(stages.take_in) if event.endpoint == CHAT]
    return sorted(uids)
