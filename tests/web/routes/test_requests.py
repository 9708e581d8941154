"""Clients that come back: the events of a request, its story and its end, on any web process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.chunks import split
from support.redis_servers import RunningServer, command
from support.stand_in_stages import Stages, StandIn, finished, tokens
from support.web_site import (
    CHAT,
    DONE,
    Site,
    bytes_of,
    chat,
    code_of,
    error_of,
    one_request,
    received,
    request_lines,
    seal_of,
    site,
    until,
)

import web.live.counts
import web.live.listener
import web.live.open_request
from pipeline.events import Markup, SamplingParams, Submitted, new_uid
from pipeline.log.protocol import Entry, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, Names, sibling_uids, tokens_id
from web.live.ready import Readiness

DEAD = "web-9"
"""A frontend that is not there."""


@pytest.fixture
def stages(stages: Stages) -> Stages:
    stages.say_phase("ready")
    return stages


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories are not looked at for their silence: what comes is what was waited for."""
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 1000.0)


def events(uid: str, query: str = "") -> str:
    return f"/v1/requests/{uid}/events{query}"


def drawn(age_s: float) -> str:
    """Return a uid as it was drawn some time ago."""
    return f"{int((time.time() - age_s) * 1000):012x}" + new_uid()[12:]


def id_of(frame: bytes) -> str:
    """Return the id of a frame; empty where it has none."""
    first = frame.partition(b"\n")[0]
    return first.removeprefix(b"id: ").decode() if first.startswith(b"id: ") else ""


def documents(stream: bytes) -> list[Any]:
    """Return the JSON of each frame but [DONE]."""
    *frames, done = split(stream)
    assert done == DONE
    return [json.loads(frame.partition(b"data: ")[2]) for frame in frames]


def submit(log: RedisLog, uid: str, count: int = 1, *, endpoint: str = CHAT) -> None:
    """Submit a request, or siblings, as a frontend would that is dead since."""
    event = Submitted(endpoint=endpoint, frontend=DEAD, model="demo", prompt="p", sampling=SamplingParams())
    log.submit(uid, count * [event])


async def begun(stages: Stages, *texts: str, uid: str = "") -> str:
    """Submit a request, take it in and say the *texts* of its first tokens; return its uid."""
    uid = uid or new_uid()
    submit(stages.log, uid)
    stages.take_in()
    for n, text in enumerate(texts, 1):
        await say(stages, uid, n, tokens(n, text))
    return uid


async def take_in_chat(stages: Stages) -> str:
    """Take in what was submitted until a chat is among it; return its uid."""
    while True:
        for uid, event in await asyncio.to_thread(stages.take_in):
            if event.endpoint == CHAT:
                return uid


async def say(stages: Stages, uid: str, n: int, *said: Any, frontend: str = DEAD) -> None:
    await asyncio.to_thread(stages.say, uid, n, *said, frontend=frontend)


# the frames


@pytest.mark.parametrize("words", ["hello", "break"])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_that_was_cut_anywhere_goes_on_elsewhere_byte_by_byte(
    here: Site, there: Site, include_usage: bool, words: str
) -> None:
    body = chat(words, model="demo", stream=True, stream_options={"include_usage": include_usage})
    uid, full = await here.streamed(body)
    frames = split(full)
    assert {id_of(frame) for frame in frames} >= {tokens_id(1), SEAL}
    for cut in range(len(frames) + 1):
        ids = [index for index, frame in enumerate(frames[:cut], 1) if id_of(frame)]
        complete = ids[-1] if ids else 0  # of what comes after the last id, all is repeated
        headers = {"Last-Event-ID": id_of(frames[complete - 1])} if complete else {}
        resumed = await there.read(events(uid), **headers)
        assert b"".join(frames[:complete]) + resumed == full
        assert complete == cut or not id_of(frames[cut - 1])
    assert await there.read(events(uid, f"?starting_after={tokens_id(1)}")) == resumed_after(frames, 1)


def resumed_after(frames: Sequence[bytes], n: int) -> bytes:
    index = [id_of(frame) for frame in frames].index(tokens_id(n))
    return b"".join(frames[index + 1 :])


async def test_a_cursor_in_the_middle_of_an_event_of_several_frames_repeats_all_of_them(here: Site) -> None:
    uid, full = await here.streamed(chat(stream_options={"include_usage": True}, stream=True))
    *_, finish, usage, done = frames = split(full)
    assert (id_of(finish), id_of(usage)) == ("", SEAL)
    last_id = [id_of(frame) for frame in frames[:-2] if id_of(frame)][-1]
    assert await here.read(events(uid), **{"Last-Event-ID": last_id}) == finish + usage + done
    assert await here.read(events(uid), **{"Last-Event-ID": SEAL}) == done == DONE


async def test_an_id_without_a_frame_is_a_cursor_too_and_the_header_counts_more_than_the_address(here: Site) -> None:
    uid, full = await here.streamed(chat(stream=True))
    rest = resumed_after(split(full), 1)
    assert await here.read(events(uid), **{"Last-Event-ID": tokens_id(2)}) == rest  # it has no text
    assert await here.read(events(uid, f"?starting_after={SEAL}"), **{"Last-Event-ID": "1-0"}) == rest
    assert await here.read(events(uid), **{"Last-Event-ID": SUBMITTED_ID}) == full
    assert await here.read(events(f"chatcmpl-{uid}")) == full


async def test_the_frames_of_a_request_that_was_not_streamed_are_those_of_a_stream(here: Site) -> None:
    response = await here.post(chat(model="demo"))
    body = await response.get_json()
    role, *_, last = documents(await here.read(events(response.headers["x-minisgl-uid"])))
    assert (role["id"], role["created"], role["model"]) == (body["id"], body["created"], "demo")
    assert (last["choices"][0]["finish_reason"], last.get("usage")) == ("stop", None)


async def test_every_answer_says_that_a_request_was_created_when_its_uid_was_drawn(
    here: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.open_request, "new_uid", lambda: drawn(5000))
    whole = await here.post(chat())
    _, stream = await here.streamed(chat(stream=True))
    uid = whole.headers["x-minisgl-uid"]
    answers = [await whole.get_json(), *documents(stream), *documents(await here.read(events(uid)))]
    assert {round(time.time() - answer["created"], -2) for answer in answers} == {5000}


async def test_a_running_request_is_read_elsewhere_as_it_comes_by_several_at_once(
    redis_url: str, stages: Stages, no_polling: None
) -> None:
    async with site(redis_url, ready=False) as here, site(redis_url, "web-1", ready=False) as there:
        await until(lambda: here.frontend.readiness.models and there.frontend.readiness.models)
        async with here.connection(chat(stream=True)) as first:
            uid = await take_in_chat(stages)
            await say(stages, uid, 1, tokens(1, "a"), frontend="web-0")
            sent = await received(first, b"id: 1-0\n")
            reading = {"Last-Event-ID": "1-0"}
            async with (
                there.reading(events(uid), reading) as second,
                there.reading(events(uid)) as third,
                here.reading(events(uid)) as fourth,
            ):
                others = [b"", await received(third, b"id: 1-0\n"), await received(fourth, b"id: 1-0\n")]
                for n, text in ((2, "b"), (3, "c")):
                    await say(stages, uid, n, tokens(n, text), frontend="web-0")
                    sent += await received(first, b"id: %d-0\n" % n)
                    for index, reader in enumerate((second, third, fourth)):
                        others[index] += await received(reader, b"id: %d-0\n" % n)
                await say(stages, uid, 3, finished(3), frontend="web-0")
                sent += await received(first, DONE)
                for index, reader in enumerate((second, third, fourth)):
                    others[index] += await received(reader, DONE)
            assert others[0] == resumed_after(split(sent), 1)
            assert others[1] == others[2] == sent


# after the characters that a client has


def text_in(stream: bytes) -> str:
    choices = [choice for document in documents(stream) for choice in document["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_a_client_without_ids_goes_on_after_the_characters_that_it_has(here: Site, there: Site) -> None:
    response = await here.post(chat("say: A stream 🙂 that breaks at any character.", stream=True))
    uid = response.headers["x-minisgl-uid"]
    text = text_in(await response.get_data(as_text=False))
    assert text == "A stream 🙂 that breaks at any character."
    for known in (0, 9, 10, 24, len(text)):
        assert text_in(await there.read(events(uid, f"?after_characters={known}"))) == text[known:]
    by_id = {"Last-Event-ID": SEAL}
    assert await there.read(events(uid, "?after_characters=3"), **by_id) == DONE, "as a browser that reconnects"
    for query in (f"={len(text) + 1}", "=-1", "=x", "=3&starting_after=1-0", "=3&format=events"):
        status, error = await error_of(there.get(events(uid, f"?after_characters{query}")))
        assert (status, error["param"], error["code"]) == (400, "after_characters", "invalid_value"), query
    assert await code_of(there.get(events(new_uid(), "?after_characters=1"))) == (404, "request_not_found")


async def test_what_characters_cannot_tell_is_not_resumable(here: Site, stand_in: StandIn) -> None:
    stand_in.marked = (Markup(think=("<think>", "</think>")), ("<think>", "Hm.", "</think>", "Yes."))
    for body in (chat("marked"), chat(n=2), chat(logprobs=True)):
        uid = (await here.post(body)).headers["x-minisgl-uid"]
        assert await code_of(here.get(events(uid, "?after_characters=1"))) == (400, "not_resumable")
    several = (await here.post(chat(n=2))).headers["x-minisgl-uid"]
    assert text_in(await here.read(events(f"{several}.1", "?after_characters=3"))) == "lo\u2028!"


def make_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each frontend take its engines for batch-invariant, whatever its polls say: one may be on its way."""
    monkeypatch.setattr(Readiness, "batch_invariant", property(lambda _: True, lambda *_: None), raising=False)


async def test_an_event_that_a_failover_lost_is_awaited_until_an_engine_has_made_it_again(
    bare: Site, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = await begun(stages, "a", "b", "c")
    assert await code_of(bare.get(events(uid, "?starting_after=4-0"))) == (400, "invalid_value"), "another could come"
    make_batch_invariant(monkeypatch)
    async with bare.reading(events(uid), {"Last-Event-ID": "4-0"}) as reader:
        await say(stages, uid, 4, tokens(4, "d"))
        await say(stages, uid, 5, tokens(5, "e"))
        assert b'"e"' in await received(reader, b"id: 5-0\n")
    assert await code_of(bare.get(events(uid, "?starting_after=2-7"))) == (400, "invalid_value"), "a later one is there"
    monkeypatch.setattr("web.routes.requests.COMES_AGAIN_S", 0.1)
    assert await code_of(bare.get(events(uid, "?starting_after=9-0"))) == (400, "invalid_value")
    assert await code_of(bare.get(events(uid, f"?starting_after={SEAL}"))) == (400, "invalid_value")


async def test_an_awaited_event_that_comes_with_a_later_one_between_two_looks_is_found(
    bare: Site, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = await begun(stages, "a")
    make_batch_invariant(monkeypatch)
    entries = bare.log.entries

    async def slow_entries(uid: str, ids: Sequence[str]) -> dict[str, Entry]:
        found = await entries(uid, ids)
        if ids == ("2-0",) and not found:
            await say(stages, uid, 2, tokens(2, "b"))
            await say(stages, uid, 3, tokens(3, "c"))
        return found

    monkeypatch.setattr(bare.log, "entries", slow_entries)
    async with bare.reading(events(uid), {"Last-Event-ID": "2-0"}) as reader:
        assert b'"c"' in await received(reader, b"id: 3-0\n")


async def test_a_running_request_is_awaited_until_it_has_more_characters_than_its_client(
    bare: Site, stages: Stages, no_polling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = await begun(stages, "ab", "cd")
    async with bare.reading(events(uid, "?after_characters=5")) as reader:
        await until(lambda: bare.frontend.tail.listeners)
        await say(stages, uid, 3, tokens(3, "efg"))
        first = await received(reader, b"id: 3-0\n")
        await say(stages, uid, 4, tokens(4, "h"), finished(4))
        assert text_in(first + await received(reader, DONE)) == "fgh"
    short = await begun(stages, "ab")
    asking = asyncio.create_task(code_of(bare.get(events(short, "?after_characters=3"))))
    await until(lambda: bare.frontend.tail.listeners)
    await say(stages, short, 1, finished(1))
    assert await asking == (400, "invalid_value")
    monkeypatch.setattr(web.live.listener, "KEEP_ALIVE_S", 0.01)
    late = await begun(stages, "ab")
    async with bare.reading(events(late, "?after_characters=3")) as reader:
        assert await reader.receive() == b"\n", "the status is sent"
        await say(stages, late, 1, finished(1))
        assert b'"code":"invalid_value"' in await received(reader, DONE)


# the raw events


async def test_the_raw_events_are_all_that_is_in_the_history(here: Site, stand_in: StandIn) -> None:
    uid, _ = await here.streamed(chat(user="ann", stream=True))
    stream = await here.read(events(uid, "?format=events"))
    with closing(stand_in.stages.log.another()) as log:
        history = log.histories([uid])[0]
    said = documents(stream)
    assert [id_of(frame) for frame in split(stream)[:-1]] == [entry.id for entry in history]
    assert [set(document) for document in said] == [set(entry.fields) for entry in history]
    assert [document["kind"] for document in said] == ["submitted", "tokenized", *3 * ["tokens"], "finished"]
    assert said[0]["labels"] == {"user": "ann"} and said[0]["presentation"]["stream"] is True
    assert (said[1]["token_ids"], said[2]["text"]) == ([1, 2, 3, 4, 5], "Hel")
    assert all(document["ms"] == int(entry.fields["ms"]) for document, entry in zip(said, history, strict=True))
    frames = split(stream)
    for cut, frame in enumerate(frames[:-1], 1):
        rest = await here.read(events(uid, "?format=events"), **{"Last-Event-ID": id_of(frame)})
        assert rest == b"".join(frames[cut:])


async def test_raw_events_come_as_they_happen_also_those_that_clients_do_not_see(
    bare: Site, redis_url: str, stages: Stages, no_polling: None
) -> None:
    uid = new_uid()
    submit(stages.log, uid, endpoint="probe")
    async with bare.reading(events(uid, "?format=events")) as reader:
        await received(reader, b'"kind":"submitted"')
        stages.take_in()
        await received(reader, b'"kind":"tokenized"')
        mark = ["kind", "preempted", "engine", "generate-0", "epoch", "1", "step", "2", "ms", "5"]
        command(redis_url, "XADD", Names().request(uid), "0-3", *mark)
        assert b"id: 0-3\n" in await received(reader, b'"kind":"preempted"')
        await say(stages, uid, 1, tokens(1), finished(1))
        assert (await received(reader, DONE)).count(b"id: ") == 2


# the story as it comes


async def test_the_changes_come_to_the_story_and_a_client_resumes_after_any(here: Site) -> None:
    uid, _ = await here.streamed(chat(user="ann", stream=True))
    stream = await here.read(events(uid, "?format=story"))
    story = await (await here.get(f"/v1/requests/{uid}")).get_json()
    said = documents(stream)
    facts = {name: value for each in said for name, value in each.items() if name in story and name != "moments"}
    moments = {place: moment for each in said for place, moment in each.get("moments", ())}
    told = [token for each in said for token in each.get("tokens", ())]
    text = "".join(token["text"] for token in told)
    assert facts | {"uid": uid, "text": text, "moments": [*moments.values()]} == story
    assert [token["n"] for token in told] == [1, 2, 3] and said[0]["labels"] == {"user": "ann"}
    frames = split(stream)
    for cut, frame in enumerate(frames[:-1], 1):
        rest = await here.read(events(uid, "?format=story"), **{"Last-Event-ID": id_of(frame)})
        assert rest == b"".join(frames[cut:])


# what is not there


async def test_an_id_that_never_was_is_refused_and_named(here: Site) -> None:
    uid, _ = await here.streamed(chat(stream=True))
    for given in ("7-0", "2", "2-0-0", "01-0", "-", "x", f"{10**20}-0", f"{2**64}-0", f"1-{2**64}", "1-0\t2-0"):
        for name, how in (
            ("starting_after", {"query_string": {"starting_after": given}}),
            ("Last-Event-ID", {"headers": {"Last-Event-ID": given}}),
        ):
            status, error = await error_of(here.client.get(events(uid), **how))
            assert (status, error["param"], error["code"]) == (400, name, "invalid_value"), given


@pytest.mark.parametrize("suffix", ["", "/events"])
async def test_a_request_that_is_not_there_was_never_or_has_expired(
    redis_url: str, stand_in: StandIn, suffix: str
) -> None:
    async with site(redis_url, ready=False, limits=RequestLimits(retention_s=100)) as here:

        async def code(uid: str, method: str = "GET") -> str:
            path = f"/v1/requests/{uid}{suffix}"
            answer = here.client.delete(path) if method == "DELETE" else here.client.get(path)
            status, error = await error_of(answer)
            assert status == 404
            return str(error["code"])

        expired = "request_expired"
        for method in ("GET", "DELETE") if not suffix else ("GET",):
            assert await code(drawn(99), method) == "request_not_found"
            assert await code(drawn(101), method) == expired
            assert await code(f"chatcmpl-{drawn(101)}.3", method) == expired
            assert await code(drawn(-1000), method) == "request_not_found"
            assert await code(drawn(101)[:-1], method) == "request_not_found"


# what siblings have in common


def submit_siblings(log: RedisLog, count: int) -> tuple[str, tuple[str, ...]]:
    """Submit several requests as a frontend would for one client; return what they have in common, and their uids."""
    common = new_uid()
    submit(log, common, count)
    return common, sibling_uids(common, count)


async def test_siblings_tell_their_stories_under_the_uid_that_they_have_in_common(
    bare: Site, redis_url: str, stages: Stages
) -> None:
    common, uids = submit_siblings(stages.log, 3)
    stages.take_in()
    await say(stages, uids[1], 1, tokens(1, "a"), finished(1))
    for name in (common, f"cmpl-{common}"):
        told = await (await bare.get(f"/v1/requests/{name}")).get_json()
        assert (told["uid"], told["siblings"]) == (common, list(uids))
        assert [story["uid"] for story in told["requests"]] == list(uids)
        assert [story["state"] for story in told["requests"]] == ["tokenized", "finished", "tokenized"]
    command(redis_url, "DEL", Names().request(uids[2]))  # it has expired
    told = await (await bare.get(f"/v1/requests/{common}")).get_json()
    assert told["siblings"] == list(uids) and len(told["requests"]) == 2


async def test_stories_of_siblings_that_are_too_long_together_are_asked_for_one_by_one(
    bare: Site, stages: Stages
) -> None:
    common = new_uid()
    said = Submitted(endpoint="e", frontend="web-0", prompt="x" * 4_000_000, sampling=SamplingParams())
    labelled = said.model_copy(update={"labels": {"user": "x" * 1_000_000}})
    stages.log.submit(common, [said] * 20)
    stages.log.submit(other := new_uid(), [labelled] * 20)
    told = await (await bare.get(f"/v1/requests/{common}")).get_json()
    assert len(told["requests"]) == 20
    refused = await bare.get(f"/v1/requests/{other}")
    error = (await refused.get_json())["error"]
    assert (refused.status_code, error["code"]) == (400, "several_requests")
    assert f"{other}.0" in error["message"] and f"{other}.19" in error["message"]
    assert (await bare.get(f"/v1/requests/{other}.7")).status_code == 200


async def test_siblings_are_cancelled_together_or_one_by_one(bare: Site, stages: Stages) -> None:
    common, uids = submit_siblings(stages.log, 3)
    stages.take_in()

    async def cancel(name: str) -> Any:
        response = await bare.client.delete(f"/v1/requests/{name}")
        assert response.status_code == 200
        return await response.get_json()

    assert await cancel(uids[1]) == {"id": uids[1], "object": "request", "cancelled": True}
    assert stages.log.alive(uids) == {uids[0], uids[2]}
    of_each = dict(zip(uids, (True, False, True), strict=True))
    expected = {"id": common, "object": "request", "cancelled": True, "siblings": of_each}
    assert await cancel(f"chatcmpl-{common}") == expected
    assert stages.log.alive(uids) == set()
    again = await cancel(common)
    assert (again["cancelled"], set(again["siblings"].values())) == (False, {False})
    assert {seal_of(stages.log, uid)["by"] for uid in uids} == {"client"}


@pytest.mark.parametrize("query", ["", "?format=events", "?starting_after=1-0"])
async def test_who_wants_the_events_of_siblings_is_told_to_ask_for_those_of_each(
    bare: Site, stages: Stages, query: str
) -> None:
    common, uids = submit_siblings(stages.log, 12)
    status, error = await error_of(bare.get(events(common, query)))
    assert (status, error["code"]) == (400, "several_requests")
    assert "12 requests" in error["message"] and uids[0] in error["message"] and uids[11] in error["message"]


async def test_a_format_that_there_is_not_and_frames_that_there_are_none_of_are_refused(
    bare: Site, stages: Stages
) -> None:
    uid = new_uid()
    submit(stages.log, uid, endpoint="probe")
    for query in ("?format=xml", ""):
        status, error = await error_of(bare.get(events(uid, query)))
        assert (status, error["param"]) == (400, "format")


@pytest.mark.parametrize(("age_s", "code"), [(0.0, "log_lost"), (2000.0, "request_expired")])
@pytest.mark.parametrize("query", ["", "?format=events"])
async def test_a_history_that_vanishes_under_its_reader_ends_the_stream_with_an_error(
    bare: Site, redis_url: str, stages: Stages, age_s: float, code: str, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 0.1)
    monkeypatch.setattr(web.live.listener, "COMES_BACK_S", 0.1)
    uid = await begun(stages, "a", uid=drawn(age_s))
    async with bare.reading(events(uid, query)) as reader:
        got = await received(reader, b"id: 1-0\n")
        command(redis_url, "DEL", Names().request(uid))
        *others, last = split(got + await received(reader, DONE))[:-1]
        assert json.loads(last.partition(b"data: ")[2])["error"]["code"] == code
        assert id_of(last) == ""  # nobody can go on after it
        assert not any(b"error" in other for other in others)


async def test_a_history_with_a_hole_ends_the_stream_before_the_hole(
    bare: Site, redis_url: str, stages: Stages
) -> None:
    uid = await begun(stages, "1", "2", "3")
    command(redis_url, "XDEL", Names().request(uid), tokens_id(2))
    for query, num_before in (("", 2), ("?format=events", 3)):
        *before, last = documents(await bare.read(events(uid, query)))
        assert (len(before), last["error"]["code"]) == (num_before, "log_lost")


# readers


async def test_who_reads_is_known_to_the_log_and_cancels_nothing_by_leaving(
    redis_url: str, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.counts, "REFRESH_S", 0.05)
    uid = await begun(stages)
    key = Names().reader(uid)
    async with site(redis_url, ready=False) as here, site(redis_url, "web-1", ready=False) as there:
        async with there.reading(events(uid)):
            async with here.reading(events(uid)), here.reading(events(uid, "?format=events")):
                await until(lambda: command(redis_url, "SCARD", key) == 2)
                command(redis_url, "PEXPIRE", key, 1000)
                await until(lambda: 1000 < command(redis_url, "PTTL", key) <= 60_000)  # it is said again
            await until(lambda: command(redis_url, "SCARD", key) == 1)
            assert stages.log.read_by_others([uid]) == {uid}
        await until(lambda: not command(redis_url, "EXISTS", key))
        await until(lambda: not (here.is_busy or there.is_busy))
    assert stages.log.alive([uid]) == {uid}


async def test_a_request_that_has_ended_needs_no_reader(here: Site, redis_url: str) -> None:
    uid, full = await here.streamed(chat(stream=True))
    response = await here.get(events(uid))
    assert response.content_type == "text/event-stream; charset=utf-8" and await bytes_of(response) == full
    assert command(redis_url, "EXISTS", Names().reader(uid)) == 0


async def test_a_reader_that_came_while_another_left_is_known_to_the_log(bare: Site, stages: Stages) -> None:
    uid = new_uid()
    submit(stages.log, uid)
    readers = bare.frontend.readers
    for _ in range(20):
        for come_or_go in (readers.add, readers.remove, readers.add):
            come_or_go(uid)
        await asyncio.gather(*(readers.tell(uid) for _ in range(3)))
        assert stages.log.read_by_others([uid]) == {uid}
        readers.add(uid)
        tellings = [readers.tell(uid)]
        for _ in range(2):
            readers.remove(uid)
            tellings.append(readers.tell(uid))
        await asyncio.gather(*tellings)
        assert stages.log.read_by_others([uid]) == set()


async def test_a_full_redis_refuses_no_reader(bare: Site, redis_url: str, stages: Stages) -> None:
    uid = await begun(stages, "a")
    command(redis_url, "CONFIG", "SET", "maxmemory", "1")
    async with bare.reading(events(uid)) as reader:
        await received(reader, b"id: 1-0\n")
        assert stages.log.read_by_others([uid]) == {uid}


async def test_a_reader_has_a_canonical_line(here: Site) -> None:
    with capture_logs() as lines:
        uid, _ = await here.streamed(chat(stream=True))
        await until(lambda: len(request_lines(lines)) == 1)
        await here.read(events(uid))
        await until(lambda: len(request_lines(lines)) == 2)
    line = request_lines(lines)[1]
    assert (line["uid"], line["reader"], line["status"], line["completion_tokens"]) == (uid, True, 200, 3)


async def test_a_drain_takes_no_new_readers_and_sends_those_that_are_there_elsewhere(
    bare: Site, stages: Stages
) -> None:
    uid = await begun(stages, "a")
    async with bare.reading(events(uid)) as reader:
        await received(reader, b"id: 1-0\n")
        drain = asyncio.create_task(bare.frontend.drain(0.2))
        await until(lambda: bare.frontend.draining)
        assert await code_of(bare.get(events(uid))) == (503, "shutting_down")
        last, _ = split(await received(reader, DONE))
        assert b'"code":"shutting_down"' in last and id_of(last) == ""
        await drain
    assert stages.log.alive([uid]) == {uid}


async def test_without_redis_a_request_cannot_be_read(own_redis: RunningServer) -> None:
    async with site(own_redis.url, ready=False) as here:
        own_redis.process.kill()
        own_redis.process.wait()
        path = f"/v1/requests/{new_uid()}"
        aborts = (here.client.post("/abort_request", json=body) for body in ({"rid": new_uid()}, {"abort_all": True}))
        for answer in (here.get(path), here.get(f"{path}/events"), here.client.delete(path), *aborts):
            assert await code_of(answer) == (503, "overloaded")


# story and end


async def test_a_request_tells_its_story(here: Site) -> None:
    uid, _ = await here.streamed(chat(seed=3, stream=True))
    for name in (uid, f"chatcmpl-{uid}"):
        response = await here.get(f"/v1/requests/{name}")
        told = await response.get_json()
        assert (response.status_code, told["uid"], told["state"]) == (200, uid, "finished")
        assert (told["text"], told["sampling"]["seed"]) == ("Hello\u2028!", 3)
        assert all(before["at_ms"] <= after["at_ms"] for before, after in pairwise(told["moments"]))


async def test_a_request_is_cancelled_from_elsewhere_once(here: Site, there: Site, stand_in: StandIn) -> None:
    answer = asyncio.create_task(code_of(here.post(chat("silent"))))
    uid = await one_request(stand_in)
    for cancelled in (True, False):
        response = await there.client.delete(f"/v1/requests/chatcmpl-{uid}")
        assert response.status_code == 200
        assert await response.get_json() == {"id": uid, "object": "request", "cancelled": cancelled}
    assert await answer == (499, "cancelled")
    assert seal_of(stand_in.stages.log, uid)["by"] == "client"
