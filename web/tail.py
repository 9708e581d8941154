"""What the log says to the clients of this process: one task reads its replies and hands them out by uid.

The replies are a doorbell with payload and may lose entries; the histories are the truth. A reply that does not follow
on the one before, a listener whose queue is full, and one second of silence each lead to the same thing: the end of the
history is read, for all such listeners in one round trip. Knows nothing of HTTP.

    heard: n <= last n                 a duplicate, dropped
           n - count == last n         the next one, queued while there is room
           anything else               a gap: the history after `<last n>-0` brings it
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import NoReturn, TypeAlias

import structlog

from pipeline.errors import LogError, UndecodableEvent
from pipeline.events import Cancelled, Failed, Finished, TokensProduced, decode
from pipeline.log import Entry, Reply
from pipeline.names import SEAL, TOKENIZED_ID, tokens_id
from pipeline.redis_log import AsyncRedisLog

logger = structlog.get_logger()

QUEUE_EVENTS = 256
"""Events kept for one slow client; beyond that it is fed from its history."""
SILENCE_S = 1.0
"""After so long without a reply the end of a history is read."""
PATIENCE_S = 10.0
"""After so long a listener is told that there is nothing."""
KEEP_ALIVE_S = 20.0
"""How often the replies stream, which lives for 60 s, is kept alive."""
READ_AT_ONCE = 64
"""Histories in one round trip."""
BACKOFF_S = (0.1, 2.0)
"""First and longest pause after an error of the log."""

ClientEvent: TypeAlias = TokensProduced | Finished | Failed | Cancelled


class Listener:
    """What one client has yet to hear of its request: in order, without a gap, nothing twice, until its end."""

    def __init__(self, uid: str, room: int, stale: Callable[[], None], forget: Callable[[str], None]) -> None:
        self.uid = uid
        self.n = 0
        """Number of the last token that was handed in."""
        self.ended = False
        """The end was handed in."""
        self._queue: deque[Reply] = deque()
        self._room = room
        self._stale = stale
        self._forget = forget
        self._wake = asyncio.Event()
        self._armed = False
        self._waiting = False
        self._behind = False
        self._checked_s = self._comforted_s = time.monotonic()

    async def next(self) -> list[Reply]:
        """Wait and return all that came; an empty list when nothing came for 10 s, or after the end.

        The first call says that the request was submitted: only then can its history be missed.
        """
        self._armed = True
        if not self._queue and not self.ended:
            if self._behind:
                self._stale()
            self._waiting = True
            try:
                await self._wake.wait()
            finally:
                self._waiting = False
        self._wake.clear()
        replies = list(self._queue)
        self._queue.clear()
        return replies

    async def __aiter__(self) -> AsyncIterator[Reply]:
        while self._queue or not self.ended:
            for reply in await self.next():
                yield reply

    def close(self) -> None:
        """Listen no longer."""
        self._forget(self.uid)

    def hear(self, reply: Reply) -> None:
        """Take a reply of the doorbell."""
        count = reply.event.count if isinstance(reply.event, TokensProduced) else 0
        if self.ended or (count and reply.n <= self.n):
            return
        if reply.n - count != self.n or len(self._queue) >= self._room:
            self.check()
        else:
            self._take(reply)

    def check(self) -> None:
        """Have the end of the history read, once there is room for it."""
        self._behind = True
        if self._armed and not self._queue:
            self._stale()

    def is_due(self, now_s: float) -> bool:
        """Say whether the history is to be read now; if so, it counts as read."""
        silent = self._waiting and now_s - self._checked_s >= SILENCE_S
        if self.ended or not self._armed or self._queue or not (self._behind or silent):
            return False
        self._behind = False  # before the read: what comes during it and does not follow sets it again
        self._checked_s = now_s
        return True

    def comfort(self, now_s: float) -> None:
        """Wake who has waited for long, with nothing."""
        if self._waiting and now_s - self._comforted_s >= PATIENCE_S:
            self._comforted_s = now_s
            self._wake.set()

    @property
    def cursor(self) -> str:
        """The history id after which everything is news; never the prompt, which can be large."""
        return tokens_id(self.n) if self.n else TOKENIZED_ID

    def read(self, history: Sequence[Entry] | None) -> None:
        """Take what the history holds after the cursor; None: there is no history."""
        if history is None:
            self.fail("log_lost", "The log lost this request: Redis came back without it. Send it again.")
            return
        for entry in history:
            try:
                event = decode(entry.fields)
            except UndecodableEvent as error:
                logger.error("history_undecodable", uid=self.uid, entry=entry.id, error=str(error))
                self.fail("log_undecodable", "The history of this request does not read; that is our bug.")
                return
            if not isinstance(event, ClientEvent):
                continue
            n = int(entry.id.partition("-")[0]) if isinstance(event, TokensProduced) else event.n
            if self.ended or (isinstance(event, TokensProduced) and n <= self.n):
                continue
            if len(self._queue) >= self._room:
                self._behind = True
                return
            self._take(Reply(self.uid, entry.id, n, event))

    def fail(self, code: str, message: str, status: int = 500) -> None:
        """End the stream of this client alone, where the log cannot."""
        if not self.ended:
            self._take(Reply(self.uid, SEAL, self.n, Failed(n=self.n, status=status, code=code, message=message)))

    def _take(self, reply: Reply) -> None:
        self._queue.append(reply)
        self.n = reply.n
        self.ended = not isinstance(reply.event, TokensProduced)
        self._checked_s = self._comforted_s = time.monotonic()
        self._wake.set()


class Tail:
    """All listeners of one frontend, and the two loops that feed them."""

    def __init__(self, log: AsyncRedisLog, frontend: str, *, room: int = QUEUE_EVENTS) -> None:
        self._log = log
        self._frontend = frontend
        self._room = room
        self._listeners: dict[str, Listener] = {}
        self._stale = asyncio.Event()

    def listen(self, uid: str) -> Listener:
        """Return a listener, to be closed; ask for it before the submit, so that no reply is missed."""
        listener = self._listeners[uid] = Listener(uid, self._room, self._stale.set, self._drop)
        return listener

    @property
    def listeners(self) -> Sequence[Listener]:
        return tuple(self._listeners.values())

    def loops(self) -> tuple[Coroutine[object, object, NoReturn], ...]:
        """Return the two loops that feed the listeners, to be run."""
        return self._follow(), self._watch()

    def _drop(self, uid: str) -> None:
        self._listeners.pop(uid, None)

    async def _follow(self) -> NoReturn:
        """Read the replies; after an error start again at their end and check all histories."""
        pause_s = BACKOFF_S[0]
        cursor, opened_s = "", 0.0
        while True:
            try:
                if not cursor or time.monotonic() - opened_s > KEEP_ALIVE_S:
                    last = await self._log.open_replies(self._frontend)
                    opened_s = time.monotonic()
                    if not cursor:
                        cursor = last
                        for listener in self.listeners:
                            listener.check()
                cursor, replies = await self._log.read_replies(self._frontend, cursor, block_ms=2000)
                pause_s = BACKOFF_S[0]
            except (LogError, ValueError, KeyError) as error:  # the last two: a reply that does not decode
                logger.warning("replies_unreadable", error=repr(error), again_s=pause_s)
                cursor = ""
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_S[1])
                continue
            if not replies:
                opened_s = 0.0  # perhaps the stream is gone: nobody could say anything
            for reply in replies:
                if reply.uid in self._listeners:
                    self._listeners[reply.uid].hear(reply)

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
        histories = await self._log.histories({listener.uid: listener.cursor for listener in listeners})
        for listener in listeners:
            listener.read(histories[listener.uid])
