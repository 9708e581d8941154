"""/v1/messages over HTTP: its frames, its errors, and that a stream goes on elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.stand_in_stages import StandIn
from support.web_site import ANN, BOB, DONE, IDS, KEYS, Site, bearer, bytes_of, site

from ops.sse_reader import frames_in

PATH = "/v1/messages"


def message(words: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 50, "messages": [{"role": "user", "content": words}], **fields}


async def test_a_whole_answer_under_any_name(here: Site, stand_in: StandIn) -> None:
    response = await here.client.post(PATH + "?beta=true", json=message(model="claude-x", betas=[]))
    body = await response.get_json()
    ((uid, event),) = stand_in.requests()
    assert (body["id"], body["content"]) == (f"msg_{uid}", [{"type": "text", "text": "Hello\u2028!"}])
    assert (body["stop_reason"], body["usage"]["input_tokens"], body["usage"]["cache_read_input_tokens"]) == (
        "end_turn",
        3,
        2,
    )
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.headers["x-minisgl-model"] == event.model == "org/demo"
    assert response.headers["x-minisgl-unknown-fields"] == "betas"


async def test_a_stream_has_names_and_no_done_and_the_history_has_ids(here: Site) -> None:
    response = await here.client.post(PATH, json=message(stream=True))
    raw = await bytes_of(response)
    frames = list(frames_in(raw))
    assert [frame.kind for frame in frames] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(json.loads(frame.data)["type"] == frame.kind and not frame.id for frame in frames)
    again = await here.read(f"/v1/requests/{response.headers['x-minisgl-uid']}/events")
    assert again.endswith(DONE)
    found = list(frames_in(again.removesuffix(DONE)))
    assert [(frame.kind, frame.data) for frame in found] == [(frame.kind, frame.data) for frame in frames]
    assert found[-1].id


async def test_a_stream_that_was_cut_anywhere_goes_on_byte_by_byte(here: Site, there: Site) -> None:
    response = await here.client.post(PATH, json=message(stream=True), headers=IDS)
    whole = await bytes_of(response)
    path = f"/v1/requests/{response.headers['x-minisgl-uid']}/events"
    ids = [frame.id for frame in frames_in(whole) if frame.id]
    assert len(ids) == 3
    for cursor in ids:
        before, _, rest = whole.partition(b"id: %s\n" % cursor.encode())
        _, _, after = rest.partition(b"\n\n")
        assert before and await there.read(path, **{"Last-Event-ID": cursor}) == after + DONE


async def test_blocks_are_not_counted_in_characters(here: Site) -> None:
    response = await here.client.post(PATH, json=message())
    found = await here.get(f"/v1/requests/{response.headers['x-minisgl-uid']}/events?after_characters=1")
    assert (found.status_code, (await found.get_json())["error"]["code"]) == (400, "not_resumable")


@pytest.mark.parametrize("words", ["refuse", "break"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_fails(here: Site, words: str, stream: bool) -> None:
    response = await here.client.post(PATH, json=message(words, stream=stream))
    data = await response.get_data(as_text=False)
    if words == "break" and stream:
        assert response.status_code == 200
        *_, last = frames_in(data)
        assert (last.kind, json.loads(last.data)["error"]["type"]) == ("error", "api_error")
        return
    body = json.loads(data)
    assert response.status_code == (400 if words == "refuse" else 500)
    assert body["type"] == "error" and body["request_id"] == response.headers["request-id"]


async def test_tokens_are_counted(here: Site) -> None:
    response = await here.client.post(f"{PATH}/count_tokens", json={"messages": message()["messages"]})
    assert (response.status_code, list(await response.get_json())) == (200, ["input_tokens"])


async def test_what_is_left_out_is_named(here: Site) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    response = await here.client.post(PATH, json=message(tools=[hosted]))
    assert (response.status_code, response.headers["x-minisgl-ignored"]) == (200, "web_search")


async def test_a_key_of_another_client_reads_nothing(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, keys=KEYS) as here:
        sent = await here.client.post(PATH, json=message(), headers={"x-api-key": ANN})
        path = f"/v1/requests/{sent.headers['x-minisgl-uid']}/events"
        assert (await here.get(path, **bearer(ANN))).status_code == 200
        assert (await here.get(path, **bearer(BOB))).status_code == 404
        wrong = await here.client.post(PATH, json=message(), headers={"x-api-key": "sk-none"})
        assert (wrong.status_code, (await wrong.get_json())["error"]["type"]) == (401, "authentication_error")


async def test_strict_names_do_not_keep_anthropics_clients_out(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, strict_model_names=True) as here:
        assert (await here.client.post(PATH, json=message(model="claude-x"))).status_code == 200
