"""Reads the log for all clients of this process: the replies to this frontend, and the histories of requests.

Replies are fast but may be lost; histories are complete. A reply that leaves a gap, a listener whose queue is full, and
one second of silence each lead to the same thing: the tail reads the end of the history, for all such listeners in one
round trip.

    a reply:           n <= last n            a duplicate, dropped
                       n - count == last n    the next one, queued while there is room
                       anything else          a gap: the history after `<last n>-0` fills it
    from a history:    n - count == last n    the next one
                       n - count != last n    a hole: the stream ends, no text may go on over it

A client that opens a request which is already there follows its history from the start instead. One XREAD waits for all
of these histories. Knows nothing of HTTP, and of no submit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import NoReturn, TypeVar

import structlog

from pipeline.errors import LogError
from pipeline.events import TokensProduced
from pipeline.log.entries import say_skipped
from pipeline.log.protocol import Reply
from pipeline.log.redis import AsyncRedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import GAP_FILLS, UNREADABLE_ENTRIES
from pipeline.names import parse_id
from web.live.listener import Listener, State, Wake
from web.wire.uids import drawn_ms

logger = structlog.get_logger()

QUEUE_EVENTS = 256
"""Events kept for one slow client; beyond that it is fed from its history."""
WATCH_EVERY_S = 0.25
"""How often the tail looks for listeners whose client has waited for long."""
REOPEN_S = 20.0
"""How often the life of the replies stream, 60 s, is extended, and what was read of it is dropped."""
BLOCK_MS = 2000
"""How long a read waits for what comes next."""
READ_AT_ONCE = 8
"""Histories in one round trip."""
SILENT_AT_ONCE = 64
"""Silent histories that are read in one round trip, one trip in a turn: they rarely have anything new, and one body can
have a thousand."""
TAKEN_AT_ONCE = 8
"""Events of a history that are taken in before others have a turn of the loop."""
BACKOFF_S = (0.1, 2.0)
"""First and longest pause after an error of the log."""

T = TypeVar("T")


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
        self.frontend = frontend
        """The frontend whose replies are read."""
        self._retention_s = retention_s
        self._room = room
        self.last_token_s = -math.inf
        """When this process last received a token for any client."""
        self._listeners: dict[str, list[Listener]] = {}
        self._stale = asyncio.Event()
        self._followed: dict[str, str] = {}
        self._touched: list[Wake] = []
        self._collects = False
        """Whether `_take` is running: it pushes at its end."""
        self._cursor = ""
        """The id up to which the replies were read; empty: none was read."""
        self._opened_s = 0.0
        self._pause_s = BACKOFF_S[0]
        """Pause after an error, before the replies are read again."""
        self._for_replies = _Wait()
        self._for_histories = _Wait()

    @property
    def has_seen_tokens(self) -> bool:
        return self.last_token_s > -math.inf

    @property
    def listeners(self) -> Sequence[Listener]:
        return tuple(listener for several in self._listeners.values() for listener in several)

    def listen(self, uid: str, *, index: int = 0, wake: Wake | None = None) -> Listener:
        """Return a listener to a request that this frontend submits next: before the submit, so that no reply is
        missed. The caller closes it. For *index* and *wake* see `next_of`."""
        return self._add(Listener(uid, self, room=self._room, index=index, wake=wake))

    def follow(self, uid: str, *, whole: bool = False, index: int = 0, wake: Wake | None = None) -> Listener:
        """Return a listener to a request that is already there, of any frontend, from its start. The caller closes it.

        *whole*: it takes all events, not only those for clients. For *index* and *wake* see `next_of`.
        """
        expires_s = drawn_ms(uid) / 1000 + self._retention_s
        return self._add(
            Listener(uid, self, room=self._room, follows=True, whole=whole, expires_s=expires_s, index=index, wake=wake)
        )

    def rename(self, frontend: str) -> None:
        """Read the replies of *frontend* from now on; the listeners that are there go on with their histories."""
        if frontend == self.frontend:
            return
        self.frontend = frontend
        for listener in self.listeners:
            listener.follow()
        self._for_replies.break_off()

    def loops(self) -> tuple[Coroutine[object, object, NoReturn], ...]:
        """Return the loops that feed the listeners, to be run."""
        return self._follow_replies(), self._follow_histories(), self._watch()

    # as the Feed of listeners

    def look(self) -> None:
        """As Feed.look."""
        self._stale.set()

    def drop(self, listener: Listener) -> None:
        """As Feed.drop."""
        several = self._listeners.get(listener.uid, [])
        if listener in several:
            several.remove(listener)
        if not several:
            self._listeners.pop(listener.uid, None)

    def touch(self, wake: Wake) -> None:
        """As Feed.touch. One turn of the loop does it for all, this one while replies are taken in: a turn is slow."""
        if not self._touched and not self._collects:
            asyncio.get_running_loop().call_soon(self._push)
        self._touched.append(wake)

    def _push(self) -> None:
        touched, self._touched = self._touched, []
        for wake in touched:
            wake.push()

    def count_gap_fill(self, reason: str) -> None:
        """As Feed.count_gap_fill."""
        self.measures.add(GAP_FILLS, reason)

    def _skipped(self, entry_id: str, error: str) -> None:
        """Log and count a reply that cannot be read. Its listener sees a gap."""
        say_skipped(entry_id, error)
        self.measures.add(UNREADABLE_ENTRIES, "replies")

    def _add(self, listener: Listener) -> Listener:
        self._listeners.setdefault(listener.uid, []).append(listener)
        return listener

    async def _follow_replies(self) -> NoReturn:
        """Read the replies; after an error start again at their end and check all histories."""
        frontend, broken = self.frontend, False
        while True:
            self._for_replies.begin()
            if frontend != self.frontend:
                frontend, self._cursor = self.frontend, ""
            try:
                last = await self._log.open_replies(frontend, read=self._cursor)
                self._opened_s = time.monotonic()
                if not self._cursor:
                    self._cursor = last
                    for listener in self.listeners:
                        if broken:
                            listener.fall_behind("unreadable")
                        else:
                            listener.check()
                    broken = False
                reading = self._log.follow_replies(
                    frontend, self._cursor, self._take, block_ms=BLOCK_MS, skipped=self._skipped
                )
                await self._for_replies.run(reading)
            except TimeoutError:  # broken off: there is another name to read for
                continue
            except (LogError, ValueError, KeyError) as error:  # the last two: a reply that does not decode
                logger.warning("replies_unreadable", error=repr(error), again_s=self._pause_s)
                self._cursor, broken = "", True
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, BACKOFF_S[1])

    def _take(self, cursor: str, replies: Sequence[Reply]) -> bool:
        """Take in the replies of one read. Return whether to read on before the stream is opened again."""
        self._cursor, self._pause_s = cursor, BACKOFF_S[0]
        now_s = time.monotonic()
        self._collects = True
        try:
            for reply in replies:
                if type(reply.event) is TokensProduced:
                    self.last_token_s = now_s
                for listener in self._listeners.get(reply.uid, ()):
                    listener.apply_reply(reply)
        finally:
            self._collects = False
            self._push()
        # Without replies, the stream is perhaps gone, and every reply is dropped.
        return bool(replies) and now_s - self._opened_s < REOPEN_S

    async def _follow_histories(self) -> NoReturn:
        """Wait for what comes next in the histories of the listeners that follow them and are up to date."""
        pause_s = BACKOFF_S[0]
        while True:
            self._for_histories.begin()
            self._followed = _cursors(listener for listener in self.listeners if listener.follows_live)
            if not self._followed:
                await self._for_histories.broken_off.wait()
                continue
            try:
                reading = self._log.read_histories(self._followed, block_ms=BLOCK_MS)
                news = await self._for_histories.run(reading)
                pause_s = BACKOFF_S[0]
            except TimeoutError:  # broken off: another listener follows now
                continue
            except LogError as error:
                logger.warning("histories_unreadable", error=str(error), requests=len(self._followed))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_S[1])
                continue
            for uid, entries in news.items():
                first = parse_id(self._followed[uid])
                for listener in self._listeners.get(uid, ()):
                    if listener.follows_live and parse_id(listener.cursor) >= first:
                        listener.apply_history(entries)

    async def _watch(self) -> NoReturn:
        """Read the histories that are due: when a listener asks for it, and four times a second."""
        while True:
            try:
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._stale.wait()
            except TimeoutError:
                pass
            self._stale.clear()
            now_s = time.monotonic()
            for listener in self.listeners:
                listener.wake_if_idle(now_s)
            due = [listener for listener in self.listeners if listener.is_due(now_s)]
            silent = [listener for listener in due if listener.state is State.LIVE]
            due = [listener for listener in due if listener.state is not State.LIVE]
            at_once = READ_AT_ONCE if due else SILENT_AT_ONCE
            due += sorted(silent, key=lambda listener: listener.last_read_s)[:SILENT_AT_ONCE]
            for listener in due:
                listener.begin_read(now_s)
            try:
                while due:
                    await self._read(due[:at_once])
                    del due[:at_once]
            except LogError as error:
                logger.warning("histories_unreadable", error=str(error), requests=len(due))
                await asyncio.sleep(BACKOFF_S[0])
                for listener in due:
                    listener.check()

    async def _read(self, listeners: Sequence[Listener]) -> None:
        histories = await self._log.histories(_cursors(listeners), max_entries=self._room)
        for listener in listeners:
            entries = histories[listener.uid]
            more = entries is not None and len(entries) >= self._room
            while entries is not None and len(entries) > TAKEN_AT_ONCE and listener.state is not State.BEHIND:
                listener.apply_history(entries[:TAKEN_AT_ONCE])
                entries = entries[TAKEN_AT_ONCE:]
                await asyncio.sleep(0)
            if listener.state is not State.BEHIND:  # else there was no room, so it is read again
                listener.apply_history(entries, more=more)
            if listener.follows_live and listener.uid not in self._followed:
                self._for_histories.break_off()


class _Wait:
    """A wait for the log that can be broken off when there is something else to wait for."""

    def __init__(self) -> None:
        self.broken_off = asyncio.Event()
        self._limit: asyncio.Timeout | None = None

    def begin(self) -> None:
        """Forget earlier calls of `break_off`; from now on they count, also before `run`."""
        self.broken_off.clear()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Return what *work* returns. Raises TimeoutError when it is broken off."""
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
    """Return uid -> the id after which there may be events for one of its listeners."""
    cursors: dict[str, str] = {}
    for listener in listeners:
        before = cursors.get(listener.uid)
        if before is None or parse_id(listener.cursor) < parse_id(before):
            cursors[listener.uid] = listener.cursor
    return cursors
