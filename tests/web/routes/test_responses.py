"""/v1/responses over HTTP: stored, chained, streamed from any place on any process, and in the background."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.chunks import THINK, split
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import (
    ADMIN,
    ANN,
    BOB,
    DONE,
    IDS,
    KEYS,
    Site,
    bearer,
    bytes_of,
    code_of,
    error_of,
    one_request,
    received,
    site,
)

from ops.sse_reader import frames_in
from pipeline.events import Cancelled, Failed, Finished, new_uid
from pipeline.log.protocol import RequestLimits, SubmitResult
from web.http.keys import read_keys

PATH = "/v1/responses"
HELLO = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "Hello\u2028!"}
CALL = '<tool_call>{"name": "find", "arguments": {"n": 1}}</tool_call>'
TOOL = {"type": "function", "name": "find", "parameters": {"type": "object"}}
NOT_FOUND = (404, "response_not_found")
Json = dict[str, Any]


async def post(here: Site, words: Any = "hello", key: str = "", headers: Any = (), **fields: Any) -> Any:
    given = {**bearer(key), **dict(headers)}
    return await here.client.post(PATH, json={"input": words, **fields}, headers=given)


async def made(here: Site, words: Any = "hello", key: str = "", **fields: Any) -> Json:
    """Return a response that was created."""
    response = await post(here, words, key, **fields)
    assert response.status_code == 200, await response.get_data()
    body: Json = await response.get_json()
    return body


async def read(here: Site, name: str, key: str = "") -> Json:
    """Return a stored response, without the time until which it is stored."""
    body: Json = json.loads(await here.read(f"{PATH}/{name}", **bearer(key)))
    assert ("expires_at" in body) == (body["status"] not in ("queued", "in_progress"))
    return {member: value for member, value in body.items() if member != "expires_at"}


async def ended(here: Site, name: str, key: str = "") -> Json:
    """Return a stored response as soon as it has ended."""
    await here.read(f"{PATH}/{name}?stream=true", **bearer(key))
    return await read(here, name, key)


def uid_in(body: Json) -> str:
    return str(body["id"]).removeprefix("resp_")


def twin_of(name: str) -> str:
    """Return the id of a response of the same moment that is not there."""
    return name[:-15] + new_uid()[-15:]


def newest(stand_in: StandIn) -> list[Json]:
    """Return the messages of the request that came last."""
    return list(stand_in.requests()[-1][1].messages)


# an answer


async def test_a_whole_answer_under_any_name(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, strict_model_names=True) as here:
        hosted = {"type": "web_search"}
        response = await post(here, model="gpt-x", client_metadata={}, tools=[hosted], metadata={"a": "b"})
        body = await response.get_json()
        ((uid, event),) = stand_in.requests()
        assert (body["id"], body["status"], body["metadata"]) == (f"resp_{uid}", "completed", {"a": "b"})
        assert [item["content"][0]["text"] for item in body["output"]] == ["Hello\u2028!"]
        assert (body["usage"]["input_tokens"], body["usage"]["input_tokens_details"]["cached_tokens"]) == (5, 2)
        assert (response.headers["x-minisgl-uid"], event.stored) == (uid, True)
        assert response.headers["x-minisgl-model"] == event.model == body["model"] == "org/demo"
        assert response.headers["x-minisgl-unknown-fields"] == "client_metadata"
        assert response.headers["x-minisgl-ignored"] == "web_search"
        assert await read(here, body["id"]) == body


async def test_a_stream_has_names_and_no_done_and_no_ids(here: Site) -> None:
    response = await post(here, stream=True)
    raw = await bytes_of(response)
    frames = list(frames_in(raw))
    assert [frame.kind.removeprefix("response.") for frame in frames] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 2,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    events = [json.loads(frame.data) for frame in frames]
    assert all(event["type"] == frame.kind and not frame.id for event, frame in zip(events, frames, strict=True))
    assert await read(here, events[0]["response"]["id"]) == events[-1]["response"]
    again = await here.read(f"/v1/requests/{response.headers['x-minisgl-uid']}/events")
    assert again.endswith(DONE)
    assert [frame.data for frame in frames_in(again.removesuffix(DONE))] == [frame.data for frame in frames]
    counted = here.get(f"/v1/requests/{response.headers['x-minisgl-uid']}/events?after_characters=1")
    assert await code_of(counted) == (400, "not_resumable")


async def test_a_stream_goes_on_after_any_event_on_any_process(here: Site, there: Site, stand_in: StandIn) -> None:
    stand_in.marked = (THINK, ["<think>\n", "Well", "\n</think>\n\n", "So ", "it is.\n", CALL[:30], CALL[30:]])
    uid, whole = await here.streamed({"input": "marked", "tools": [TOOL], "stream": True}, PATH)
    frames, path = split(whole), f"{PATH}/resp_{uid}?stream=true"
    assert await here.read(path) == await there.read(path) == whole
    for place, frame in enumerate(frames):
        rest = b"".join(frames[place + 1 :])
        assert await there.read(f"{path}&starting_after={place}") == rest
        if frame.startswith(b"id: "):
            cursor = frame.splitlines()[0].removeprefix(b"id: ").decode()
            assert await there.read(path, **{"Last-Event-ID": cursor}) == rest
    assert sum(frame.startswith(b"id: ") for frame in frames) >= 5
    assert [item["type"] for item in (await read(there, f"resp_{uid}"))["output"]] == (
        ["reasoning", "message", "function_call"]
    )


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("&starting_after=x", {}, "starting_after"),
        ("&starting_after=-2", {}, "starting_after"),
        ("&starting_after=" + "1" * 16, {}, "starting_after"),
        ("", {"Last-Event-ID": "x"}, "Last-Event-ID"),
        ("", {"Last-Event-ID": "999-0"}, "Last-Event-ID"),
    ],
)
async def test_a_wrong_place_in_a_stream_is_refused(here: Site, query: str, headers: Any, param: str) -> None:
    name = (await made(here))["id"]
    status, error = await error_of(here.get(f"{PATH}/{name}?stream=true{query}", **headers))
    assert (status, error["code"], error["param"]) == (400, "invalid_value", param)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_fails(here: Site, stream: bool) -> None:
    refusal = await post(here, "refuse", stream=stream)
    assert (await error_of(refusal))[1]["code"] == "context_length_exceeded"
    response = await post(here, "break", stream=stream)
    if stream:
        *_, last = frames_in(await bytes_of(response))
        told = json.loads(last.data)["response"]
        assert (last.kind, told["status"], told["error"]["code"]) == ("response.failed", "failed", "server_error")
    else:
        assert (await error_of(response))[0] == 500
    refused, broken = [await read(here, f"resp_{each.headers['x-minisgl-uid']}") for each in (refusal, response)]
    assert (refused["status"], refused["error"]["code"]) == ("failed", "context_length_exceeded")
    assert (broken["status"], broken["output"][0]["status"]) == ("failed", "incomplete")


# what is stored


async def test_a_chain_has_the_messages_and_answers_before_it_without_instructions(
    here: Site, there: Site, stand_in: StandIn
) -> None:
    first = await made(here, instructions="Be brief.")
    assert newest(stand_in) == [{"role": "system", "content": "Be brief."}, HELLO]
    second = await made(there, [{"role": "developer", "content": "Now."}, HELLO], previous_response_id=first["id"])
    now = {"role": "system", "content": "Now."}
    assert newest(stand_in) == [HELLO, SAID, now, HELLO]
    assert (second["previous_response_id"], second["instructions"]) == (first["id"], None)
    assert (await here.client.delete(f"{PATH}/{first['id']}")).status_code == 200
    await made(here, "more", previous_response_id=second["id"], instructions="New.")
    more = {"role": "user", "content": "more"}
    assert newest(stand_in) == [{"role": "system", "content": "New."}, HELLO, SAID, now, HELLO, SAID, more]


async def test_a_chain_goes_on_with_the_result_of_a_call(here: Site, stand_in: StandIn) -> None:
    stand_in.marked = (THINK, ["<think>\nWell\n</think>\n\n", CALL])
    first = await made(here, "marked", tools=[{"type": "namespace", "name": "deep", "tools": [TOOL]}])
    assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
    stand_in.marked = (THINK, [CALL.replace("find", "deep__find")])
    second = await made(here, "marked", tools=[{"type": "namespace", "name": "deep", "tools": [TOOL]}])
    (call,) = second["output"]
    assert (call["namespace"], call["name"]) == ("deep", "find")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    await made(here, [result], previous_response_id=second["id"])
    function = {"name": "deep__find", "arguments": '{"n": 1}'}
    calls = [{"id": call["call_id"], "type": "function", "function": function}]
    assert newest(stand_in)[1:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": call["call_id"]},
    ]


async def test_a_link_that_is_missing_or_not_done_is_refused(here: Site, stand_in: StandIn) -> None:
    chat = await here.post({"messages": [HELLO]})
    name = (await made(here))["id"]
    for missing in (twin_of(name), name.removeprefix("resp_"), "resp_1", "", f"resp_{chat.headers['x-minisgl-uid']}"):
        status, error = await error_of(post(here, previous_response_id=missing))
        assert (status, error["code"], error["param"]) == (404, "previous_response_not_found", "previous_response_id")
        assert f"'{missing}'" in error["message"]
    waiting = await made(here, "held", background=True)
    status, error = await error_of(post(here, previous_response_id=waiting["id"]))
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "previous_response_id")
    stand_in.released.set()
    assert (await ended(here, waiting["id"]))["status"] == "completed"
    await made(here, previous_response_id=waiting["id"])


async def test_items_of_responses_can_be_referred_to(here: Site, stand_in: StandIn) -> None:
    first = await made(here, instructions="Be brief.")
    (item,) = first["output"]
    named = [{"type": "item_reference", "id": f"msg_{uid_in(first)}_in0"}, {"id": item["id"]}]
    await made(here, [*named, named[0]])
    assert newest(stand_in) == [HELLO, SAID, HELLO]
    missing = (f"{item['id']}7", f"msg_{uid_in(first)}_in1", f"msg_{twin_of(uid_in(first))}_0", "msg_1", "x" * 99)
    for name in missing:
        status, error = await error_of(post(here, [*named, {"type": "item_reference", "id": name}]))
        assert (status, error["code"], error["param"]) == (404, "item_not_found", "input")
        assert f"'{name}'" in error["message"]
    many = [{"id": f"msg_{new_uid()}_0"} for _ in range(1025)]
    status, error = await error_of(post(here, many))
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "input")


async def test_what_is_not_stored_cannot_be_found(here: Site, stand_in: StandIn) -> None:
    body = await made(here, store=False)
    ((_, event),) = stand_in.requests()
    assert (body["store"], event.stored) == (False, False)
    path = f"{PATH}/{body['id']}"
    for asked in (here.get(path), here.get(f"{path}?stream=true"), here.get(f"{path}/input_items")):
        assert await code_of(asked) == NOT_FOUND
    for asked in (here.client.post(f"{path}/cancel"), here.client.delete(path)):
        assert await code_of(asked) == NOT_FOUND
    assert (await code_of(post(here, previous_response_id=body["id"])))[0] == 404
    assert await code_of(post(here, [{"id": body["output"][0]["id"]}])) == (404, "item_not_found")


async def test_a_response_is_deleted(here: Site, there: Site, stand_in: StandIn) -> None:
    name = (await made(here))["id"]
    deleted = await there.client.delete(f"{PATH}/{name}")
    assert await deleted.get_json() == {"id": name, "object": "response", "deleted": True}
    assert await code_of(here.get(f"{PATH}/{name}")) == NOT_FOUND
    assert await code_of(here.client.delete(f"{PATH}/{name}")) == NOT_FOUND
    running = await made(here, "endless", background=True)
    assert (await here.client.delete(f"{PATH}/{running['id']}")).status_code == 200
    assert not stand_in.stages.log.alive([uid_in(running)])


async def test_what_a_response_was_made_from_comes_in_pages(here: Site) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    body = await made(here, [HELLO, call, result, HELLO], instructions="Be brief.")
    path = f"{PATH}/{body['id']}/input_items"

    async def page(query: str) -> tuple[list[str], bool]:
        found = json.loads(await here.read(f"{path}?{query}"))
        ids = [item["id"].removeprefix("msg_").removeprefix("fc_").removeprefix("fco_")[-3:] for item in found["data"]]
        assert found["object"] == "list"
        ends = [found["data"][place]["id"] for place in (0, -1)] if ids else [None, None]
        assert [found["first_id"], found["last_id"]] == ends
        return ids, found["has_more"]

    everything = ["in0", "in1", "in2", "in3"]
    assert await page("order=asc") == (everything, False)
    assert await page("") == await page("order=desc&limit=4") == (everything[::-1], False)
    assert await page("limit=3") == (everything[:0:-1], True)
    fc, fco = f"fc_{uid_in(body)}_in1", f"fco_{uid_in(body)}_in2"
    assert await page(f"order=asc&limit=1&after={fc}") == (["in2"], True)
    assert await page(f"after={fco}") == (["in1", "in0"], False)
    assert await page(f"after=msg_{uid_in(body)}_in0") == ([], False)
    items = json.loads(await here.read(f"{path}?order=asc"))["data"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output", "message"]
    for query in ("order=up", "limit=0", "limit=101", "limit=x", "limit=-1", "after=msg_1"):
        status, error = await error_of(here.get(f"{path}?{query}"))
        assert (status, error["code"], error["param"]) == (400, "invalid_value", query.partition("=")[0])


# in the background


async def test_a_response_in_the_background_is_answered_at_once(here: Site, there: Site, stand_in: StandIn) -> None:
    body = await made(here, "held", background=True)
    assert body["status"] in ("queued", "in_progress") and body["background"] is body["store"] is True
    async with there.reading(f"{PATH}/{body['id']}?stream=true") as connection:
        await received(connection, b'"delta":"Hel"')
        running = await read(here, body["id"])
    assert (running["status"], running["output"][0]["status"]) == ("in_progress", "in_progress")
    stand_in.released.set()
    done = await ended(there, body["id"])
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello!")
    cancelled = await there.client.post(f"{PATH}/{body['id']}/cancel")
    assert (await cancelled.get_json())["status"] == "completed"


async def test_a_response_in_the_background_goes_on_without_its_client(
    here: Site, there: Site, stand_in: StandIn
) -> None:
    body = {"input": "held", "background": True, "stream": True}
    async with here.connection(body, path=PATH) as connection:
        before = await received(connection, b'"delta":"Hel"')
    uid = await one_request(stand_in)
    stand_in.released.set()
    whole = await there.read(f"{PATH}/resp_{uid}?stream=true")
    assert whole.startswith(before)
    assert isinstance(stand_in.stages.ends(uid), Finished)
    assert (await read(here, f"resp_{uid}"))["status"] == "completed"


@pytest.mark.parametrize(("words", "code"), [("refuse", "context_length_exceeded"), ("break", "server_error")])
async def test_a_response_in_the_background_that_fails_says_so_when_it_is_read(
    here: Site, words: str, code: str
) -> None:
    found = await ended(here, (await made(here, words, background=True))["id"])
    assert (found["status"], found["error"]["code"]) == ("failed", code)


async def test_only_what_runs_in_the_background_can_be_cancelled(here: Site, there: Site, stand_in: StandIn) -> None:
    running = await made(here, "endless", background=True)
    for _ in range(2):
        stopped = await there.client.post(f"{PATH}/{running['id']}/cancel")
        assert (await stopped.get_json())["status"] == "cancelled"
    assert isinstance(stand_in.stages.ends(uid_in(running)), Cancelled)
    *_, last = frames_in(await here.read(f"{PATH}/{running['id']}?stream=true"))
    assert (last.kind, json.loads(last.data)["response"]["status"]) == ("response.incomplete", "cancelled")
    assert (await read(here, running["id"]))["status"] == "cancelled"
    foreground = await made(here)
    assert await code_of(here.client.post(f"{PATH}/{foreground['id']}/cancel")) == (400, "invalid_value")


async def test_the_background_needs_the_store(here: Site) -> None:
    status, error = await error_of(post(here, background=True, store=False))
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "background")


async def test_one_key_has_so_many_responses_in_the_background(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, keys=KEYS, limits=RequestLimits(max_background=1)) as here:
        first = await made(here, "silent", ANN, background=True)
        refused = await post(here, "silent", ANN, background=True)
        assert (await error_of(refused))[0] == 429 and refused.headers["Retry-After"]
        await made(here, "hello", ANN)
        other = await made(here, "silent", BOB, background=True)
        for body, key in ((first, ANN), (other, BOB)):
            stopped = await here.client.post(f"{PATH}/{body['id']}/cancel", headers=bearer(key))
            assert stopped.status_code == 200
        again = await made(here, "hello", ANN, background=True)
        assert (await ended(here, again["id"], ANN))["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_that_is_sent_again_with_its_key_joins_the_background(
    here: Site, there: Site, stand_in: StandIn, stream: bool
) -> None:
    key = {"Idempotency-Key": "k1", **IDS}
    first = await post(here, "hello", headers=key, background=True, stream=stream)
    second = await post(there, "hello", headers=key, background=True, stream=stream)
    told = [await response.get_data() for response in (first, second)]
    assert not stream or told[0] == told[1]
    uid = await one_request(stand_in)
    assert first.headers["x-minisgl-uid"] == second.headers["x-minisgl-uid"] == uid
    other = await error_of(post(here, "other", headers=key, background=True))
    assert (other[0], other[1]["code"]) == (400, "idempotency_key_reused")
    assert (await ended(here, f"resp_{uid}"))["status"] == "completed"


async def test_a_body_that_is_sent_again_joins_the_background_though_only_the_admin_has_a_key(
    redis_url: str, stand_in: StandIn
) -> None:
    async with site(redis_url, keys=read_keys([], "", ADMIN)) as here:
        key = {"Idempotency-Key": "k1"}
        answers = [await post(here, "hello", headers=key, background=True) for _ in range(3)]
        assert {answer.headers["x-minisgl-uid"] for answer in answers} == {await one_request(stand_in)}


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k1"}], ids=["without a key", "with one"])
async def test_a_response_in_the_background_that_fails_at_once_is_submitted_once(
    here: Site, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    submit, submitted = here.log.submit, list[str]()

    async def fail(uid: str, *args: Any, **more: Any) -> SubmitResult:
        result = await submit(uid, *args, **more)
        submitted.append(uid)
        if len(submitted) < 5:
            await here.log.end(uid, Failed(status=503, code="queue_full", message="Too many."), frontend="")
        return result

    monkeypatch.setattr(here.log, "submit", fail)
    response = await post(here, "silent", headers=headers, background=True)
    assert (await response.get_json())["status"] == "failed"
    assert len(submitted) == 1


@pytest.mark.parametrize("how", ["erased", "expired"])
async def test_a_response_that_goes_while_it_is_read_is_not_there(
    here: Site, redis_url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    log, histories = here.log, here.log.histories

    async def late(cursors: Mapping[str, str], **more: Any) -> Any:
        for uid in cursors:
            if how == "erased":
                await log.erase(uid)
            else:
                command(redis_url, "DEL", log.names.request(uid))
        return await histories(cursors, **more)

    chat = await (await here.post({"messages": [HELLO], "store": True})).get_json()
    name, linked = (await made(here))["id"], (await made(here))["id"]
    monkeypatch.setattr(log, "histories", late)
    assert (await code_of(here.get(f"{PATH}/{name}")))[0] == 404
    assert (await code_of(here.get(f"/v1/chat/completions/{chat['id']}")))[0] == 404
    assert (await code_of(post(here, "on", previous_response_id=linked)))[0] == 404


# owners


async def test_responses_of_another_key_are_as_if_they_were_not_there(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, keys=KEYS) as here:
        body = await made(here, "silent", ANN, background=True)
        done = await made(here, "hello", ANN)
        twins = {uid_in(each): twin_of(uid_in(each)) for each in (body, done)}

        async def asked(uid: str, key: str) -> list[tuple[int, bytes]]:
            path, who = f"{PATH}/resp_{uid}", bearer(key)
            answers = [
                *[await here.get(path + more, **who) for more in ("", "?stream=true", "/input_items")],
                await here.client.post(f"{path}/cancel", headers=who),
                await here.client.delete(path, headers=who),
                await post(here, key=key, previous_response_id=f"resp_{uid}"),
                await post(here, [{"id": f"msg_{uid}_0"}], key),
                await post(here, [{"id": f"msg_{uid}_in0"}], key),
            ]
            return [(each.status_code, await each.get_data(as_text=False)) for each in answers]

        for uid, twin in twins.items():
            told = await asked(uid, BOB)
            assert [status for status, _ in told] == [404] * 8
            absent = await asked(twin, BOB)
            assert told == [(status, data.replace(twin.encode(), uid.encode())) for status, data in absent]
        assert (await read(here, body["id"], ANN))["status"] == "queued"
        assert (await read(here, done["id"], ANN)) == done
        stopped = await here.client.post(f"{PATH}/{body['id']}/cancel", headers=bearer(ANN))
        assert (await stopped.get_json())["status"] == "cancelled"


async def test_a_key_is_free_again_after_its_background_response_was_cancelled_or_deleted(here: Site) -> None:
    key = {"Idempotency-Key": "k1"}

    async def silent() -> Any:
        return await (await post(here, "silent", headers=key, background=True)).get_json()

    first = await silent()
    assert (await silent())["id"] == first["id"]
    client: Any = here.client
    await client.post(f"{PATH}/{first['id']}/cancel")
    second = await silent()
    assert second["id"] != first["id"] and second["status"] in ("queued", "in_progress")
    await client.delete(f"{PATH}/{second['id']}")
    assert (await silent())["id"] not in (first["id"], second["id"])


async def test_a_conversation_that_references_make_too_long_is_refused(here: Site) -> None:
    first = await (await post(here, "hello")).get_json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    asked = {"input": [{"role": "user", "content": "on"}, *[reference] * 8190]}
    assert (await here.client.post(PATH, json=asked)).status_code == 200
    long = [{"role": "user", "content": "x" * 1_000_000}]
    sent = await (await here.client.post(PATH, json={"input": long})).get_json()
    again = {"type": "item_reference", "id": f"msg_{sent['id'].removeprefix('resp_')}_in0"}
    response = await here.client.post(PATH, json={"input": [again] * 5})
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"]) == (400, "input.4")
    at_end = {"input": [again] * 4, "previous_response_id": sent["id"]}
    response = await here.client.post(PATH, json=at_end)
    assert (response.status_code, (await response.get_json())["error"]["param"]) == (400, "input.3")


@pytest.mark.parametrize("query", ["stream=maybe", "stream=true&starting_after=x", "stream=true&starting_after=-2"])
async def test_a_query_that_is_wrong_is_refused(here: Site, query: str) -> None:
    first = await (await post(here, "hello")).get_json()
    status, error = await error_of(here.get(f"{PATH}/{first['id']}?{query}"))
    assert (status, error["param"]) == (400, query.rpartition("&")[2].partition("=")[0])
