"""What one client still has to receive of one request: in order, without a gap, nothing twice, until its end.

A listener does not read the log. The tail gives it replies and entries of its history, and asks it what to read next.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol, TypeAlias

import structlog

from pipeline.errors import UndecodableEvent
from pipeline.events import Answered, Cancelled, End, Failed, Finished, TokensProduced
from pipeline.log.protocol import Entry, Reply
from pipeline.names import TOKENIZED_ID, parse_id
from pipeline.walk import Moment, walk
from web.wire.frames import ClientEvent

logger = structlog.get_logger()

SILENCE_S = 1.0
"""After this time without an event, a client that waits has its history read."""
COMES_BACK_S = 3.0
"""For so long a client that did not send a request waits for it, if it is lost: its sender may begin it again."""
KEEP_ALIVE_S = 10.0
"""After this time without an event, a client that waits is woken with nothing, so that it can send a keep-alive."""
BEGINNING = "0-0"

PublicEvent: TypeAlias = TokensProduced | End
Push: TypeAlias = Callable[[], bool]
"""Sends what came to the client at once, without waiting. Returns False if the task that waits has to do it."""


class State(Enum):
    """Where the next event of a listener comes from; the table is in `Listener`."""

    NEW = auto()
    NEW_BEHIND = auto()
    LIVE = auto()
    BEHIND = auto()
    READING = auto()
    LOST = auto()
    ENDED = auto()


LIVE: Final = State.LIVE
"""A constant, because it is compared for every token and the lookup of an enum member is slow."""
DEAF: Final = (State.LOST, State.ENDED)
"""In these states, replies are ignored."""


class Feed(Protocol):
    """What feeds listeners: `Tail`."""

    def look(self) -> None:
        """Read the histories that are due now."""
        ...

    def drop(self, listener: Listener) -> None:
        """Forget *listener*."""
        ...

    def touch(self, wake: Wake) -> None:
        """Call `push` of *wake* when all events that came together are taken in."""
        ...

    def count_gap_fill(self, reason: str) -> None:
        """Count by *reason* that a history must supply what the replies did not."""
        ...


class _Told(NamedTuple):
    """What a client has of a request that begins again."""

    n: int
    num_chars: int
    digest: int
    """Of its tokens."""
    position: tuple[int, int]
    """The last event."""


class Listener:
    """A state machine. It takes events in, in any order and any number of times, and hands each out once, in order.

        state        the next event comes from          the tail reads its history
        NEW          a reply                            never: before the submit there may be none
        NEW_BEHIND   its history: a reply may be lost   once the request is submitted
        LIVE         a reply, or, if it follows its     when the client has waited for 1 s
                     history, the read that all share
        BEHIND       its history                        as soon as the queue is empty
        READING      its history                        a read is under way
        LOST         nowhere: there is no history       not until the caller says so
        ENDED        nowhere                            never

        input                    from                      to
        submitted()              NEW                       LIVE
                                 NEW_BEHIND                BEHIND
        check(), apply_reply()   NEW, NEW_BEHIND           NEW_BEHIND
          with a gap or          LIVE, READING, BEHIND     BEHIND
          a full queue
        begin_read()             LIVE, BEHIND              READING
        apply_history()          READING                   LIVE, or BEHIND when there is more than the queue holds
                                 LIVE                      the same
                                 BEHIND                    BEHIND: what was missed during the read is still missing
          without a history      LIVE, READING, BEHIND     LOST
        resume()                 LOST                      LIVE
        give_up(), fail(),       all but ENDED             ENDED
          the end of the request

    A listener that is LOST tells its caller (`next_of`), who submits the request again (`resume`) or ends the stream of
    its client (`give_up`). In LOST and ENDED, replies are ignored.

    A log that comes back with older data may have lost the end of a history, or all of it, and the engine computes the
    same tokens again. `begin_again` takes them in from the first on, and hands out only what the client does not have.
    """

    def __init__(
        self,
        uid: str,
        feed: Feed,
        *,
        room: int,
        follows: bool = False,
        whole: bool = False,
        expires_s: float = math.inf,
        index: int = 0,
        wake: Wake | None = None,
    ) -> None:
        """Begin in BEHIND if it *follows* its history, from the start; else in NEW, before the submit.

        *whole*: it takes all events, not only those for clients. From *expires_s* on, a history that is gone has
        expired. Several listeners that `next_of` waits for share *wake*; *index* is the place of this one among them.
        """
        self.uid = uid
        self.index = index
        self.n = 0
        """Number of the last token that it has taken in."""
        self.state = State.BEHIND if follows else State.NEW
        self.wake = wake or Wake()
        self._feed = feed
        self._follows = follows  # it gets no replies
        self._whole = whole
        self._expires_s = expires_s
        self._position = parse_id(BEGINNING if whole else TOKENIZED_ID)  # never the prompt: it can be large
        self.queued: deque[ClientEvent] = deque()
        """Events that it has not handed out yet."""
        self._room = room
        self._digest = 0
        self._num_chars = 0
        self._told: _Told | None = None
        """What the client has, while the request begins again."""
        self._read_is_old = False
        """Whether a read that is under way began before the request did."""
        self._lost_s = math.inf
        """Time since when there is no history."""
        self.is_slow = False
        """Whether the client did not read fast enough. Then the history may have ended, and expired, long ago."""
        self._client_waits = False
        self.last_read_s = self._last_wake_s = time.monotonic()

    # called by the client

    async def next(self) -> list[ClientEvent]:
        """As `next_of`, for this one alone; a request that is lost ends its stream."""
        events, lost = await next_of((self,))
        if lost:
            self.give_up()
        return [*events, *self.drain()] if lost else events

    async def __aiter__(self) -> AsyncIterator[ClientEvent]:
        while self.queued or not self.ended:
            for event in await self.next():
                yield event

    def submitted(self) -> None:
        """Note that the request is in the log: from now on a missing history is lost."""
        if self.state in (State.NEW, State.NEW_BEHIND):
            self.state = State.LIVE if self.state is State.NEW else State.BEHIND

    def wait(self, waits: bool) -> None:
        """Return whether the client waits for events now."""
        self._client_waits = waits and not self.ended
        if waits and self.state is State.BEHIND:
            self._feed.look()

    def drain(self) -> list[ClientEvent]:
        """Return the events that it has not handed out yet."""
        events = list(self.queued)
        self.queued.clear()
        return events

    def resume(self) -> None:
        """Go on although the history was lost: the caller submits the request again."""
        if self.state is State.LOST:
            self.state, self.last_read_s = State.LIVE, time.monotonic()

    def begin_again(self) -> None:
        """Take in the events from the first on again. If the same tokens do not come, the stream ends."""
        if self.ended:
            return
        if self._told is None:
            self._told = _Told(self.n, self._num_chars, self._digest, self._position)
        self.n = self._num_chars = self._digest = 0
        self._position = parse_id(BEGINNING if self._whole else TOKENIZED_ID)
        self._read_is_old = True

    def give_up(self) -> None:
        """End the stream of this client: the history is lost, or has expired."""
        if time.time() >= self._expires_s:
            self.fail("request_expired", "The request has expired: the log keeps it for some time after its end.", 404)
        else:
            self.fail("log_lost", "The log lost this request: Redis came back without it. Send it again.")

    def fail(self, code: str, message: str, status: int = 500) -> None:
        """End the stream of this client alone, where the log cannot end the request."""
        if not self.ended:
            failed = Failed(n=self.n, status=status, code=code, message=message)
            self._take(ClientEvent("", self.n, failed, self.index))

    def close(self) -> None:
        """Stop listening."""
        self._feed.drop(self)

    # questions

    @property
    def has_begun(self) -> bool:
        """Return whether the client has something of the answer, or will have at once."""
        return self.n > 0 or (self._told is not None and self._told.n > 0)

    @property
    def may_come_back(self) -> bool:
        """Return whether another client, who sent the request, may begin it again soon."""
        return time.monotonic() - self._lost_s < COMES_BACK_S and time.time() < self._expires_s

    @property
    def has_events(self) -> bool:
        return bool(self.queued)

    @property
    def ended(self) -> bool:
        """Return whether the end was taken in."""
        return self.state is State.ENDED

    @property
    def lost(self) -> bool:
        """Return whether the log has no history of the request."""
        return self.state is State.LOST

    @property
    def cursor(self) -> str:
        """The history id after which every event is new."""
        n, k = self._position
        return f"{n}-{k}"

    @property
    def follows_live(self) -> bool:
        """Return whether the shared read of all followed histories feeds it."""
        return self._follows and self.state is State.LIVE

    def is_due(self, now_s: float) -> bool:
        """Return whether its history must be read now."""
        is_silent = self.state is State.LIVE and self._client_waits and now_s - self.last_read_s >= SILENCE_S
        return not self.queued and (is_silent or self.state is State.BEHIND)

    # called by the tail

    def apply_reply(self, reply: Reply) -> None:
        """Take in a reply: the next event, a duplicate, or one after a gap."""
        _, entry_id, n, event = reply
        count = event.count if type(event) is TokensProduced else 0
        if self._follows or self.state in DEAF or (count and n <= self.n):
            return
        if n - count != self.n:
            if n - count < self.n:
                self.begin_again()
            self.fall_behind("gap")
        elif len(self.queued) >= self._room:
            self.is_slow = True
            self.fall_behind("slow_client")
        else:
            self._take(ClientEvent(entry_id, n, event, self.index))

    def fall_behind(self, reason: str) -> None:
        """Do as `check`, and count it by *reason*, a label of GAP_FILLS."""
        if self.state not in (State.BEHIND, State.NEW_BEHIND) and not self._follows:
            self._feed.count_gap_fill(reason)
        self.check()

    def check(self) -> None:
        """Ask for a read of the history once the queue is empty: replies may be lost."""
        match self.state:
            case State.NEW | State.NEW_BEHIND:
                self.state = State.NEW_BEHIND
            case State.LIVE | State.READING | State.BEHIND:
                self.state = State.BEHIND
                if not self.queued:
                    self._feed.look()

    def follow(self) -> None:
        """Take events from the history only: from now on replies go to another frontend."""
        self._follows = True
        self.check()

    def begin_read(self, now_s: float) -> None:
        """Note that the history is being read."""
        assert self.state in (State.LIVE, State.BEHIND)
        self.state, self.last_read_s, self._read_is_old = State.READING, now_s, False

    def apply_history(self, entries: Sequence[Entry] | None, *, more: bool = False) -> None:
        """Take in what the history holds after the cursor, and there may be *more*; None: there is no history."""
        if self._read_is_old:
            self.check()
            return
        if entries is None:
            if not self.ended:
                self.state, self._lost_s = State.LOST, min(self._lost_s, time.monotonic())
                self.wake.set()
            return
        self._lost_s = math.inf
        if self.state is State.READING:
            self.state = State.LIVE
        news = [entry for entry in entries if parse_id(entry.id) > self._position]
        try:
            for moment in walk(news, n=self.n, over_holes=True):
                if self.ended or len(self.queued) >= self._room:
                    break
                event = moment.event
                straddles = type(event) is TokensProduced and moment.n - event.count < self.n
                if straddles or (isinstance(event, Finished) and event.n < self.n):
                    self.begin_again()
                    self.check()
                    return
                self._apply(moment)
        except UndecodableEvent as error:
            logger.error("history_undecodable", uid=self.uid, after=self.cursor, error=str(error))
            self.fail("log_undecodable", "The history of this request cannot be decoded; this is a bug of the server.")
        is_full = len(self.queued) >= self._room
        self.is_slow = is_full or (self.is_slow and more)
        if more or is_full:
            self.check()

    def wake_if_idle(self, now_s: float) -> None:
        """Wake a client that has waited for 10 s, with nothing."""
        if self._client_waits and now_s - self._last_wake_s >= KEEP_ALIVE_S:
            self._last_wake_s = now_s
            self.wake.set()

    def _apply(self, moment: Moment) -> None:
        """Take in one event of the history. After a hole it takes only an end that gives the reason."""
        if moment.missing and not isinstance(moment.event, Failed | Cancelled | Answered):
            logger.error(
                "history_has_a_hole",
                uid=self.uid,
                entry=moment.id,
                missing=f"{moment.missing[0]}..{moment.missing[-1]}",
            )
            self.fail("log_lost", "The log lost tokens of this request; send it again.")
            return
        if self._whole or isinstance(moment.event, PublicEvent):
            self._take(ClientEvent(moment.id, moment.n, moment.event, self.index))
        self._position = parse_id(moment.id)

    def _take(self, event: ClientEvent) -> None:
        if self._told is not None:
            rest = self._rest_of(event, self._told)
            if rest is None:
                self.last_read_s = time.monotonic()
                return
            event = rest
        what = event.event
        self.queued.append(event)
        self.n = event.n
        if event.entry_id:
            self._position = max(self._position, (event.n, 0))
        if type(what) is TokensProduced:
            self._num_chars += len(what.text)
            for token in what.tokens:
                self._digest = hash((self._digest, token))
        elif isinstance(what, End):  # isinstance with a union is slow
            self.state = State.ENDED
        self.last_read_s = self._last_wake_s = time.monotonic()
        self.wake.set(self._feed)

    def _rest_of(self, event: ClientEvent, told: _Told) -> ClientEvent | None:
        """Return what the client does not have of an event of a request that begins again; None: it has all of it.

        How tokens are cut into events may differ, so an event may have some that it has, and some that are new.
        """
        what = event.event
        if type(what) is not TokensProduced:
            if isinstance(what, Finished) and self.n < told.n:
                self._differs(event)
                return None
            is_news = isinstance(what, End) or parse_id(event.entry_id) > told.position
            return event if is_news else None
        num_old = min(told.n - self.n, what.count)
        for token in what.tokens[:num_old]:
            self._digest = hash((self._digest, token))
        if event.n < told.n:
            self._num_chars += len(what.text)
        else:
            num_chars = told.num_chars - self._num_chars
            fits = num_chars == len(what.text) if event.n == told.n else 0 <= num_chars <= len(what.text)
            if self._digest != told.digest or not fits:
                self._differs(event)
                return None
            self._num_chars, self._told = told.num_chars, None
            if event.n > told.n:
                return dataclasses.replace(event, event=_cut(what, num_old, num_chars)) if num_old else event
        self.n = event.n
        if event.entry_id:
            self._position = (event.n, 0)
        return None

    def _differs(self, event: ClientEvent) -> None:
        """End the stream: what was computed again is not what the client has."""
        logger.error("computed_otherwise", uid=self.uid, entry=event.entry_id)
        self._told = None
        self.fail("log_lost", "The log lost tokens of this request, and they cannot be computed again; send it again.")


def _cut(event: TokensProduced, num_tokens: int, num_chars: int) -> TokensProduced:
    """Return what comes after the first tokens of an event, and after so much of its text."""
    tokens = event.tokens[num_tokens:]
    changes: dict[str, object] = {"count": len(tokens), "tokens": tokens, "text": event.text[num_chars:]}
    if event.scores:
        changes["scores"] = event.scores[num_tokens:]
    return event.model_copy(update=changes)


class Wake:
    """Ends the wait of one task: an asyncio.Event for what comes several times for each token. To wake the task of a
    stream takes longer than all else that is done for a token, so a `sink` is asked before."""

    def __init__(self) -> None:
        self.sink: Push | None = None
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self, feed: Feed | None = None) -> None:
        """End the wait, or the next one. With a *feed*, the sink may take what came instead."""
        if self._is_set:
            return
        self._is_set = True
        if self._waiter is None or self._waiter.done():
            return
        if self.sink is None or feed is None:
            self._waiter.set_result(None)
        else:
            feed.touch(self)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        """Wait until it is set, and the sink did not take what came. Raises what the sink raises."""
        if self._is_set:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def push(self) -> None:
        """Let the sink take what came, or end the wait."""
        if self._waiter is None or self.sink is None or self._waiter.done():
            return
        try:
            if self.sink():
                self._is_set = False
            else:
                self._waiter.set_result(None)
        except Exception as error:  # a bug of ours; the task that waits reports it
            self._waiter.set_exception(error)


class News(NamedTuple):
    """What `next_of` returns."""

    events: list[ClientEvent]
    lost: list[Listener]
    """Listeners whose request is no longer in the log: the caller calls `resume` or `give_up` on each."""


async def next_of(listeners: Sequence[Listener]) -> News:
    """Wait until events come for any of *listeners*, which share one `wake`, or a request is lost; return what came, in
    the listeners' order. Nothing is returned when nothing came for 10 s, or after the end of all.

    The first call says that the requests were submitted.
    """
    has_news, have_ended, wake = False, True, listeners[0].wake
    for listener in listeners:
        listener.submitted()
        has_news = has_news or listener.has_events or listener.lost
        have_ended = have_ended and listener.ended
    if not has_news and not have_ended:
        for listener in listeners:
            listener.wait(True)
        try:
            await wake.wait()
        finally:
            for listener in listeners:
                listener.wait(False)
    wake.clear()
    events: list[ClientEvent] = []
    lost: list[Listener] = []
    for listener in listeners:
        events += listener.drain()
        if listener.lost:
            lost.append(listener)
    return News(events, lost)


def live_events(listeners: Sequence[Listener]) -> Sequence[ClientEvent]:
    """Return the events that came for *listeners*; none if a history is to be read, or one has ended or is lost."""
    for listener in listeners:
        if listener.state is not LIVE:
            return ()
    if len(listeners) == 1:
        return listeners[0].queued
    return [event for listener in listeners for event in listener.queued]
