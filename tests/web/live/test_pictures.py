"""Pictures of the pipeline: one reader for all who look, none while nobody does, and an error where Redis is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.redis_servers import RunningServer, Servers, running_server
from support.web_site import until

import web.live.pictures
from pipeline.log.redis import AsyncRedisLog
from pipeline.names import Names
from pipeline.views.pipeline import view_of
from pipeline.views.reader import Reader
from web.live.pictures import HIDDEN, Pictures, Viewer


@asynccontextmanager
async def pictures_of(url: str) -> AsyncIterator[Pictures]:
    log = AsyncRedisLog(url, Names())
    try:
        yield Pictures(log)
    finally:
        await log.close()


@pytest.fixture
def pictures(redis_url: str) -> AbstractAsyncContextManager[Pictures]:
    return pictures_of(redis_url)


def everybody(_: str) -> bool:
    return True


def watched(pictures: Pictures, viewer: str = "admin") -> aclosing[AsyncGenerator[bytes, None]]:
    return aclosing(pictures.watch(Viewer(viewer, everybody, is_admin=viewer == "admin")))


async def next_of(stream: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    async with asyncio.timeout(30):
        told: dict[str, Any] = orjson.loads(await anext(stream))
    return told


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pictures"]


async def test_all_who_look_share_one_reader_which_ends_with_the_last_of_them(pictures: Pictures) -> None:
    assert not pictures.is_reading and not readers()
    async with watched(pictures) as first:
        one = await next_of(first)
        async with watched(pictures, "other") as second:
            assert (await next_of(second))["at_ms"] >= one["at_ms"], "it need not wait for the next picture"
            assert len(readers()) == 1 and pictures.is_reading
        await next_of(first)
        assert len(readers()) == 1
    assert not pictures.is_reading
    await until(lambda: not readers())


async def test_nothing_is_read_while_nobody_looks_and_whoever_comes_back_sees_again(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = Reader.read

    def counted(reader: Reader) -> Any:
        reads.append(reader)
        return read(reader)

    monkeypatch.setattr(Reader, "read", counted)
    for _ in range(2):
        async with watched(pictures) as stream:
            await next_of(stream)
        await until(lambda: not readers())
    assert len({*map(id, reads)}) == 2


async def test_there_are_at_most_two_pictures_a_second(pictures: Pictures) -> None:
    async with watched(pictures) as stream:
        await next_of(stream)
        began_s = time.monotonic()
        for _ in range(2):
            await next_of(stream)
        assert time.monotonic() - began_s > 1.5 * web.live.pictures.APART_S


async def test_where_a_picture_is_much_work_they_come_more_seldom(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return super().wait(0.01)

    worked = iter(range(1000))
    monkeypatch.setattr(time, "thread_time", lambda: next(worked) * 0.005)
    async with watched(pictures) as stream:
        await next_of(stream)
        reading = pictures._reading
        assert reading is not None
        reading.over, before = Noted(), reading.over
        before.clear()
        await until(lambda: len(pauses) > 2)
    reading.over.set()
    assert pauses[0] == pytest.approx(1.0), "5 ms of work are 0.5 % of a second"


async def test_a_picture_is_made_once_for_all_who_see_the_same(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def noted(*given: Any) -> Any:
        made.append(given)
        return view_of(*given)

    monkeypatch.setattr(web.live.pictures, "view_of", noted)
    monkeypatch.setattr(web.live.pictures, "APART_S", 3600.0)
    async with watched(pictures) as first, watched(pictures) as second, watched(pictures, "ann") as third:
        assert await next_of(first) == await next_of(second) == await next_of(third)
    assert len(made) == 2


async def test_while_redis_is_away_the_last_picture_comes_with_the_reason_and_goes_on_afterwards(
    redis_servers: Servers, own_redis: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pictures_of(own_redis.url) as pictures, watched(pictures) as stream:
        seen = await next_of(stream)
        assert seen["error"] == ""
        own_redis.process.kill()
        while not (told := await next_of(stream))["error"]:
            seen = told
        assert told | {"error": ""} == seen, "nothing is made up"
        await asyncio.to_thread(own_redis.process.wait)
        with running_server(redis_servers.binary("embedded"), tmp_path):
            while (told := await next_of(stream))["error"]:
                assert told["at_ms"] == seen["at_ms"]
            assert told["at_ms"] > seen["at_ms"]


async def test_whoever_comes_while_redis_is_away_is_told_so_and_stays(tmp_path: Path) -> None:
    async with pictures_of(f"unix://{tmp_path}/nothing.sock") as pictures, watched(pictures) as stream:
        for _ in range(2):
            told = await next_of(stream)
            assert set(told) == {"error"} and "nothing.sock" in told["error"]
        async with watched(pictures, "ann") as other:
            assert await next_of(other) == {"error": HIDDEN}


async def test_a_redis_that_says_nothing_is_an_error_too(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.live.pictures, "SILENT_S", 0.05)
    goes_on, read = threading.Event(), Reader.read

    def stuck(reader: Reader) -> Any:
        assert goes_on.wait(30)
        return read(reader)

    monkeypatch.setattr(Reader, "read", stuck)
    async with watched(pictures) as stream:
        told = await next_of(stream)
        assert told["error"].startswith("Redis has not answered for ")
        goes_on.set()
        while (told := await next_of(stream))["error"]:
            pass
        assert told["at_ms"]


async def test_a_bug_in_a_picture_does_not_end_the_stream(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    read, broken = Reader.read, iter([True])

    def read_or_break(reader: Reader) -> Any:
        if next(broken, False):
            raise ValueError("a bug")
        return read(reader)

    monkeypatch.setattr(Reader, "read", read_or_break)
    async with watched(pictures) as stream:
        assert await next_of(stream) == {"error": web.live.pictures.BUG}
        while (told := await next_of(stream))["error"]:
            pass
        assert told["at_ms"]


async def test_all_streams_end_when_the_process_stops(pictures: Pictures) -> None:
    async with watched(pictures) as stream:
        await next_of(stream)
        pictures.close()
        async with asyncio.timeout(10):
            assert [text async for text in stream] == []
        await until(lambda: not readers())
