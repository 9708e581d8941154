"""What HTTP clients see, with stand-in stages behind a real Redis."""

from __future__ import annotations

from typing import Any

import pytest
from stand_in_stages import StandIn
from structlog.testing import capture_logs
from web_site import chat, error_of, one_request, request_lines, seal_of, site, until

import web.live.listener
import web.live.open_request
from pipeline.events import Failed, new_uid


async def test_a_whole_completion(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        response = await here.post(chat(model="demo", seed=3, user="ann", zeta=1) | {"al,pha\n": 2})
        body = await response.get_json()
        ((uid, submitted),) = stand_in.requests()
        assert response.status_code == 200 and body["id"] == f"chatcmpl-{uid}" and body["model"] == "demo"
        assert body["choices"][0]["message"]["content"] == "Hello\u2028!"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["total_tokens"] == 8
        assert response.headers["x-minisgl-uid"] == uid
        assert response.headers["x-minisgl-unknown-fields"] == "al%2Cpha%0A, zeta"
        assert (submitted.sampling.seed, submitted.labels, submitted.model) == (3, {"user": "ann"}, "demo")


async def test_a_copy_of_a_request_is_labelled_with_its_uid(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        uid = f"{new_uid()}.1"
        for sent in (chat(user="ann", n=2), chat()):
            assert (await here.post(sent, headers={"x-minisgl-copy-of": uid})).status_code == 200
        labels = [submitted.labels for _, submitted in stand_in.requests()]
        assert sorted(labels, key=len) == [{"copy_of": uid}, *[{"user": "ann", "copy_of": uid}] * 2]
        status, error = await error_of(here.post(chat(), headers={"x-minisgl-copy-of": "me"}))
        assert (status, error["param"], error["code"]) == (400, "x-minisgl-copy-of", "invalid_value")


async def test_a_streamed_completion(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        role, *texts, last, usage = await here.chunks(chat(stream_options={"include_usage": True}))
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [text["choices"][0]["delta"]["content"] for text in texts] == ["Hel", "lo\u2028!"]
        assert last["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_refusal_of_a_stage_has_its_status_streamed_or_not(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        for stream in (False, True):
            status, error = await error_of(here.post(chat("refuse", stream=stream)))
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_a_failure_after_the_first_token_is_an_error_frame_or_a_status(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url) as here:
        *_, last = await here.chunks(chat("break"))
        assert last["error"]["code"] == "engine_error"
        assert (await error_of(here.post(chat("break"))))[0] == 500


async def test_a_stream_is_kept_alive_while_it_waits(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "KEEP_ALIVE_S", 0.01)
    async with site(redis_url) as here, here.connection(chat("silent", stream=True)) as connection:
        assert await connection.receive() == b": waiting\n\n"
        assert await connection.receive() == b": waiting\n\n"
        uid = await one_request(stand_in)
        failed = Failed(status=503, code="engine_gone", message="It is gone.")
        await here.log.end(uid, failed, frontend="web-0")
        while (piece := await connection.receive()).startswith(b":"):
            pass
        assert b'"code":"engine_gone"' in piece and piece.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_our_own_bug_in_an_answer_is_logged_once_as_ours_and_cancelled_by_us(
    redis_url: str, stand_in: StandIn, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [1] if stream else []  # so many reads bring what they should: a stream breaks off after it has begun

    async def broken(opened: web.live.open_request.OpenRequest) -> list[Any]:
        if not good:
            raise RuntimeError("a secret")
        good.pop()
        return await opened.listeners[0].next()

    monkeypatch.setattr(web.live.open_request.OpenRequest, "next", broken)
    async with site(redis_url) as here:
        with capture_logs() as lines:
            if stream:
                chunks = await here.chunks(chat("endless"))
                assert chunks[-1]["error"]["code"] == "internal_error"
            else:
                assert (await error_of(here.post(chat("endless"))))[1]["code"] == "internal_error"
            await until(lambda: not here.is_busy)
        (line,) = request_lines(lines)
        assert (line["status"], line["error"]) == (500, "internal_error")
    assert seal_of(stand_in.stages.log, line["uid"])["by"] == "web"
