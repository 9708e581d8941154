"""POST /generate as HTTP clients see it, with stand-in stages behind a real Redis."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quart import Response
from structlog.testing import capture_logs
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import DONE, Site, error_of, request_lines, site, until

from ops.sse_reader import frames_in
from pipeline.names import SEAL, Names, sibling_uids, tokens_id

GENERATE = "/generate"
FORMS: tuple[dict[str, Any], ...] = ({"prompt": "hello"}, {"text": "hello", "stream": True})


async def generate(here: Site, body: dict[str, Any], **options: Any) -> Response:
    return await here.client.post(GENERATE, json=body, **options)


async def read(here: Site, uid: str, **headers: str) -> bytes:
    return await here.read(f"/v1/requests/{uid}/events", **headers)


def documents(stream: bytes) -> list[Any]:
    """Return the JSON of each line but [DONE], as SGLang's own clients read them."""
    *lines, done = [line for line in stream.decode().splitlines() if line.strip()]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# SGLang's form


async def test_a_whole_answer_in_sglangs_form(here: Site, stand_in: StandIn) -> None:
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


async def test_each_choice_of_each_prompt_is_answered_in_its_place(here: Site, stand_in: StandIn) -> None:
    body = {"text": ["hello", "again"], "sampling_params": {"n": 2, "sampling_seed": 5}}
    response = await generate(here, body)
    uids = sibling_uids(response.headers["x-minisgl-uid"], 4)
    answers = await response.get_json()
    assert [answer["meta_info"]["id"] for answer in answers] == list(uids)
    assert [answer["text"] for answer in answers] == 4 * ["Hello\u2028!"]
    sent = dict(stand_in.requests())
    assert [sent[uid].prompt for uid in uids] == ["hello", "hello", "again", "again"]
    assert [sent[uid].sampling.seed == 5 for uid in uids] == [True, False, True, False]


async def test_each_of_several_streams_is_read_again_by_its_own_uid(here: Site, there: Site) -> None:
    common, stream = await here.streamed({"text": ["hello", "again", "more"], "stream": True}, GENERATE)
    frames = [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-2]]
    told = documents(stream)
    for index, uid in enumerate(sibling_uids(common, 3)):
        own = [frame for frame, document in zip(frames, told, strict=True) if document["index"] == index]
        *again, done = frames_in(await read(there, uid))
        assert own and [frame.data.encode() for frame in again] == [each[6:-2] for each in own]
        assert (done.data, [frame.id for frame in again][-1]) == ("[DONE]", SEAL)
        assert {document["meta_info"]["id"] for document in told if document["index"] == index} == {uid}


async def test_where_one_of_several_fails_all_have_failed(here: Site, redis_url: str) -> None:
    assert (await error_of(generate(here, {"text": ["endless", "break"]})))[0] == 500
    _, stream = await here.streamed({"text": ["endless", "break"], "stream": True}, GENERATE)
    assert documents(stream)[-1]["error"]["code"] == "engine_error"
    await until(lambda: not here.is_busy)
    assert command(redis_url, "ZCARD", Names().live) == 0


# Mini-SGLang's form


async def test_mini_sglangs_form_is_answered_with_a_stream_of_text(here: Site, stand_in: StandIn) -> None:
    uid, stream = await here.streamed({"prompt": "hello", "max_tokens": 3, "ignore_eos": True}, GENERATE)
    ((known, event),) = stand_in.requests()
    assert (uid, event.sampling.max_tokens, event.sampling.ignore_eos) == (known, 3, True)
    assert [(frame.data, frame.id) for frame in frames_in(stream)] == [
        ("Hel", "1-0"),
        ("lo\u2028!", "3-0"),
        ("[DONE]", ""),
    ]


# both


@pytest.mark.parametrize("body", FORMS, ids=["mini-sglang", "sglang"])
@pytest.mark.parametrize("words", ["hello", "break"])
async def test_a_stream_is_read_again_byte_by_byte_anywhere(
    here: Site, there: Site, words: str, body: dict[str, Any]
) -> None:
    sent = {name: words if value == "hello" else value for name, value in body.items()}
    uid, stream = await here.streamed(sent, GENERATE)
    for place in (here, there):
        assert await read(place, uid) == stream
    rest = await read(there, uid, **{"Last-Event-ID": tokens_id(1)})
    assert stream.endswith(rest) and rest.endswith(DONE)
    num_frames = (stream.count(b"\n\n"), rest.count(b"\n\n"))
    assert num_frames[0] - num_frames[1] == 1, "all but that of the first token"
    assert await read(there, uid, **{"Last-Event-ID": SEAL}) == DONE


async def test_what_is_wrong_is_a_400_or_404_in_the_body_of_every_error_and_reaches_no_stage(
    redis_url: str, stand_in: StandIn
) -> None:
    told = []
    with capture_logs() as lines:
        async with site(redis_url, strict_model_names=True) as here:
            for body in ({}, {"text": "a", "sampling_params": {"regex": 5}}, {"prompt": "a", "model": "gpt-5"}):
                status, error = await error_of(generate(here, body))
                told.append((status, error["param"], error["code"]))
    assert [row[:2] for row in told] == [(400, "text"), (400, "sampling_params.regex"), (404, "model")]
    assert not stand_in.requests()
    assert [(line["status"], line["error"]) for line in request_lines(lines)] == [(row[0], row[2]) for row in told]
