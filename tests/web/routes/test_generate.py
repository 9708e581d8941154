"""POST /generate as HTTP clients see it, with stand-in stages behind a real Redis."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
from quart import Response
from redis_servers import command
from stand_in_stages import MODELS, Stages, StandIn, finished, tokens
from structlog.testing import capture_logs
from web_site import Site, error_of, site, until

import web.live.listener
import web.live.open_request
from ops.sse_reader import frames_in
from pipeline.events import Cancelled
from pipeline.names import SEAL, Names, sibling_uids, tokens_id

GENERATE = "/generate"
DONE = b"data: [DONE]\n\n"
FORMS: tuple[dict[str, Any], ...] = ({"prompt": "hello"}, {"text": "hello", "stream": True})


async def generate(here: Site, body: dict[str, Any], **options: Any) -> Response:
    return await here.client.post(GENERATE, json=body, **options)


async def streamed(here: Site, body: dict[str, Any], **options: Any) -> tuple[str, bytes]:
    """Return uid and bytes of a stream."""
    response = await generate(here, body, **options)
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


def test_a_whole_answer_in_sglangs_form(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            body = {"text": "hello", "model": "demo", "sampling_params": {"sampling_seed": 3, "zeta": 1}}
            response = await generate(here, body)
            ((uid, event),) = stand_in.requests()
            assert (response.status_code, response.headers["x-minisgl-uid"]) == (200, uid)
            assert response.headers["x-minisgl-unknown-fields"] == "sampling_params.zeta"
            assert (event.prompt, event.model, event.sampling.seed) == ("hello", "demo", 3)
            answer = await response.get_json()
            meta = answer["meta_info"]
            assert (answer["text"], answer["output_ids"]) == ("Hello\u2028!", [7, 7, 7])
            assert (meta["id"], meta["finish_reason"]) == (uid, {"type": "stop", "matched": 7})
            counts = [meta[f"{name}_tokens"] for name in ("prompt", "completion", "cached")]
            assert (counts, meta["e2e_latency"]) == ([5, 3, 2], 0.003)

    asyncio.run(scenario())


def test_a_client_that_wants_no_stream_gets_none(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for stream in (False, None):
                response = await generate(here, {"input_ids": [1, 2], "stream": stream})
                assert response.content_type == "application/json"
            assert [event.prompt_ids for _, event in stand_in.requests()] == 2 * [(1, 2)]

    asyncio.run(scenario())


def test_a_list_of_one_prompt_is_answered_by_a_list(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for body in ({"text": ["hello"]}, {"input_ids": [[1]]}):
                (answer,) = await (await generate(here, body)).get_json()
                assert answer["text"] == "Hello\u2028!"
                frames = documents((await streamed(here, {**body, "stream": True}))[1])
                assert {frame["index"] for frame in frames} == {0}

    asyncio.run(scenario())


def test_each_choice_of_each_prompt_is_answered_in_its_place(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            body = {"text": ["hello", "again"], "sampling_params": {"n": 2, "sampling_seed": 5}}
            response = await generate(here, body)
            uids = sibling_uids(response.headers["x-minisgl-uid"], 4)
            answers = await response.get_json()
            assert [answer["meta_info"]["id"] for answer in answers] == list(uids)
            assert [answer["text"] for answer in answers] == 4 * ["Hello\u2028!"]
            sent = dict(stand_in.requests())
            assert [sent[uid].prompt for uid in uids] == ["hello", "hello", "again", "again"]
            assert [sent[uid].sampling.seed == 5 for uid in uids] == [True, False, True, False]

    asyncio.run(scenario())


def test_each_of_several_streams_is_read_again_by_its_own_uid(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here, site(redis_url, "web-1") as there:
            common, stream = await streamed(here, {"text": ["hello", "again", "more"], "stream": True})
            frames = [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-2]]
            told = documents(stream)
            for index, uid in enumerate(sibling_uids(common, 3)):
                own = [frame for frame, document in zip(frames, told, strict=True) if document["index"] == index]
                assert own and await read(there, uid) == b"".join(own) + DONE
                assert {document["meta_info"]["id"] for document in told if document["index"] == index} == {uid}

    asyncio.run(scenario())


def test_where_one_of_several_fails_all_have_failed(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            assert (await error_of(generate(here, {"text": ["endless", "break"]})))[0] == 500
            _, stream = await streamed(here, {"text": ["endless", "break"], "stream": True})
            assert documents(stream)[-1]["error"]["code"] == "engine_error"
            await until(lambda: not here.frontend.is_busy)
        assert command(redis_url, "ZCARD", Names().live) == 0

    asyncio.run(scenario())


def test_the_frames_of_a_stream_hold_all_text_so_far_and_its_counts(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            uid, stream = await streamed(here, {"text": "hello", "stream": True})
            *during, last = documents(stream)
            assert [frame["text"] for frame in during] == ["Hel", "Hel", "Hello\u2028!"]
            assert [frame["output_ids"] for frame in during] == [[7], [7, 7], [7, 7, 7]]
            counts = [[frame["meta_info"][f"{name}_tokens"] for name in ("prompt", "completion")] for frame in during]
            assert counts == [[5, 1], [5, 2], [5, 3]]
            assert [frame["meta_info"]["finish_reason"] for frame in during] == 3 * [None]
            assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 7}
            assert {frame["meta_info"]["id"] for frame in (*during, last)} == {uid}

    asyncio.run(scenario())


def test_while_it_waits_a_client_of_sglang_reads_nothing_but_blank_lines(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        body = {"text": "silent", "stream": True}
        async with site(redis_url) as here, here.connection(body, path=GENERATE) as connection:
            assert await connection.receive() == await connection.receive() == b"\n"
            ((uid, _),) = stand_in.requests()
            await here.log.end(uid, Cancelled(by="me"), frontend="web-0")
            while not (piece := await connection.receive()).strip():
                pass
            assert b"cancelled by me" in piece and piece.endswith(DONE)

    monkeypatch.setattr(web.live.listener, "KEEP_ALIVE_S", 0.01)
    asyncio.run(scenario())


# Mini-SGLang's form


def test_mini_sglangs_form_is_answered_with_a_stream_of_text(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            uid, stream = await streamed(here, {"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
            ((known, event),) = stand_in.requests()
            assert (uid, event.sampling.max_tokens, event.sampling.ignore_eos) == (known, 3, True)
            assert [(frame.data, frame.id) for frame in frames_in(stream)] == [
                ("Hel", "1-0"),
                ("lo\u2028!", "3-0"),
                ("[DONE]", ""),
            ]

    asyncio.run(scenario())


def test_text_with_newlines_arrives_with_its_newlines_in_mini_sglangs_form(redis_url: str) -> None:
    async def scenario(stages: Stages) -> None:
        async with site(redis_url, ready=False) as here:
            await until(lambda: here.frontend.readiness.models)
            answer = asyncio.create_task(streamed(here, {"prompt": "a"}))
            uid = await take_in(stages)
            for n, text in enumerate(("one\ntwo\n", "\n", " three"), 1):
                await asyncio.to_thread(stages.say, uid, n, tokens(n, text), frontend="web-0")
            await asyncio.to_thread(stages.say, uid, 3, finished(3), frontend="web-0")
            _, stream = await answer
            assert "".join(frame.data for frame in frames_in(stream)) == "one\ntwo\n\n three[DONE]"

    with closing(Stages(redis_url)) as stages:
        stages.say_phase("ready")
        asyncio.run(scenario(stages))


async def take_in(stages: Stages) -> str:
    """Take in what was submitted until one of this endpoint is among it; return its uid."""
    while True:
        for uid, event in await asyncio.to_thread(stages.take_in):
            if event.endpoint == GENERATE:
                return uid


def test_a_failure_in_mini_sglangs_form_is_no_text(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            _, stream = await streamed(here, {"prompt": "break"})
            text, error, done = frames_in(stream)
            assert (text.data, error.kind, done.data) == ("x", "error", "[DONE]")
            assert json.loads(error.data)["error"]["code"] == "engine_error"

    asyncio.run(scenario())


def test_our_own_bug_in_mini_sglangs_form_is_no_text(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            _, stream = await streamed(here, {"prompt": "endless"})
            *_, error, done = frames_in(stream)
            assert (error.kind, done.data) == ("error", "[DONE]") and "a secret" not in error.data

    good = [1]

    async def broken(opened: web.live.open_request.OpenRequest) -> list[Any]:
        if not good:
            raise RuntimeError("a secret")
        good.pop()
        return await opened.listeners[0].next()

    monkeypatch.setattr(web.live.open_request.OpenRequest, "next", broken)
    asyncio.run(scenario())


# both


@pytest.mark.parametrize("body", FORMS, ids=["mini-sglang", "sglang"])
@pytest.mark.parametrize("words", ["hello", "break"])
def test_a_stream_is_read_again_byte_by_byte_anywhere(
    redis_url: str, stand_in: StandIn, words: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_the_frames_of_an_answer_that_was_not_streamed_are_those_of_a_stream(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            response = await generate(here, {"text": "hello"})
            first, *_, last = documents(await read(here, response.headers["x-minisgl-uid"]))
            assert first["meta_info"]["prompt_tokens"] == 5
            assert last == await response.get_json()

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [{"prompt": "refuse"}, {"text": "refuse"}, {"text": "refuse", "stream": True}])
def test_a_prompt_that_is_too_long_is_refused_and_nobody_waits(
    redis_url: str, stand_in: StandIn, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            status, error = await error_of(generate(here, body))
            assert (status, error["code"]) == (400, "context_length_exceeded")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"text": ""}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"text": "a", "model": "gpt-5"}, "model"),
        ({"text": "a", "rid": "mine"}, "rid"),
    ],
)
def test_what_is_wrong_is_a_400_or_404_in_the_body_of_every_error_and_reaches_no_stage(
    redis_url: str, stand_in: StandIn, body: dict[str, Any], param: str
) -> None:
    async def scenario() -> None:
        with capture_logs() as lines:
            async with site(redis_url) as here:
                status, error = await error_of(generate(here, body))
                assert (status, error["param"]) == (404 if param == "model" else 400, param)
        assert not stand_in.requests()
        (line,) = [line for line in lines if line["event"] == "request"]
        assert (line["status"], line["error"]) == (status, error["code"])

    asyncio.run(scenario())


def test_the_model_is_the_served_one_where_none_is_named(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for body in ({"text": "hello"}, {"prompt": "hello"}, {"prompt": "hello", "model": "default"}):
                await generate(here, body)
            assert {event.model for _, event in stand_in.requests()} == {MODELS[0]}
        assert command(redis_url, "ZCARD", Names().live) == 0

    asyncio.run(scenario())
