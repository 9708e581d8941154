"""What a listener hears: everything, in order, once, whatever the replies lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
from measured import count_of
from redis_servers import command
from stand_in_stages import Stages, finished, tokens

import web.live.listener
from pipeline.events import Cancelled, Failed, Finished, TokensProduced, new_uid
from pipeline.log.redis import AsyncRedisLog
from pipeline.metrics.families import GAP_FILLS
from pipeline.names import SEAL, Names, tokens_id
from web.live.frontend import run_all
from web.live.listener import Listener
from web.live.tail import Tail
from web.wire.frames import ClientEvent

WEB = "web-0"
NOBODY = "web-9"
"""A frontend that is not there: what is said to it is in the history and in no replies."""


@asynccontextmanager
async def tailing(url: str, *, room: int = 256) -> AsyncIterator[Tail]:
    log = AsyncRedisLog(url, Names())
    tail = Tail(log, WEB, room=room)
    await log.open_replies(WEB)
    task = asyncio.create_task(run_all(*tail.loops()))
    try:
        async with asyncio.timeout(20):
            await _settled(url, tail)
            yield tail
    finally:
        task.cancel()
        await asyncio.wait({task})
        await log.close()


async def _settled(url: str, tail: Tail) -> None:
    """Wait until the replies are read: until then every listener looks at its history."""
    with closing(tail.listen("first")) as listener:
        while not listener.ended:
            command(url, "XADD", Names().replies(WEB), "*", "uid", "first", "kind", "cancelled", "by", "me")
            await asyncio.sleep(0.01)


async def heard(listener: Listener) -> list[tuple[int, str]]:
    """Return (n, text) of all events until the end, which has its kind for text."""
    return [_short(reply) async for reply in listener]


def _short(heard: ClientEvent) -> tuple[int, str]:
    return heard.n, heard.event.text if isinstance(heard.event, TokensProduced) else heard.event.kind


async def say(stages: Stages, uid: str, n: int, *events: TokensProduced | Finished, frontend: str = WEB) -> None:
    await asyncio.to_thread(stages.say, uid, n, *events, frontend=frontend)


def gap_fills(tail: Tail) -> dict[str, float]:
    """Return how often a listener was fed from its history, by the reason."""
    counts = {reason: count_of(tail.measures, GAP_FILLS, reason) for reason in GAP_FILLS.known}
    return {reason: count for reason, count in counts.items() if count}


def test_events_reach_their_listener_in_order_until_the_end(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        one, two = new_uid(), new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(one)) as first, closing(tail.listen(two)) as second:
                for uid in (one, two):
                    stages.begin(uid, WEB)
                for n in (1, 2):
                    await say(stages, one, n, tokens(n, f"a{n}"))
                    await say(stages, two, n, tokens(n, f"b{n}"))
                await say(stages, one, 2, finished(2))
                await say(stages, two, 3, tokens(3, "b3"), finished(3))
                assert await heard(first) == [(1, "a1"), (2, "a2"), (2, "finished")]
                assert await heard(second) == [(1, "b1"), (2, "b2"), (3, "b3"), (3, "finished")]
            assert tail.listeners == () and gap_fills(tail) == {}

    asyncio.run(scenario())


def test_a_gap_in_the_replies_is_filled_from_the_history(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(uid)) as listener:
                stages.begin(uid, WEB)
                await say(stages, uid, 1, tokens(1, "a"))
                await say(stages, uid, 2, tokens(2, "b"), frontend=NOBODY)
                await say(stages, uid, 4, tokens(4, "cd", count=2), frontend=NOBODY)
                await say(stages, uid, 5, tokens(5, "e"))
                await say(stages, uid, 5, finished(5))
                expected = [(1, "a"), (2, "b"), (4, "cd"), (5, "e"), (5, "finished")]
                assert await heard(listener) == expected
            assert gap_fills(tail) == {"gap": 1}

    asyncio.run(scenario())


def test_a_slow_client_is_fed_from_its_history_and_holds_a_bounded_queue(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        slow, quick = new_uid(), new_uid()
        async with tailing(redis_url, room=4) as tail:
            with closing(tail.listen(slow)) as listener, closing(tail.listen(quick)) as other:
                for uid in (slow, quick):
                    stages.begin(uid, WEB)
                for n in range(1, 31):
                    await say(stages, slow, n, tokens(n, str(n)))
                await say(stages, slow, 30, finished(30))
                await say(stages, quick, 0, finished(0))  # heard after all the others: the queue is full by then
                assert await heard(other) == [(0, "finished")]
                sizes: list[int] = []
                texts: list[str] = []
                while not texts or texts[-1] != "finished":
                    replies = await listener.next()
                    sizes.append(len(replies))
                    texts += [_short(reply)[1] for reply in replies]
                assert texts == [*map(str, range(1, 31)), "finished"]
                assert max(sizes) == 4
            assert gap_fills(tail) == {"slow_client": 1}

    asyncio.run(scenario())


def test_a_lost_last_reply_is_found_after_a_second_of_silence(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(uid)) as listener:
                stages.begin(uid, WEB)
                await say(stages, uid, 1, tokens(1, "a"))
                await say(stages, uid, 1, finished(1), frontend=NOBODY)
                assert await heard(listener) == [(1, "a"), (1, "finished")]
            assert gap_fills(tail) == {}

    asyncio.run(scenario())


def test_a_request_that_ended_before_it_was_listened_to_is_heard_in_full(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        stages.begin(uid, NOBODY)
        await say(stages, uid, 1, tokens(1, "a"), finished(1), frontend=NOBODY)
        async with tailing(redis_url) as tail:
            with closing(tail.listen(uid)) as listener:
                assert await heard(listener) == [(1, "a"), (1, "finished")]

    asyncio.run(scenario())


def test_an_end_said_by_anybody_is_heard(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(uid)) as listener:
                stages.begin(uid, WEB)
                await say(stages, uid, 1, tokens(1, "a"))
                await asyncio.to_thread(lambda: stages.log.end(uid, Cancelled(by="operator"), frontend=WEB))
                replies = [reply async for reply in listener]
                assert [(reply.entry_id, reply.n) for reply in replies] == [(tokens_id(1), 1), (SEAL, 1)]
                assert isinstance(replies[1].event, Cancelled) and replies[1].event.by == "operator"

    asyncio.run(scenario())


def test_a_history_that_is_gone_ends_its_stream_with_an_error(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(uid)) as listener:
                stages.begin(uid, WEB)
                await say(stages, uid, 1, tokens(1, "a"))
                command(redis_url, "FLUSHALL")
                replies = [reply async for reply in listener]
                end = replies[-1].event
                assert len(replies) == 2 and isinstance(end, Failed) and (end.code, end.status) == ("log_lost", 500)

    asyncio.run(scenario())


def test_a_lost_connection_loses_no_reply(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(uid)) as listener:
                stages.begin(uid, WEB)
                await say(stages, uid, 1, tokens(1, "a"))
                assert [_short(reply) for reply in await listener.next()] == [(1, "a")]
                command(redis_url, "CLIENT", "KILL", "TYPE", "normal")
                await say(stages, uid, 2, tokens(2, "b"))
                await say(stages, uid, 2, finished(2))
                assert await heard(listener) == [(2, "b"), (2, "finished")]
            assert gap_fills(tail) == {"unreadable": 1}

    asyncio.run(scenario())


def test_a_reply_that_does_not_decode_costs_nobody_an_event(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(uid)) as listener:
                stages.begin(uid, WEB)
                bad = '[{"uid":"x","id":"1-0","n":1,"event":{"kind":"tokens","of":"tomorrow"}}]'
                command(redis_url, "XADD", Names().replies(WEB), "*", "events", bad)
                await say(stages, uid, 1, tokens(1, "a"), finished(1))
                assert await heard(listener) == [(1, "a"), (1, "finished")]

    asyncio.run(scenario())


def test_the_replies_live_as_long_as_somebody_listens_to_them(redis_url: str) -> None:
    async def scenario() -> None:
        async with tailing(redis_url):
            command(redis_url, "DEL", Names().replies(WEB))
            while not command(redis_url, "EXISTS", Names().replies(WEB)):
                await asyncio.sleep(0.02)
        assert 0 < command(redis_url, "PTTL", Names().replies(WEB)) <= 60_000

    asyncio.run(scenario())


# histories that are followed


def test_a_history_is_followed_as_it_comes_and_not_looked_at_again_and_again(
    redis_url: str, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        uid = new_uid()
        stages.begin(uid, NOBODY)
        await say(stages, uid, 1, tokens(1, "a"), frontend=NOBODY)
        async with tailing(redis_url) as tail:
            with closing(tail.follow(uid)) as first, closing(tail.follow(uid, whole=True)) as second:
                assert [_short(heard) for heard in await first.next()] == [(1, "a")]
                kinds = [heard.event.kind for heard in await second.next()]
                assert kinds == ["submitted", "tokenized", "tokens"]
                for n in (2, 3):
                    await say(stages, uid, n, tokens(n, str(n)), frontend=NOBODY)
                    for listener in (first, second):
                        assert [_short(heard) for heard in await listener.next()] == [(n, str(n))]
                await say(stages, uid, 3, finished(3), frontend=NOBODY)
                assert await heard(first) == await heard(second) == [(3, "finished")]
            assert tail.listeners == ()

    monkeypatch.setattr(web.live.listener, "SILENCE_S", 1000.0)
    asyncio.run(scenario())


def test_who_comes_later_and_who_is_slow_is_fed_beside_who_is_up_to_date(
    redis_url: str, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        uid = new_uid()
        stages.begin(uid, NOBODY)
        async with tailing(redis_url, room=4) as tail:
            with closing(tail.follow(uid)) as quick, closing(tail.follow(uid)) as slow:
                assert tail.listens_to(uid)
                reading = asyncio.create_task(heard(quick))
                first = [_short(each) async for each in _some(slow, stages, uid)]
                for n in range(2, 31):
                    await say(stages, uid, n, tokens(n, str(n)), frontend=NOBODY)
                await say(stages, uid, 30, finished(30), frontend=NOBODY)
                whole = [*((n, str(n)) for n in range(1, 31)), (30, "finished")]
                assert await reading == whole
                sizes: list[int] = []
                rest: list[tuple[int, str]] = []
                while not slow.ended or not rest or rest[-1] != whole[-1]:
                    batch = await slow.next()
                    sizes.append(len(batch))
                    rest += [_short(each) for each in batch]
                assert first + rest == whole and max(sizes) == 4
                with closing(tail.follow(uid)) as late:
                    assert await heard(late) == whole

    monkeypatch.setattr(web.live.listener, "SILENCE_S", 1000.0)
    asyncio.run(scenario())


def test_a_reader_that_does_not_read_costs_no_reads(redis_url: str, stages: Stages) -> None:
    def num_reads() -> int:
        stats = command(redis_url, "INFO", "commandstats").decode()
        return int(stats.partition("cmdstat_xread:calls=")[2].partition(",")[0] or 0)

    async def scenario() -> None:
        slow, quick = new_uid(), new_uid()
        for uid in (slow, quick):
            stages.begin(uid, NOBODY)
        async with tailing(redis_url, room=4) as tail:
            with closing(tail.follow(slow)) as listener, closing(tail.follow(quick)) as other:
                await say(stages, slow, 1, tokens(1), frontend=NOBODY)
                assert len(await listener.next()) == 1
                for n in range(2, 12):
                    await say(stages, slow, n, tokens(n), frontend=NOBODY)
                before = num_reads()
                for n in range(1, 31):
                    await say(stages, quick, n, tokens(n, str(n)), frontend=NOBODY)
                    assert [_short(each) for each in await other.next()] == [(n, str(n))]
                assert num_reads() - before < 100

    asyncio.run(scenario())


async def _some(listener: Listener, stages: Stages, uid: str) -> AsyncIterator[ClientEvent]:
    await say(stages, uid, 1, tokens(1, "1"), frontend=NOBODY)
    for each in await listener.next():
        yield each


def test_under_another_name_new_replies_are_heard_and_old_requests_go_on(
    redis_url: str, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        before, unsubmitted, after = new_uid(), new_uid(), new_uid()
        async with tailing(redis_url) as tail:
            with closing(tail.listen(before)) as old, closing(tail.listen(unsubmitted)) as waiting:
                stages.begin(before, WEB)
                await say(stages, before, 1, tokens(1, "a"))
                assert [_short(each) for each in await old.next()] == [(1, "a")]
                command(redis_url, "DEL", Names().replies(WEB))
                tail.rename("web-7")
                tail.rename("web-7")
                assert tail.frontend == "web-7"
                with closing(tail.listen(after)) as new:
                    while not command(redis_url, "EXISTS", Names().replies("web-7")):
                        await asyncio.sleep(0.01)
                    for uid, frontend in ((unsubmitted, WEB), (after, "web-7")):
                        stages.begin(uid, frontend)
                        await say(stages, uid, 1, tokens(1, "b"), frontend=frontend)
                        await say(stages, uid, 1, finished(1), frontend=frontend)
                    await say(stages, before, 2, tokens(2, "c"), finished(2))
                    assert await heard(new) == await heard(waiting) == [(1, "b"), (1, "finished")]
                    assert await heard(old) == [(2, "c"), (2, "finished")]

    monkeypatch.setattr(web.live.listener, "SILENCE_S", 1000.0)
    asyncio.run(scenario())


def test_a_lost_connection_stops_no_reader(redis_url: str, stages: Stages) -> None:
    async def scenario() -> None:
        uid = new_uid()
        stages.begin(uid, NOBODY)
        async with tailing(redis_url) as tail:
            with closing(tail.follow(uid)) as listener:
                await say(stages, uid, 1, tokens(1, "a"), frontend=NOBODY)
                assert [_short(each) for each in await listener.next()] == [(1, "a")]
                command(redis_url, "CLIENT", "KILL", "TYPE", "normal")
                await say(stages, uid, 2, tokens(2, "b"), finished(2), frontend=NOBODY)
                assert await heard(listener) == [(2, "b"), (2, "finished")]

    asyncio.run(scenario())
