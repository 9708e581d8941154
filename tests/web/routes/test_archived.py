"""Requests that Redis does not keep any more: clients find them as if it did."""

from __future__ import annotations

import sqlite3
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import CHAT, DONE, IDS, Site, chat, code_of, site

import web.live.stream
from ops.sse_reader import frames_in
from pipeline.archive.reader import volumes
from pipeline.archive.writer import Writer
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, Names, sibling_uids
from pipeline.recording import Recording
from web.http.keys import read_keys


@pytest.fixture
def here(redis_url: str, stand_in: StandIn, tmp_path: Path) -> AbstractAsyncContextManager[Site]:
    return site(redis_url, archive=str(tmp_path))


async def archive(here: Site, folder: Path, *uids: str) -> None:
    """Do what an archiver does, and what time does then."""
    histories = await here.log.histories(dict.fromkeys(uids, ""))
    recordings = [Recording(uid, tuple(history or ())) for uid, history in histories.items()]
    assert all(recording.is_sealed for recording in recordings)
    Writer(folder, "archive-0", 1).write(recordings)


def expire(url: str, *uids: str) -> None:
    assert command(url, "DEL", *map(Names().request, uids)) == len(uids)


async def test_an_archived_request_is_told_and_streamed_as_before(
    here: Site, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.stream, "FRAMED_AT_ONCE", 2)
    for body in (chat(model="demo"), chat("break", stream_options={"include_usage": True})):
        response = await here.post(body | {"stream": True}, headers=IDS)
        uid = response.headers["x-minisgl-uid"]
        full = await response.get_data(as_text=False)
        stream = f"/v1/requests/{uid}/events?format="
        paths = [f"/v1/requests/{uid}", f"{stream}events", f"{stream}story", f"{stream}story&starting_after=1-0"]
        before = [await here.read(path) for path in paths]
        resumed = await here.read(f"/v1/requests/{uid}/events?starting_after=1-0")
        await archive(here, tmp_path, uid)
        expire(redis_url, uid)
        assert [await here.read(path) for path in paths] == before
        assert await here.read(f"/v1/requests/chatcmpl-{uid}/events") == full
        assert await here.read(f"/v1/requests/{uid}/events?starting_after=1-0") == resumed
        assert await here.read(f"/v1/requests/{uid}/events", **{"Last-Event-ID": SEAL}) == DONE
        assert await code_of(here.get(f"/v1/requests/{uid}/events?starting_after=9-9")) == (400, "invalid_value")
        deleted = await here.client.delete(f"/v1/requests/{uid}")
        assert await deleted.get_json() == {"id": uid, "object": "request", "cancelled": False}
    async with site(redis_url) as without:
        assert await code_of(without.get(f"/v1/requests/{uid}")) == (404, "request_not_found")


async def test_archived_siblings_are_told_together_also_where_redis_still_has_some(
    here: Site, redis_url: str, tmp_path: Path
) -> None:
    response = await here.post(chat(n=3))
    uid = response.headers["x-minisgl-uid"]
    uids = sibling_uids(uid, 3)
    before = await here.read(f"/v1/requests/{uid}")
    await archive(here, tmp_path, *uids)
    for expired in (uids[1], uids[0], uids[2]):
        expire(redis_url, expired)
        assert await here.read(f"/v1/requests/{uid}") == before
    assert DONE in await here.read(f"/v1/requests/{uids[1]}/events")


async def test_what_was_erased_does_not_exist_though_the_archive_may_still_have_it(
    here: Site, redis_url: str, tmp_path: Path
) -> None:
    uids = []
    for body in (chat(), chat(n=2)):
        uid = (await here.post(body)).headers["x-minisgl-uid"]
        uids += [uid, *sibling_uids(uid, 2)] if "n" in body else [uid]
    histories = [uid for uid in uids if "." in uid or f"{uid}.0" not in uids]
    await archive(here, tmp_path, *histories)
    with closing(RedisLog(redis_url, Names())) as log:
        assert all(log.erase(uid) for uid in histories)
    for uid in uids:
        for path in (f"/v1/requests/{uid}", f"/v1/requests/{uid}/events"):
            assert await code_of(here.get(path)) == (404, "request_not_found")


async def test_a_stored_chat_is_read_also_where_redis_still_has_some_of_its_choices(
    here: Site, redis_url: str, tmp_path: Path
) -> None:
    response = await here.post(chat(n=3, store=True))
    uid = response.headers["x-minisgl-uid"]
    uids, path = sibling_uids(uid, 3), f"{CHAT}/chatcmpl-{uid}"
    before = await here.read(path)
    await archive(here, tmp_path, *uids)
    for expired in (uids[1], uids[0], uids[2]):
        expire(redis_url, expired)
        assert await here.read(path) == before


async def test_a_body_that_is_sent_again_with_its_key_gets_its_archived_response(
    here: Site, redis_url: str, tmp_path: Path
) -> None:
    key, body = {"Idempotency-Key": "k", **IDS}, {"input": "hello", "background": True, "stream": True}
    first = await here.client.post("/v1/responses", json=body, headers=key)
    uid, told = first.headers["x-minisgl-uid"], await first.get_data()
    await archive(here, tmp_path, uid)
    expire(redis_url, uid)
    again = await here.client.post("/v1/responses", json=body, headers=key)
    assert again.headers["x-minisgl-uid"] == uid
    assert await again.get_data() == told


async def test_an_archived_request_of_another_owner_does_not_exist(
    redis_url: str, stand_in: StandIn, tmp_path: Path
) -> None:
    keys = read_keys(["sk-ann", "sk-bob"], "", "sk-root")
    async with site(redis_url, archive=str(tmp_path), keys=keys) as here:
        as_ann, as_bob, as_root = ({"authorization": f"Bearer {key}"} for key in ("sk-ann", "sk-bob", "sk-root"))
        response = await here.client.post(CHAT, json=chat(), headers=as_ann)
        uid = response.headers["x-minisgl-uid"]
        await archive(here, tmp_path, uid)
        expire(redis_url, uid)
        for path in (f"/v1/requests/{uid}", f"/v1/requests/{uid}/events"):
            assert await here.read(path, **as_ann) == await here.read(path, **as_root)
            assert await code_of(here.client.get(path, headers=as_bob)) == (404, "request_not_found")


async def test_an_archive_that_cannot_be_read_is_an_error_of_the_server(
    here: Site, redis_url: str, tmp_path: Path
) -> None:
    response: Any = await here.post(chat())
    uid = response.headers["x-minisgl-uid"]
    await archive(here, tmp_path, uid)
    expire(redis_url, uid)
    (volume,) = volumes(tmp_path)
    with closing(sqlite3.connect(volume.path)) as database, database:
        database.execute("UPDATE requests SET frame = substr(frame, 2)")
    assert await code_of(here.get(f"/v1/requests/{uid}")) == (503, "overloaded")
    assert await code_of(here.get(f"/v1/requests/{uid[:-1]}{int(uid[-1], 16) ^ 1:x}")) == (404, "request_not_found")


async def test_an_archived_answer_in_anthropics_form_goes_on_after_any_event(
    here: Site, redis_url: str, tmp_path: Path
) -> None:
    body = {"max_tokens": 50, "stream": True, "messages": chat()["messages"]}
    response = await here.client.post("/v1/messages", json=body, headers=IDS)
    uid, full = response.headers["x-minisgl-uid"], await response.get_data(as_text=False)
    await archive(here, tmp_path, uid)
    expire(redis_url, uid)
    assert await here.read(f"/v1/requests/msg_{uid}/events") == full + DONE
    for cursor in (frame.id for frame in frames_in(full) if frame.id):
        rest = full.partition(b"id: %s\n" % cursor.encode())[2].partition(b"\n\n")[2]
        assert await here.read(f"/v1/requests/{uid}/events", **{"Last-Event-ID": cursor}) == rest + DONE
