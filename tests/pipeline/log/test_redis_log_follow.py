"""A frontend follows its replies: reads that are sent where the one before comes in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from support.log_contract import LONG_MS, NAMES, with_front
from support.redis_servers import command

import pipeline.log.drivers
from pipeline.errors import GroupLost, LogUnavailable
from pipeline.events import Cancelled
from pipeline.log.protocol import Reply
from pipeline.log.redis import AsyncRedisLog, RedisLog

WEB = "web-0"
REPLIES = NAMES.replies(WEB)


def append(url: str, *uids: str, by: str = "me") -> None:
    for uid in uids:
        command(url, "XADD", REPLIES, "*", "uid", uid, "kind", "cancelled", "by", by)


class Heard:
    """What came, and whether to go on."""

    def __init__(self, then: Callable[[str], None] = lambda _: None, *, last: str = "last") -> None:
        self.uids: list[str] = []
        self.cursor = "0-0"
        self._then = then
        self._last = last

    def take(self, cursor: str, replies: Sequence[Reply]) -> bool:
        self.cursor = cursor
        for reply in replies:
            self.uids.append(reply.uid)
            self._then(reply.uid)
        return self._last not in self.uids


@contextlib.asynccontextmanager
async def following(front: AsyncRedisLog, heard: Heard) -> AsyncIterator[asyncio.Task[None]]:
    """Give the task that follows the replies, once the first one was heard."""
    append(front.url, "first")
    task = asyncio.create_task(front.follow_replies(WEB, heard.cursor, heard.take, block_ms=LONG_MS))
    while not heard.uids and not task.done():
        await asyncio.sleep(0.005)
    yield task
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def test_replies_are_followed_in_order_until_it_is_enough_and_the_connection_stays(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        num_clients = len(command(log.url, "CLIENT", "LIST").splitlines())
        for _ in range(2):
            heard = Heard()
            async with following(front, heard) as task:
                append(log.url, "a", "b")
                append(log.url, "last")
                append(log.url, "after")
                await task
            assert heard.uids[:4] == ["first", "a", "b", "last"]
            _, rest = await front.read_replies(WEB, heard.cursor, block_ms=LONG_MS)
            assert [*heard.uids, *(reply.uid for reply in rest)][3:] == ["last", "after"]
            command(log.url, "DEL", REPLIES)
        assert len(command(log.url, "CLIENT", "LIST").splitlines()) == num_clients + 1

    with_front(log.url, act)


@pytest.mark.parametrize("how", ["cancelled", "connection broken", "server silent"])
def test_whatever_ends_a_follower_the_next_one_loses_no_reply(
    log: RedisLog, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "server silent":
        monkeypatch.setattr(pipeline.log.drivers, "LONGEST_WAIT_S", 0.5)  # Redis would answer after LONG_MS

    async def act(front: AsyncRedisLog) -> None:
        heard = Heard()
        async with following(front, heard) as task:
            if how == "cancelled":
                while not command(log.url, "INFO", "clients").count(b"blocked_clients:1"):
                    await asyncio.sleep(0.005)
                task.cancel()
            elif how == "connection broken":
                command(log.url, "CLIENT", "KILL", "TYPE", "normal")
            with pytest.raises(asyncio.CancelledError if how == "cancelled" else LogUnavailable):
                await task
        append(log.url, "last")
        await front.follow_replies(WEB, heard.cursor, heard.take, block_ms=LONG_MS)
        assert heard.uids == ["first", "last"]

    with_front(log.url, act)


def test_silence_is_told_with_nothing_and_the_cursor_stays(log: RedisLog) -> None:
    told: list[tuple[str, list[Reply]]] = []

    def take(cursor: str, replies: list[Reply]) -> bool:
        told.append((cursor, replies))
        return len(told) < 3

    async def act(front: AsyncRedisLog) -> None:
        await front.follow_replies(WEB, "5-0", take, block_ms=1)

    with_front(log.url, act)
    assert told == [("5-0", [])] * 3


def test_a_large_reply_that_comes_in_pieces_is_taken_whole(log: RedisLog) -> None:
    large, told = "x" * 3_000_000, list[Reply]()

    def take(_: str, replies: list[Reply]) -> bool:
        told.extend(replies)
        return not told

    async def act(front: AsyncRedisLog) -> None:
        append(log.url, "a", by=large)
        await front.follow_replies(WEB, "0-0", take, block_ms=LONG_MS)

    with_front(log.url, act)
    assert [reply.event for reply in told] == [Cancelled(by=large)]


def test_what_redis_refuses_is_an_error_and_the_next_one_goes_on(log: RedisLog) -> None:
    async def act(front: AsyncRedisLog) -> None:
        heard = Heard()
        command(log.url, "SET", REPLIES, "no stream")
        with pytest.raises(GroupLost, match="WRONGTYPE"):
            await front.follow_replies(WEB, "0-0", heard.take, block_ms=LONG_MS)
        command(log.url, "DEL", REPLIES)
        append(log.url, "last")
        await front.follow_replies(WEB, "0-0", heard.take, block_ms=LONG_MS)
        assert heard.uids == ["last"]

    with_front(log.url, act)


def test_what_the_follower_raises_reaches_its_caller(log: RedisLog) -> None:
    def break_on(uid: str) -> None:
        if uid == "bad":
            raise KeyError(uid)

    async def act(front: AsyncRedisLog) -> None:
        heard = Heard(break_on)
        async with following(front, heard) as task:
            append(log.url, "bad", "a")
            with pytest.raises(KeyError, match="bad"):
                await task
        assert heard.uids == ["first", "bad"]

    with_front(log.url, act)
