"""The thread between an engine and the log: commits steps, brings new requests and the news of ended ones.

The engine never waits for Redis, but for the commit before last: one step may be on its way while the next is computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from pipeline.errors import Fenced, GroupLost, LogFull, LogUnavailable, UndecodableEvent
from pipeline.events import Admitted, Failed, StepCompleted, Submitted, TakenOver, Tokenized, TokensProduced, decode
from pipeline.log.protocol import DeadLetter, Entry, Inbox, Owner, StreamLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import BURIED, COMMIT_SECONDS, REQUEST_SUCCESS
from pipeline.names import DETOKENIZE, GENERATE, SEAL, parse_id, slot_index, slot_name
from pipeline.process.failpoints import failpoint
from pipeline.slots import acquire_guest
from stages.generate.schedule.schedule import NewRequest

logger = structlog.get_logger()

BLOCK_MS = 500
BACKOFF_S = 0.3
POLL_S = 0.02
LIVE_EVERY_S = 1.0
LISTEN_EVERY_S = 1.0
LOOK_EVERY_S = 0.15
"""Pause between two looks at the slots of other engines. Who is away at two of them in a row is taken over: it may have
given its slot back only to ask for it again.
"""
MOST_STEPS_BEHIND = 256
"""An engine plans no further step while so many wait for the detokenizer."""

MOST_CLAIMED = 500
"""Requests of a dead engine that are claimed at once."""
MOST_DEATHS_ALONE = 3
"""A request that ended its engine so often while nothing else was computed is not tried again."""
TOKENS_IN_DOUBT = 3
"""An engine that dies may have computed two steps that are not in the log (one on its way, one behind it), and dies in
the third: so far must its successor get before it is the better one.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request for the schedule."""

    request: NewRequest
    resumed: bool
    """Another engine, or a former owner of the slot, had it before."""
    suspect: bool = False
    """More than one engine ended with it, and got no further than the one before may have: it is to run alone."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended elsewhere, or never could begin."""

    uid: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Somebody asks for the prefixes that nobody uses to be forgotten."""

    id: str
    """In `control`; the status says it when it is done."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The thread is over: the slot has another owner, or the error is none that time heals."""

    error: Exception


News = Arrived | Ended | Flush | Lost


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    event: StepCompleted
    ended: tuple[str, ...]
    room: int
    done: threading.Event
    """Set once it is committed."""


@dataclass(frozen=True, slots=True)
class _Idle:
    room: int
    heard: int
    """How many news the engine has taken in; where there are more by now, it is not idle any more."""


class LogThread:
    """Owns the engine's connection to the log. *came_round* tells the watchdog that waiting for Redis is progress."""

    def __init__(
        self,
        log: StreamLog,
        owner: Owner,
        *,
        lease_ms: int,
        retention_ms: int,
        came_round: Callable[[], None],
        measures: Measures | None = None,
    ) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._num_told = 0
        self._num_heard = 0
        self._log = log
        self._owner = owner
        self._lease_ms = lease_ms
        self._retention_ms = retention_ms
        self._came_round = came_round
        self._measures = measures or Measures()
        self._inbox = Inbox.tokenized(log.names)
        self._jobs: queue.Queue[_Step | _Idle] = queue.Queue(maxsize=1)
        self._entry_ids: dict[str, str] = {}
        """uid -> entry of `tokenized`, of all that this engine has taken and not ended."""
        self._cursor = self._control_cursor = "0-0"
        self._unsure = False
        self._incarnation = ""
        self._in_doubt = True
        """It is to be looked whether the log is still kept by the same process."""
        self._heard = True
        self._listened_s = float("-inf")
        self._looked_s = time.monotonic()
        self._forsaken: set[str] = set()
        """Engines' slots with requests in hand that nobody held at the last look."""
        self._forsaken_s = time.monotonic()
        self._guest: Owner | None = None
        """As whom this engine looks after the slot of a dead one, whose requests it is about to claim."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log thread", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def commit(
        self, number: int, event: StepCompleted, ended: Sequence[str], room: int, *, settled: bool = False
    ) -> None:
        """Hand over step *number*; *ended* are the uids whose entries it consumes. Waits while one is on its way.

        With *settled* it waits for this one, too.
        """
        job = _Step(number, event, tuple(ended), room, threading.Event())
        self._put(job)
        while settled and self._thread.is_alive() and not job.done.wait(0.5):
            self._came_round()

    def idle(self, room: int) -> None:
        """Say that there is nothing to compute: news are waited for."""
        self._put(_Idle(room, self._num_heard))

    def hear(self, timeout_s: float = 0.0) -> News | None:
        """Return the next news, waiting up to *timeout_s* for it; None when there is none."""
        try:
            news = self._news.get(timeout=timeout_s) if timeout_s else self._news.get_nowait()
        except queue.Empty:
            return None
        self._num_heard += 1
        return news

    def stop(self) -> None:
        """Commit what was handed over, and end the thread."""
        self._stopped.set()
        self._thread.join()

    def _put(self, job: _Step | _Idle) -> None:
        while self._thread.is_alive():
            try:
                self._jobs.put(job, timeout=0.5)
                return
            except queue.Full:
                self._came_round()  # Redis is slow or away; that is no reason to be ended by the watchdog

    def _run(self) -> None:
        try:
            self._keep_trying(lambda: self._log.prepare(self._inbox))
            self._keep_trying(self._adopt)
            while True:
                try:
                    job = self._jobs.get(timeout=0.1)
                except queue.Empty:
                    if self._stopped.is_set():
                        return
                    continue
                self._keep_trying(self._look_after_others)
                if isinstance(job, _Step):
                    newest = self._keep_trying(lambda job=job: self._commit(job))  # type: ignore[misc]  # bound at once
                    job.done.set()
                    if job.room > 0 and (self._unsure or parse_id(newest) > parse_id(self._cursor)):
                        self._keep_trying(lambda job=job: self._take(job.room))  # type: ignore[misc]
                else:
                    self._wait_for_news(job)
        except Exception as error:  # whatever it is, the engine must hear of it
            self._tell(Lost(error))

    def _tell(self, news: News) -> None:
        self._num_told += 1
        self._news.put(news)

    def _keep_trying(self, work: Callable[[], T]) -> T:
        """Do *work*, which is safe to do twice, until Redis lets it.

        Raises:
            Fenced: Redis is another process than before. It may have lost steps and requests that this engine takes for
                said and known, so the engine must begin with what the log has.
        """
        group_lost = False
        while not self._stopped.is_set():
            try:
                if self._in_doubt:
                    self._look_who_keeps_the_log()
                if group_lost:
                    self._log.prepare(self._inbox)
                return work()
            except GroupLost as error:
                group_lost = True
                logger.warning("group_lost", error=str(error))
            except (LogUnavailable, LogFull) as error:
                self._in_doubt = True
                logger.warning("log_unavailable", error=str(error))
            self._came_round()
            self._stopped.wait(BACKOFF_S)
        return work()  # once more: at the end what is in hand is handed over, if Redis is there; else the log has it

    def _look_who_keeps_the_log(self) -> None:
        incarnation = self._log.incarnation()
        if self._incarnation not in ("", incarnation):
            raise Fenced("Redis was started again, or another one took its place")
        self._incarnation, self._in_doubt = incarnation, False

    def _commit(self, job: _Step) -> str:
        """Commit a step; return the id of the newest request that waits for an engine, or was given to one."""
        entry_ids = [self._entry_ids[uid] for uid in job.ended if uid in self._entry_ids]
        began_s = time.perf_counter()
        done = self._log.step(
            self._owner,
            job.number,
            job.event,
            ended=entry_ids,
            control_cursor=self._control_cursor,
            lease_ms=self._lease_ms,
        )
        self._measures.observe(COMMIT_SECONDS, time.perf_counter() - began_s, "step")
        failpoint("generate.after_commit")
        for uid in job.ended:
            self._entry_ids.pop(uid, None)
        self._hear(done.ended, done.flush, done.control_cursor)
        if time.monotonic() - self._looked_s > LIVE_EVERY_S:
            self._look_who_lives()
        behind = done.steps_length
        while behind > MOST_STEPS_BEHIND and not self._stopped.is_set():
            self._came_round()
            self._stopped.wait(POLL_S)
            behind = self._log.backlog(Inbox.steps(self._log.names, self._owner.slot))
        return done.newest

    def _take(self, room: int) -> None:
        if not self._is_heard():
            room = 0
        if self._unsure:  # the reply of the last try was lost, and what it brought is pending
            pending = self._log.pending(self._inbox, self._owner.slot)
            self._bring([entry for entry in pending if entry.fields["uid"] not in self._entry_ids], resumed=None)
        self._unsure = True
        taken = self._log.take(self._owner, room, control_cursor=self._control_cursor)
        if taken.entries:
            failpoint("generate.after_take")
        self._unsure = False
        self._cursor = taken.cursor
        self._bring(taken.entries, resumed=False)
        self._hear(taken.ended, taken.flush, taken.control_cursor)

    def _is_heard(self) -> bool:
        """Say whether there is a detokenizer for this engine's steps; without one it takes nothing new."""
        if time.monotonic() - self._listened_s > LISTEN_EVERY_S:
            slot = slot_name(DETOKENIZE, slot_index(self._owner.slot))
            heard = bool(self._log.lease(slot).holder)
            if self._heard and not heard:
                logger.info("waiting_for", stages=[slot])
            self._heard = heard
            self._listened_s = time.monotonic() if heard else float("-inf")
        return self._heard

    def _wait_for_news(self, job: _Idle) -> None:
        while self._num_told == job.heard and not self._stopped.is_set():
            self._came_round()
            self._keep_trying(lambda: self._take(job.room))
            self._keep_trying(self._look_who_lives)
            self._keep_trying(self._look_after_others)
            if self._num_told == job.heard and (self._guest is not None or not self._heard):
                self._stopped.wait(POLL_S)
            elif self._num_told == job.heard:
                self._keep_trying(lambda: self._log.wait(self._cursor, self._control_cursor, block_ms=BLOCK_MS))

    def _adopt(self) -> None:
        """Go on with what a former owner of the slot had taken: its histories are complete once no step waits."""
        entries = self._log.pending(self._inbox, self._owner.slot)
        while entries and self._log.backlog(Inbox.steps(self._log.names, self._owner.slot)):
            self._came_round()
            if self._stopped.wait(POLL_S):
                return
        if entries:
            logger.info("taken_over", slot=self._owner.slot, requests=len(entries))
            failpoint("generate.mid_takeover")
        self._bring(entries, resumed=True)

    def _look_after_others(self) -> None:
        """Go on with what other engines had in hand whose slots nobody held at two looks.

        First nobody else may write for such a slot, then its last steps must be in the histories, then they are
        claimed.
        """
        if self._guest is None:
            if time.monotonic() - self._forsaken_s < LOOK_EVERY_S:
                return
            self._forsaken_s = time.monotonic()
            before, self._forsaken = self._forsaken, set(self._log.forsaken(self._inbox)) - {self._owner.slot}
            for slot in sorted(self._forsaken & before):
                self._guest = acquire_guest(self._log, slot, self._lease_ms)
                if self._guest is not None:
                    logger.info("guest", slot=slot, epoch=self._guest.epoch)
                    break
        guest = self._guest
        if guest is None or self._log.backlog(Inbox.steps(self._log.names, guest.slot)):
            return
        was_unsure, self._unsure = self._unsure, True  # the reply may be lost, and what it brought be pending here
        entries = self._log.claim_from(self._inbox, self._owner, guest, MOST_CLAIMED)
        if entries:
            logger.info("taken_over", slot=guest.slot, requests=len(entries))
            failpoint("generate.mid_takeover")
        self._bring(entries, resumed=True)
        self._unsure = was_unsure
        if len(entries) < MOST_CLAIMED:
            self._guest = None
            self._log.release(guest)

    def _bring(self, entries: Sequence[Entry], *, resumed: bool | None) -> None:
        """Read the histories of entries and give them to the engine; *resumed* None: they say whether it is."""
        uids = [entry.fields["uid"] for entry in entries]
        histories = self._keep_trying(lambda: self._log.histories(uids))
        for entry, uid, history in zip(entries, uids, histories, strict=True):
            self._entry_ids[uid] = entry.id
            try:
                past = past_of(uid, history)
            except UndecodableEvent as error:
                logger.error("history_undecodable", uid=uid, error=str(error))
                past = None
                message = f"The history of the request does not decode: {error}"
                self._fail(entry, Failed(status=500, code="log_damaged", message=message))
            if past is not None and past.num_alone >= MOST_DEATHS_ALONE:
                deaths = past.num_taken_over + 1
                logger.error("buried", uid=uid, deaths=deaths)
                message = f"The request ended its engine {deaths} times, the last {past.num_alone} times alone."
                failed = Failed(status=500, code="poisonous", message=message)
                self._fail(entry, failed, DeadLetter(GENERATE, entry.fields, deaths, message))
                past = None
            if past is None:
                self._tell(Ended(uid))
            else:
                was_here = past.had_begun if resumed is None else resumed
                self._tell(Arrived(past.request, was_here, was_here and past.num_taken_over > 0))

    def _fail(self, entry: Entry, event: Failed, dead: DeadLetter | None = None) -> None:
        uid, frontend = entry.fields["uid"], entry.fields["frontend"]
        ended = self._keep_trying(
            lambda: self._log.end(uid, event, frontend=frontend, retention_ms=self._retention_ms, dead=dead)
        )
        if ended:
            self._measures.add(REQUEST_SUCCESS, "error")
            if dead is not None:
                self._measures.add(BURIED)

    def _hear(self, uids: Sequence[str], flush: str, cursor: str) -> None:
        self._control_cursor = cursor
        if flush:
            self._tell(Flush(flush))
        for uid in uids:
            if uid in self._entry_ids:
                self._tell(Ended(uid))

    def _look_who_lives(self) -> None:
        """Let go of what is not in `live` any more: `control` may have lost its entry.

        See, too, whether more is pending here than this engine knows: a `take` that was given up, because Redis stood
        still, may have been done when it went on.
        """
        self._looked_s = time.monotonic()
        if self._log.num_pending(self._inbox, self._owner.slot) > len(self._entry_ids):
            self._unsure = True
        uids = list(self._entry_ids)
        gone = set(uids) - self._log.alive(uids)
        for uid in uids:
            if uid in gone:
                self._tell(Ended(uid))


@dataclass(frozen=True, slots=True)
class Past:
    """What the history of a request says to the engine that goes on with it."""

    request: NewRequest
    had_begun: bool
    """An engine has had it."""
    num_taken_over: int
    """How many engines went on with it and ended before they had made TOKENS_IN_DOUBT tokens of it."""
    num_alone: int
    """How many of them computed nothing else."""


def past_of(uid: str, history: Sequence[Entry]) -> Past | None:
    """Fold a history into what an engine needs; None when it has ended or is gone.

    Raises:
        UndecodableEvent: An event does not decode, or tokens are missing between two events.
    """
    if not history or history[-1].id == SEAL:
        return None
    submitted: Submitted | None = None
    tokenized: Tokenized | None = None
    output: list[int] = []
    had_begun = False
    takeovers: list[tuple[int, bool]] = []
    for entry in history:
        match decode(entry.fields):
            case Submitted() as event:
                submitted = event
            case Tokenized() as event:
                tokenized = event
            case TokensProduced() as event:
                if parse_id(entry.id)[0] - event.count != len(output):
                    raise UndecodableEvent(f"after token {len(output)} comes the event {entry.id}")
                output += event.tokens
            case TakenOver() as event:
                had_begun = True
                takeovers.append((len(output), event.alone))
            case Admitted():
                had_begun = True
            case Failed():
                return None
            case _:
                pass
    if submitted is None or tokenized is None:
        return None
    request = NewRequest(
        uid,
        tokenized.token_ids,
        tuple(output),
        submitted.sampling,
        priority=submitted.priority,
        bad_words=tokenized.bad_words,
    )
    in_vain = [alone for n, alone in takeovers if len(output) - n < TOKENS_IN_DOUBT]
    return Past(request, had_begun, len(in_vain), sum(in_vain))
