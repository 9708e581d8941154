"""What a listener hears: everything, in order, once, whatever the replies lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs
from support.measured import count_of
from support.redis_servers import command
from support.stand_in_stages import Stages, finished, tokens
from support.web_site import until

import web.live.listener
import web.live.tail
from pipeline.errors import LogUnavailable
from pipeline.events import Finished, TokensProduced, new_uid
from pipeline.log.redis import AsyncRedisLog
from pipeline.metrics.families import GAP_FILLS, UNREADABLE_ENTRIES
from pipeline.names import Names
from web.live.frontend import run_all
from web.live.listener import Listener
from web.live.tail import TAKEN_AT_ONCE, Tail
from web.wire.frames import ClientEvent

WEB = "web-0"
NOBODY = "web-9"
"""A frontend that is not there: what is said to it is in the history and in no replies."""


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories are not looked at for their silence: what comes is what was waited for."""
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 1000.0)


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


@dataclass(frozen=True, slots=True)
class Scene:
    """A request that has begun, and the one who listens to it."""

    tail: Tail
    listener: Listener
    uid: str
    stages: Stages

    async def say(self, n: int, *events: TokensProduced | Finished, frontend: str = WEB) -> None:
        await say(self.stages, self.uid, n, *events, frontend=frontend)


@asynccontextmanager
async def listening(url: str, stages: Stages, *, follows: bool = False, room: int = 256) -> AsyncIterator[Scene]:
    """Listen to a request, or follow the history of another frontend's."""
    uid = new_uid()
    async with tailing(url, room=room) as tail:
        with closing((tail.follow if follows else tail.listen)(uid)) as listener:
            stages.begin(uid, NOBODY if follows else WEB)
            yield Scene(tail, listener, uid, stages)
        assert tail.listeners == ()


@pytest.fixture
def scene(redis_url: str, stages: Stages) -> AbstractAsyncContextManager[Scene]:
    return listening(redis_url, stages)


@pytest.fixture
def follower(redis_url: str, stages: Stages) -> AbstractAsyncContextManager[Scene]:
    return listening(redis_url, stages, follows=True)


async def test_events_reach_their_listener_in_order_until_the_end(scene: Scene, stages: Stages) -> None:
    other = new_uid()
    with closing(scene.tail.listen(other)) as second:
        stages.begin(other, WEB)
        for n in (1, 2):
            await scene.say(n, tokens(n, f"a{n}"))
            await say(stages, other, n, tokens(n, f"b{n}"))
        await scene.say(2, finished(2))
        await say(stages, other, 3, tokens(3, "b3"), finished(3))
        assert await heard(scene.listener) == [(1, "a1"), (2, "a2"), (2, "finished")]
        assert await heard(second) == [(1, "b1"), (2, "b2"), (3, "b3"), (3, "finished")]
    assert gap_fills(scene.tail) == {}


async def test_a_gap_in_the_replies_is_filled_from_the_history(scene: Scene) -> None:
    await scene.say(1, tokens(1, "a"))
    await scene.say(2, tokens(2, "b"), frontend=NOBODY)
    await scene.say(4, tokens(4, "cd", count=2), frontend=NOBODY)
    await scene.say(5, tokens(5, "e"), finished(5))
    assert await heard(scene.listener) == [(1, "a"), (2, "b"), (4, "cd"), (5, "e"), (5, "finished")]
    assert gap_fills(scene.tail) == {"gap": 1}


async def test_a_slow_client_is_fed_from_its_history_and_holds_a_bounded_queue(redis_url: str, stages: Stages) -> None:
    async with listening(redis_url, stages, room=4) as slow:
        quick = new_uid()
        with closing(slow.tail.listen(quick)) as other:
            stages.begin(quick, WEB)
            for n in range(1, 31):
                await slow.say(n, tokens(n, str(n)))
            await slow.say(30, finished(30))
            await say(stages, quick, 0, finished(0))  # heard after all the others: the queue is full by then
            assert await heard(other) == [(0, "finished")]
        assert await drained(slow.listener) == ([*((n, str(n)) for n in range(1, 31)), (30, "finished")], 4)
        assert gap_fills(slow.tail) == {"slow_client": 1}


async def drained(listener: Listener) -> tuple[list[tuple[int, str]], int]:
    """Return all events until the end, and the most that came at once."""
    told: list[tuple[int, str]] = []
    sizes: list[int] = []
    while not told or told[-1][1] != "finished":
        batch = await listener.next()
        sizes.append(len(batch))
        told += map(_short, batch)
    return told, max(sizes)


async def test_while_a_long_history_is_taken_in_others_have_turns_of_the_loop(redis_url: str, stages: Stages) -> None:
    num, most, taken = 200, 0, 0
    uid = new_uid()
    stages.begin(uid, NOBODY)
    for n in range(1, num + 1):
        await say(stages, uid, n, tokens(n), frontend=NOBODY)
    await say(stages, uid, num, finished(num), frontend=NOBODY)

    async with tailing(redis_url) as tail:

        def look() -> None:
            nonlocal most, taken
            most, taken = max(most, len(listener.queued) - taken), len(listener.queued)
            asyncio.get_running_loop().call_soon(look)

        with closing(tail.follow(uid, whole=True)) as listener:
            look()
            await until(lambda: len(listener.queued) > num)
            assert [n for n, _ in await heard(listener)][-1] == num
    assert most <= TAKEN_AT_ONCE


async def test_a_lost_last_reply_is_found_after_a_second_of_silence(scene: Scene) -> None:
    await scene.say(1, tokens(1, "a"))
    await scene.say(1, finished(1), frontend=NOBODY)
    assert await heard(scene.listener) == [(1, "a"), (1, "finished")]
    assert gap_fills(scene.tail) == {}


@pytest.mark.parametrize("follows", [False, True])
async def test_a_lost_connection_loses_no_event(redis_url: str, stages: Stages, follows: bool) -> None:
    frontend = NOBODY if follows else WEB
    async with listening(redis_url, stages, follows=follows) as scene:
        await scene.say(1, tokens(1, "a"), frontend=frontend)
        assert [_short(event) for event in await scene.listener.next()] == [(1, "a")]
        command(redis_url, "CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(LogUnavailable):  # the engine is told, and goes on
            await scene.say(2, tokens(2, "b"), finished(2), frontend=frontend)
        await scene.say(2, tokens(2, "b"), finished(2), frontend=frontend)
        assert await heard(scene.listener) == [(2, "b"), (2, "finished")]
        assert gap_fills(scene.tail) == ({} if follows else {"unreadable": 1})


async def test_a_reply_that_does_not_decode_costs_nobody_an_event(scene: Scene, redis_url: str) -> None:
    bad = '[{"uid":"x","id":"1-0","n":1,"event":{"kind":"tokens","of":"tomorrow"}}]'
    command(redis_url, "XADD", Names().replies(WEB), "*", "events", bad)
    await scene.say(1, tokens(1, "a"), finished(1))
    assert await heard(scene.listener) == [(1, "a"), (1, "finished")]


async def test_the_replies_live_as_long_as_somebody_listens_to_them(redis_url: str) -> None:
    async with tailing(redis_url):
        command(redis_url, "DEL", Names().replies(WEB))
        while not command(redis_url, "EXISTS", Names().replies(WEB)):
            await asyncio.sleep(0.02)
    assert 0 < command(redis_url, "PTTL", Names().replies(WEB)) <= 60_000


# histories that are followed


async def test_a_history_is_followed_as_it_comes_and_not_looked_at_again_and_again(
    follower: Scene, no_polling: None
) -> None:
    with closing(follower.tail.follow(follower.uid, whole=True)) as second:
        await follower.say(1, tokens(1, "a"), frontend=NOBODY)
        assert [_short(event) for event in await follower.listener.next()] == [(1, "a")]
        kinds: list[str] = []
        while "tokens" not in kinds:
            kinds += [event.event.kind for event in await second.next()]
        assert kinds == ["submitted", "tokenized", "tokens"]
        for n in (2, 3):
            await follower.say(n, tokens(n, str(n)), frontend=NOBODY)
            for listener in (follower.listener, second):
                assert [_short(event) for event in await listener.next()] == [(n, str(n))]
        await follower.say(3, finished(3), frontend=NOBODY)
        assert await heard(follower.listener) == await heard(second) == [(3, "finished")]


async def test_who_comes_later_and_who_is_slow_is_fed_beside_who_is_up_to_date(
    redis_url: str, stages: Stages, no_polling: None
) -> None:
    whole = [*((n, str(n)) for n in range(1, 31)), (30, "finished")]
    async with listening(redis_url, stages, follows=True, room=4) as quick:
        with closing(quick.tail.follow(quick.uid)) as slow:
            reading = asyncio.create_task(heard(quick.listener))
            await quick.say(1, tokens(1, "1"), frontend=NOBODY)
            assert [_short(event) for event in await slow.next()] == whole[:1]
            for n in range(2, 31):
                await quick.say(n, tokens(n, str(n)), frontend=NOBODY)
            await quick.say(30, finished(30), frontend=NOBODY)
            assert await reading == whole
            assert await drained(slow) == (whole[1:], 4)
        with closing(quick.tail.follow(quick.uid)) as late:
            assert await heard(late) == whole


async def test_a_reader_that_does_not_read_costs_no_reads(redis_url: str, stages: Stages) -> None:
    def num_reads() -> int:
        stats = command(redis_url, "INFO", "commandstats").decode()
        return int(stats.partition("cmdstat_xread:calls=")[2].partition(",")[0] or 0)

    async with listening(redis_url, stages, follows=True, room=4) as slow:
        quick = new_uid()
        stages.begin(quick, NOBODY)
        with closing(slow.tail.follow(quick)) as other:
            await slow.say(1, tokens(1), frontend=NOBODY)
            assert len(await slow.listener.next()) == 1
            for n in range(2, 12):
                await slow.say(n, tokens(n), frontend=NOBODY)
            before = num_reads()
            for n in range(1, 31):
                await say(stages, quick, n, tokens(n, str(n)), frontend=NOBODY)
                assert [_short(event) for event in await other.next()] == [(n, str(n))]
            assert num_reads() - before < 100


async def test_under_another_name_new_replies_are_heard_and_old_requests_go_on(
    scene: Scene, redis_url: str, stages: Stages, no_polling: None
) -> None:
    unsubmitted, after = new_uid(), new_uid()
    tail = scene.tail
    with closing(tail.listen(unsubmitted)) as waiting:
        await scene.say(1, tokens(1, "a"))
        assert [_short(event) for event in await scene.listener.next()] == [(1, "a")]
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
            await scene.say(2, tokens(2, "c"), finished(2))
            assert await heard(new) == await heard(waiting) == [(1, "b"), (1, "finished")]
            assert await heard(scene.listener) == [(2, "c"), (2, "finished")]


GARBAGE = (
    (b"gar", b"bage"),
    (b"\xff", b"\xff"),
    (b"uid", b"a"),
    (b"events", b"[{}]"),
    (b"events", b"5"),
    (b"events", b'[{"uid":[],"id":"1-0","n":1,"event":{"kind":"cancelled","by":"x"}}]'),
    (b"uid", b"a", b"kind", b"admitted", b"engine", b"e", b"epoch", b"1", b"step", b"1", b"fingerprint", b"f"),
    (b"uid", b"a", b"kind", b"cancelled", b"by", b"x", b"v", b"3"),
)


async def test_replies_that_cannot_be_read_are_skipped_each_with_a_line_and_a_count(
    redis_url: str, stages: Stages, no_polling: None
) -> None:
    with capture_logs() as lines:
        async with listening(redis_url, stages) as scene:
            await scene.say(1, tokens(1, "a"))
            ids = [command(redis_url, "XADD", Names().replies(WEB), "*", *words).decode() for words in GARBAGE]
            await scene.say(2, tokens(2, "b"), finished(2))
            assert await heard(scene.listener) == [(1, "a"), (2, "b"), (2, "finished")]
            assert gap_fills(scene.tail) == {}
            assert count_of(scene.tail.measures, UNREADABLE_ENTRIES, "replies") == len(GARBAGE)
    assert [line["id"] for line in lines if line["event"] == "reply_skipped"] == ids
    assert not [line for line in lines if line["event"] == "replies_unreadable"]


async def test_a_key_that_is_no_history_fails_its_client_and_keeps_no_other_waiting(
    redis_url: str, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 0.05)
    spoilt = new_uid()
    command(redis_url, "SET", Names().request(spoilt), "not a history")
    async with listening(redis_url, stages, follows=True) as scene:
        with closing(scene.tail.follow(spoilt)) as unlucky:
            await scene.say(1, tokens(1, "a"), finished(1), frontend=NOBODY)
            assert await heard(scene.listener) == [(1, "a"), (1, "finished")]
            ((_, kind),) = await heard(unlucky)
            assert kind == "failed"


async def test_of_many_silent_histories_few_are_read_at_once_and_all_in_turn(
    redis_url: str, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.listener, "SILENCE_S", 0.02)
    monkeypatch.setattr(web.live.tail, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(web.live.tail, "SILENT_AT_ONCE", 2)
    read, num_read = Tail._read, list[int]()

    async def counted(self: Tail, listeners: Sequence[Listener]) -> None:
        num_read.append(len(listeners))
        await read(self, listeners)

    monkeypatch.setattr(Tail, "_read", counted)
    async with listening(redis_url, stages) as scene:
        uids = [new_uid() for _ in range(6)]
        for uid in uids:
            stages.begin(uid, WEB)
        with ExitStack() as closed:
            listeners = [closed.enter_context(closing(scene.tail.listen(uid))) for uid in uids]
            answers = [asyncio.create_task(heard(listener)) for listener in listeners]
            while sum(num_read) < 30:  # all of them wait
                await asyncio.sleep(0.01)
            for uid in uids:
                await say(stages, uid, 1, tokens(1, "a"), finished(1), frontend=NOBODY)
            assert await asyncio.gather(*answers) == [[(1, "a"), (1, "finished")]] * len(uids)
    assert max(num_read) == 2
