"""What the log says to the clients of this process: its replies, handed out by uid, and the histories of others.

The replies are a doorbell with payload and may lose entries; the histories are the truth. A reply that does not follow
on the one before, a listener whose queue is full, and one second of silence each lead to the same thing: the end of the
history is read, for all such listeners in one round trip. Knows nothing of HTTP.

    heard: n <= last n                 a duplicate, dropped
           n - count == last n         the next one, queued while there is room
           anything else               a gap: the history after `<last n>-0` brings it
    read:  n - count == last n         the next one
           n - count != last n         a hole in the history: the stream ends, for no text may go on over it

Who comes to a request that is there already, whoever sent it, follows its history from the start instead: one XREAD
waits for all of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import NoReturn, TypeAlias, TypeVar

import structlog

from pipeline.errors import LogError, UndecodableEvent
from pipeline.events import End, Failed, Finished, TokensProduced, decode
from pipeline.log.protocol import Entry, Reply
from pipeline.log.redis import AsyncRedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import GAP_FILLS
from pipeline.names import TOKENIZED_ID, parse_id
from web.wire.client_event import ClientEvent
from web.wire.uids import drawn_ms

logger = structlog.get_logger()

QUEUE_EVENTS = 256
"""Events kept for one slow client; beyond that it is fed from its history."""
SILENCE_S = 1.0
"""After so long without a reply the end of a history is read."""
PATIENCE_S = 10.0
"""After so long a listener is told that there is nothing."""
KEEP_ALIVE_S = 20.0
"""How often the replies stream, which lives for 60 s, is kept alive."""
BLOCK_MS = 2000
"""How long a read waits for what comes next."""
READ_AT_ONCE = 64
"""Histories in one round trip."""
BACKOFF_S = (0.1, 2.0)
"""First and longest pause after an error of the log."""
BEGINNING = "0-0"

T = TypeVar("T")

PublicEvent: TypeAlias = TokensProduced | End


class Listener:
    """What one client has yet to hear of its request: in order, without a gap, nothing twice, until its end."""

    def __init__(
        self,
        uid: str,
        tail: Tail,
        *,
        room: int,
        follows: bool = False,
        whole: bool = False,
        expires_s: float = math.inf,
        index: int = 0,
        wake: asyncio.Event | None = None,
    ) -> None:
        """*index* of several that `next_of` listens to at once, who share the event *wake*."""
        self.uid = uid
        self.index = index
        self.n = 0
        """Number of the last token that was handed in."""
        self.ended = False
        """The end was handed in."""
        self.follows = follows
        """It is fed from the history alone, not from replies."""
        self.submit_again: Callable[[], None] | None = None
        """What to do about a history that Redis lost before its first token: none of it was said to anybody."""
        self._whole = whole  # hears every event, not only those that are for clients
        self._expires_s = expires_s  # from this moment on, a history that is gone has expired
        self._position = parse_id(BEGINNING if whole else TOKENIZED_ID)  # never the prompt: it can be large
        self._queue: deque[ClientEvent] = deque()
        self._room = room
        self._tail = tail
        self.wake = wake or asyncio.Event()
        self._armed = False
        self._waiting = False
        self._behind = follows
        self._checked_s = self._comforted_s = time.monotonic()

    async def next(self) -> list[ClientEvent]:
        """Wait and return all that came; an empty list when nothing came for 10 s, or after the end.

        The first call says that the request was submitted: only then can its history be missed.
        """
        return await next_of((self,))

    def arm(self) -> None:
        """Say that the request was submitted."""
        self._armed = True

    def wait(self, waiting: bool) -> None:
        """Say whether its client waits for news now; if so, and it is behind, have its history read."""
        self._waiting = waiting and not self.ended
        if self._waiting and self._behind:
            self._tail.look()

    @property
    def has_news(self) -> bool:
        return bool(self._queue)

    def drain(self) -> list[ClientEvent]:
        """Return what has come and was not returned yet."""
        heard = list(self._queue)
        self._queue.clear()
        return heard

    async def __aiter__(self) -> AsyncIterator[ClientEvent]:
        while self._queue or not self.ended:
            for heard in await self.next():
                yield heard

    def close(self) -> None:
        """Listen no longer."""
        self._tail.drop(self)

    def follow(self) -> None:
        """Go on with the history: the replies are said to somebody else from now on."""
        self.follows = True
        self.check()

    def hear(self, reply: Reply) -> None:
        """Take a reply of the doorbell."""
        count = reply.event.count if isinstance(reply.event, TokensProduced) else 0
        if self.ended or self.follows or (count and reply.n <= self.n):
            return
        if reply.n - count != self.n:
            self.fall_behind("gap")
        elif len(self._queue) >= self._room:
            self.fall_behind("slow_client")
        else:
            self._take(ClientEvent(reply.entry_id, reply.n, reply.event, self.index))

    def fall_behind(self, reason: str) -> None:
        """As `check`, for a *reason* of GAP_FILLS: what was said was not heard, or there was no room for it."""
        if not self._behind and not self.follows:
            self._tail.measures.add(GAP_FILLS, reason)
        self.check()

    def check(self) -> None:
        """Have the end of the history read, once there is room for it."""
        self._behind = True
        if self._armed and not self._queue:
            self._tail.look()

    def is_due(self, now_s: float) -> bool:
        """Say whether the history is to be read now; if so, it counts as read."""
        silent = self._waiting and now_s - self._checked_s >= SILENCE_S
        if self.ended or not self._armed or self._queue or not (self._behind or silent):
            return False
        self._behind = False  # before the read: what comes during it and does not follow sets it again
        self._checked_s = now_s
        return True

    @property
    def is_up_to_date(self) -> bool:
        """Say whether it follows its history and has room for what comes next in it."""
        return self.follows and self._armed and not (self.ended or self._behind)

    def comfort(self, now_s: float) -> None:
        """Wake who has waited for long, with nothing."""
        if self._waiting and now_s - self._comforted_s >= PATIENCE_S:
            self._comforted_s = now_s
            self.wake.set()

    @property
    def cursor(self) -> str:
        """The history id after which everything is news."""
        n, k = self._position
        return f"{n}-{k}"

    def read(self, history: Sequence[Entry] | None, *, more: bool = False) -> None:
        """Take what the history holds after the cursor, of which there may be *more*; None: there is no history."""
        if history is None:
            self._miss()
            return
        for entry in history:
            position = parse_id(entry.id)
            if self.ended or position <= self._position:
                continue
            if len(self._queue) >= self._room:
                break
            if not self._read_one(entry):
                return
            self._position = position
        if more or len(self._queue) >= self._room:
            self.check()

    def _read_one(self, entry: Entry) -> bool:
        """Take one entry of the history; False when the stream ends with it in an error."""
        try:
            event = decode(entry.fields)
        except UndecodableEvent as error:
            logger.error("history_undecodable", uid=self.uid, entry=entry.id, error=str(error))
            self.fail("log_undecodable", "The history of this request does not read; that is our bug.")
            return False
        n = self.n
        if isinstance(event, TokensProduced | Finished):
            count = event.count if isinstance(event, TokensProduced) else 0
            n = event.n if isinstance(event, Finished) else parse_id(entry.id)[0]
            if n - count != self.n:
                logger.error("history_has_a_hole", uid=self.uid, entry=entry.id, last_n=self.n, count=count)
                self.fail("log_lost", "The log lost tokens of this request; send it again.")
                return False
        if self._whole or isinstance(event, PublicEvent):
            self._take(ClientEvent(entry.id, n, event, self.index))
        return True

    def _miss(self) -> None:
        if self.submit_again is not None and self.n == 0:
            self.submit_again()
        elif time.time() >= self._expires_s:
            self.fail("request_expired", "The log keeps a request for some time after its end; that is over.", 404)
        else:
            self.fail("log_lost", "The log lost this request: Redis came back without it. Send it again.")

    def fail(self, code: str, message: str, status: int = 500) -> None:
        """End the stream of this client alone, where the log cannot."""
        if not self.ended:
            failed = Failed(n=self.n, status=status, code=code, message=message)
            self._take(ClientEvent("", self.n, failed, self.index))

    def _take(self, heard: ClientEvent) -> None:
        self._queue.append(heard)
        self.n = heard.n
        if heard.entry_id:
            self._position = max(self._position, (heard.n, 0))
        self.ended = isinstance(heard.event, End)
        self._checked_s = self._comforted_s = time.monotonic()
        self.wake.set()


async def next_of(listeners: Sequence[Listener]) -> list[ClientEvent]:
    """As Listener.next, for several that share one `wake`: what came for any of them, in their order."""
    for listener in listeners:
        listener.arm()
    if not any(listener.has_news for listener in listeners) and not all(listener.ended for listener in listeners):
        for listener in listeners:
            listener.wait(True)
        try:
            await listeners[0].wake.wait()
        finally:
            for listener in listeners:
                listener.wait(False)
    listeners[0].wake.clear()
    return [heard for listener in listeners for heard in listener.drain()]


class Tail:
    """All listeners of one process, and the loops that feed them."""

    def __init__(
        self,
        log: AsyncRedisLog,
        frontend: str,
        *,
        retention_s: float = math.inf,
        room: int = QUEUE_EVENTS,
        measures: Measures | None = None,
    ) -> None:
        self._log = log
        self.measures = measures or Measures()
        self._frontend = frontend
        self._retention_s = retention_s
        self._room = room
        self.heard_tokens_s = -math.inf
        """When a token last came through every stage while this process listened, whoever it was for."""
        self._listeners: dict[str, list[Listener]] = {}
        self._stale = asyncio.Event()
        self._followed: dict[str, str] = {}
        self._for_replies = _Wait()
        self._for_histories = _Wait()

    @property
    def heard_tokens(self) -> bool:
        """Say whether there ever was one."""
        return self.heard_tokens_s > -math.inf

    @property
    def frontend(self) -> str:
        """Whose replies are read."""
        return self._frontend

    def rename(self, frontend: str) -> None:
        """Read the replies of *frontend* from now on; who listens already goes on with its history."""
        if frontend == self._frontend:
            return
        self._frontend = frontend
        for listener in self.listeners:
            listener.follow()
        self._for_replies.break_off()

    def listen(self, uid: str, *, index: int = 0, wake: asyncio.Event | None = None) -> Listener:
        """Return a listener to what is said to this frontend, to be closed; ask for it before the submit, so that no
        reply is missed. For *index* and *wake* see `next_of`."""
        return self._add(Listener(uid, self, room=self._room, index=index, wake=wake))

    def follow(self, uid: str, *, whole: bool = False, index: int = 0, wake: asyncio.Event | None = None) -> Listener:
        """Return a listener to the history of a request that is there, whoever's it is, from its start; to be closed.

        *whole*: it hears all events, also those that are not for clients. For *index* and *wake* see `next_of`.
        """
        expires_s = drawn_ms(uid) / 1000 + self._retention_s
        listener = Listener(
            uid,
            self,
            room=self._room,
            follows=True,
            whole=whole,
            expires_s=expires_s,
            index=index,
            wake=wake,
        )
        return self._add(listener)

    @property
    def listeners(self) -> Sequence[Listener]:
        return tuple(listener for several in self._listeners.values() for listener in several)

    def listens_to(self, uid: str) -> bool:
        """Say whether anybody here does."""
        return uid in self._listeners

    def loops(self) -> tuple[Coroutine[object, object, NoReturn], ...]:
        """Return the loops that feed the listeners, to be run."""
        return self._follow_replies(), self._follow_histories(), self._watch()

    def look(self) -> None:
        """Have the histories of those who are behind read now."""
        self._stale.set()

    def drop(self, listener: Listener) -> None:
        """Forget *listener*."""
        several = self._listeners.get(listener.uid, [])
        if listener in several:
            several.remove(listener)
        if not several:
            self._listeners.pop(listener.uid, None)

    def _add(self, listener: Listener) -> Listener:
        self._listeners.setdefault(listener.uid, []).append(listener)
        return listener

    async def _follow_replies(self) -> NoReturn:
        """Read the replies; after an error start again at their end and check all histories."""
        pause_s = BACKOFF_S[0]
        frontend, cursor, opened_s, broken = self._frontend, "", 0.0, False
        while True:
            self._for_replies.begin()
            if frontend != self._frontend:
                frontend, cursor = self._frontend, ""
            try:
                if not cursor or time.monotonic() - opened_s > KEEP_ALIVE_S:
                    last = await self._log.open_replies(frontend)
                    opened_s = time.monotonic()
                    if not cursor:
                        cursor = last
                        for listener in self.listeners:
                            if broken:
                                listener.fall_behind("unreadable")
                            else:
                                listener.check()
                        broken = False
                reading = self._log.read_replies(frontend, cursor, block_ms=BLOCK_MS)
                cursor, replies = await self._for_replies.run(reading)
                pause_s = BACKOFF_S[0]
            except TimeoutError:  # there is another name to read for
                continue
            except (LogError, ValueError, KeyError) as error:  # the last two: a reply that does not decode
                logger.warning("replies_unreadable", error=repr(error), again_s=pause_s)
                cursor, broken = "", True
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_S[1])
                continue
            if not replies:
                opened_s = 0.0  # perhaps the stream is gone: nobody could say anything
            for reply in replies:
                if isinstance(reply.event, TokensProduced):
                    self.heard_tokens_s = time.monotonic()
                for listener in self._listeners.get(reply.uid, ()):
                    listener.hear(reply)

    async def _follow_histories(self) -> NoReturn:
        """Wait for what comes next in the histories that are followed by who is up to date with them."""
        pause_s = BACKOFF_S[0]
        while True:
            self._for_histories.begin()
            self._followed = _cursors(listener for listener in self.listeners if listener.is_up_to_date)
            if not self._followed:
                await self._for_histories.broken_off.wait()
                continue
            try:
                reading = self._log.read_histories(self._followed, block_ms=BLOCK_MS)
                news = await self._for_histories.run(reading)
                pause_s = BACKOFF_S[0]
            except TimeoutError:  # somebody else follows now
                continue
            except LogError as error:
                logger.warning("histories_unreadable", error=str(error), requests=len(self._followed))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_S[1])
                continue
            for uid, entries in news.items():
                first = parse_id(self._followed[uid])
                for listener in self._listeners.get(uid, ()):
                    if listener.is_up_to_date and parse_id(listener.cursor) >= first:
                        listener.read(entries)

    async def _watch(self) -> NoReturn:
        """Read the histories of those who are behind or were silent, as soon as one says so and four times a second."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S / 4):
                    await self._stale.wait()
            except TimeoutError:
                pass
            self._stale.clear()
            now_s = time.monotonic()
            for listener in self.listeners:
                listener.comfort(now_s)
            due = [listener for listener in self.listeners if listener.is_due(now_s)]
            try:
                while due:
                    await self._read(due[:READ_AT_ONCE])
                    del due[:READ_AT_ONCE]
            except LogError as error:
                logger.warning("histories_unreadable", error=str(error), requests=len(due))
                await asyncio.sleep(BACKOFF_S[0])
                for listener in due:
                    listener.check()

    async def _read(self, listeners: Sequence[Listener]) -> None:
        cursors = _cursors(listeners)
        histories = await self._log.histories(cursors, max_entries=self._room)
        for listener in listeners:
            entries = histories[listener.uid]
            listener.read(entries, more=entries is not None and len(entries) >= self._room)
            if listener.is_up_to_date and listener.uid not in self._followed:
                self._for_histories.break_off()


class _Wait:
    """Waiting for the log, which is broken off when there is something else to wait for."""

    def __init__(self) -> None:
        self.broken_off = asyncio.Event()
        self._limit: asyncio.Timeout | None = None

    def begin(self) -> None:
        """From now on it counts that it is broken off, also before it has begun."""
        self.broken_off.clear()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Return what *work* brings. Raises TimeoutError when it is broken off."""
        if self.broken_off.is_set():
            work.close()
            raise TimeoutError
        try:
            async with asyncio.timeout(None) as self._limit:
                return await work
        finally:
            self._limit = None

    def break_off(self) -> None:
        """End the wait."""
        self.broken_off.set()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0)


def _cursors(listeners: Iterable[Listener]) -> dict[str, str]:
    """Return uid -> the id after which there is news for one of its listeners."""
    cursors: dict[str, str] = {}
    for listener in listeners:
        before = cursors.get(listener.uid)
        if before is None or parse_id(listener.cursor) < parse_id(before):
            cursors[listener.uid] = listener.cursor
    return cursors
