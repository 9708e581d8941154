"""The thread between an engine and the log: commits steps, brings new requests, reports which requests ended elsewhere.

The engine computes the next step while others are being committed. `outbox.py` decides which, and how many.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import structlog

from pipeline.errors import Fenced, GroupLost, LogFull, LogUnavailable, UndecodableEvent
from pipeline.events import Failed, StepCompleted
from pipeline.log.config import DEFAULT_STEAL_AFTER_S
from pipeline.log.entries import request_of
from pipeline.log.protocol import DeadLetter, Entry, Inbox, Owner
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import BURIED, COMMIT_SECONDS, REQUEST_SUCCESS
from pipeline.names import DETOKENIZE, GENERATE, parse_id, slot_index, slot_name
from pipeline.process.failpoints import failpoint
from pipeline.serving import Serving
from pipeline.stage.slots import acquire_guest
from pipeline.stage.unreadable import UnreadableEntries, uids_of
from stages.generate.loop.outbox import Group, Idle, Outbox, PendingStep
from stages.generate.loop.past import Past, past_of
from stages.generate.loop.updates import Arrived as Arrived
from stages.generate.loop.updates import Ended as Ended
from stages.generate.loop.updates import Flush as Flush
from stages.generate.loop.updates import Lost as Lost
from stages.generate.loop.updates import Room
from stages.generate.loop.updates import Update as Update


class LogClock:
    """An estimate of Redis' clock, from the first commit on. It costs no call to Redis.

    Each reply to a commit has the time when Redis executed it. That was between request and reply, which bounds how far
    Redis' clock is ahead of the engine's. Many bounds together are narrow, even if single commits take long.
    """

    def __init__(self) -> None:
        self._ahead_ms: float | None = None

    def learn(self, sent_s: float, came_s: float, ms: int) -> None:
        """Learn that Redis executed a commit at *ms*, between *sent_s* and *came_s* of the engine's clock."""
        least, most = ms - came_s * 1000, ms + 1 - sent_s * 1000
        ahead = most if self._ahead_ms is None else self._ahead_ms
        self._ahead_ms = min(max(ahead, least), most)

    def at(self, s: float) -> int:
        """Return the time of Redis' clock, in ms, when the engine's shows *s*; 0: unknown."""
        return 0 if self._ahead_ms is None else int(s * 1000 + self._ahead_ms)


logger = structlog.get_logger()

BLOCK_MS = 500
BACKOFF_S = 0.3
POLL_S = 0.02
TAKE_EVERY_S = 0.05
"""Pause between two looks for new requests while a long step is computed: the next step has them."""
LIVE_EVERY_S = 1.0
LISTEN_EVERY_S = 1.0
LOOK_EVERY_S = 0.15
"""Pause between two looks at the slots of other engines. An engine is taken over when its slot is free at two looks in
a row: at a single look it may be about to take its slot again.
"""
MOST_STEPS_BEHIND = 256
"""The engine plans no further step while more than this many wait for the detokenizer."""
MOST_CLAIMED = 500
"""Number of requests of a dead engine that are claimed at once."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Watching:
    """This engine holds only its own slot."""

    away: frozenset[str] = frozenset()
    """Slots with unfinished requests that no engine held at the last look."""


@dataclass(frozen=True, slots=True)
class _Guest:
    """This engine holds the slot of a dead one too, to claim its requests."""

    owner: Owner
    """Owner under which this engine holds that slot."""
    away: frozenset[str]
    """See `_Watching.away`."""


class LogThread:
    """Owns the engine's connection to the log.

    *report_progress* tells the watchdog that waiting for the log is progress. Only the engine's loop calls it, where it
    waits for this thread: what this thread does by itself says nothing about a forward pass.

    It first adopts what the former owner of its slot had in hand, then serves the engine's loop. Beside that it is in
    one state of each of these four machines. No transition depends on the state of another machine.

    The takeover of another engine (`_takeover`). From the guest's lease on, the dead engine cannot write. Only when its
    last steps are in the histories are its requests claimed.

        state     event                                                      next
        Watching  a look, LOOK_EVERY_S after the last: no slot was away      Watching
                  twice, or another process got the leases of those
                  a look: a slot was away twice, and its lease is ours now   Guest
        Guest     steps of that slot wait for their detokenizer              Guest
                  MOST_CLAIMED requests were claimed: there may be more      Guest
                  fewer were claimed: the lease is given back                Watching

    What the log delivered to this slot (`_deliveries`). While it is unseen, a `take` reads the pending entries first.

        seen      a take or a claim is on its way: its reply may be lost     unseen
                  more entries are pending here than this thread knows       unseen
        unseen    the reply of a take has come                               seen
                  the reply of a claim has come, and the state was seen      seen

    Whether Redis is the process that it was (`_redis`). Another one may have lost steps and requests, so the engine
    must begin again with what the log has.

        unchecked it is the same process, or the first one                   same
                  it is another process                                      (the thread ends: Fenced)
        same      a call failed: LogUnavailable, LogFull                     unchecked

    Whether this engine has a detokenizer (`_detokenizer`). Without one it takes nothing new. The state is looked up
    before each take, but after `present` only every LISTEN_EVERY_S.

        unknown   its slot is held | free                                    present | absent
        present   its slot is held | free                                    present | absent
        absent    its slot is held | free                                    present | absent
    """

    def __init__(
        self,
        log: RedisLog,
        owner: Owner,
        *,
        lease_ms: int,
        report_progress: Callable[[], None],
        measures: Measures | None = None,
        serving: Serving | None = None,
        commit_interval_s: float = 0.0,
        steal_after_s: float = DEFAULT_STEAL_AFTER_S,
    ) -> None:
        """Work for the engine of *owner*. A request fails if its tokens so far were not made with *serving*.

        *commit_interval_s*: longest time that a step waits for the next ones, to be committed together.
        *steal_after_s*: see `take`.
        """
        self._steal_after_s = steal_after_s
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._told_room = Room(), 0
        """The last room that the engine has told, and the number of updates that it had read then."""
        self._looked_for: tuple[str, tuple[str, ...]] = "", ()
        """The last request when `take` brought nothing, and the owners that had to wait."""
        self._left_s = -math.inf
        """Time when `take` last left requests to the engines that they prefer, and nothing was taken .."""
        self._left_newest = ""
        """.. and the last request then."""
        self._is_full = False
        """Whether the other engines were told that there is no room."""
        self._num_sent = 0
        self._num_read = 0
        self._log = log
        self._owner = owner
        self._lease_ms = lease_ms
        self._report_progress = report_progress
        self._measures = measures or Measures()
        self._serving = serving or Serving()
        self._inbox = Inbox.tokenized(log.names)
        self._unreadable = UnreadableEntries(log, self._inbox, self._measures, owner)
        self._outbox = Outbox(commit_interval_s)
        self._clock = LogClock()
        self._entry_ids: dict[str, str] = {}
        """uid -> entry of `tokenized`, for each request that this engine has in hand."""
        self._prompt_ids: tuple[int, ...] = ()
        """Prompt of the last request that came. Requests with the same prompt share the object."""
        self._cursor = self._control_cursor = "0-0"
        self._takeover: _Watching | _Guest = _Watching()
        self._watched_s = time.monotonic()
        self._deliveries: Literal["seen", "unseen"] = "seen"
        self._redis: Literal["unchecked", "same"] = "unchecked"
        self._incarnation = ""
        """Incarnation of Redis at the first check."""
        self._detokenizer: Literal["unknown", "present", "absent"] = "unknown"
        self._listened_s = 0.0
        """Time when the detokenizer was last found present."""
        self._live_s = time.monotonic()
        """Time when `live` was last read."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log thread", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def commit(
        self, number: int, event: StepCompleted, ended: Sequence[str], room: Room, *, settled: bool = False
    ) -> None:
        """As EngineLink."""
        made_s, self._told_room = time.monotonic(), (room, self._num_read)
        places = self._outbox.places_for(event)
        for _ in range(places):
            while not self._outbox.has_place(0.5 if self._thread.is_alive() else 0.0):  # several steps may be left
                if not self._thread.is_alive():
                    return
                self._report_progress()  # Redis is slow or away: no reason for the watchdog to end the process
        group = self._outbox.put(PendingStep(number, event, tuple(ended), made_s, places), at_once=settled)
        while settled and self._thread.is_alive() and not group.committed.wait(0.5):
            self._report_progress()

    def close(self) -> None:
        """As EngineLink."""
        self._outbox.close()

    def idle(self, room: Room) -> None:
        """As EngineLink: the thread waits for an update."""
        self._say_idle(Idle(room, self._num_read, brief=False))

    def look(self, room: Room) -> None:
        """As EngineLink: the thread looks once for an update."""
        self._say_idle(Idle(room, self._num_read, brief=True))

    def next_update(self, timeout_s: float = 0.0) -> Update | None:
        """As EngineLink."""
        if not timeout_s and self._updates.empty():
            return None  # as after nearly every step
        try:
            update = self._updates.get(timeout=timeout_s) if timeout_s else self._updates.get_nowait()
        except queue.Empty:
            return None
        self._num_read += 1
        return update

    def stop(self) -> None:
        """Commit the steps that are queued, and end the thread."""
        self._report_progress()
        self._outbox.close()
        self._stopped.set()
        self._thread.join()

    def _say_idle(self, idle: Idle) -> None:
        while self._thread.is_alive() and not self._outbox.idle(idle, 0.5):
            self._report_progress()

    def _run(self) -> None:
        try:
            self._keep_trying(lambda: self._log.prepare(self._inbox))
            self._keep_trying(self._adopt)
            while True:
                job = self._outbox.take(TAKE_EVERY_S)
                if job is None:
                    if self._stopped.is_set():
                        return
                    self._take_what_fits()
                    continue
                if isinstance(job, Idle):
                    self._wait_for_update(job)
                else:
                    self._pass(*job)
                self._keep_trying(self._advance_takeover)  # after the steps, for which clients wait
        except Exception as error:  # whatever it is, the engine must learn of it
            self._tell(Lost(error))

    def _pass(self, groups: Sequence[Group], steps: Sequence[PendingStep]) -> None:
        """Commit steps, wait until the detokenizer is not too far behind, and take what came meanwhile."""
        newest, behind = self._keep_trying(lambda: self._commit(steps))
        while behind > MOST_STEPS_BEHIND and not self._stopped.is_set():
            self._stopped.wait(POLL_S)
            newest, behind = self._keep_trying(lambda: self._append(()))  # also reports which requests ended meanwhile
        self._outbox.committed(groups)
        is_news = self._is_full != (self._told_room[0].spare <= 0) or parse_id(newest) > parse_id(self._cursor)
        if self._deliveries == "unseen" or is_news:
            self._take_what_fits(newest)

    def _take_what_fits(self, newest: str = "") -> None:
        """Take as many requests as the engine has told that it has room for, without those that came since.

        If some owners have to wait, look for others only after a request came. *newest*: id of the last that came.
        """
        told, num_read = self._told_room
        came = self._num_sent - num_read
        room = replace(told, count=told.count - came, spare=max(told.spare - came, 0))
        is_early = time.monotonic() - self._left_s < TAKE_EVERY_S and newest in ("", self._left_newest)
        looks = room.count > 0 and not is_early and not (told.but and self._looked_for == (newest, told.but))
        if looks or (room.spare <= 0 and not self._is_full):
            before = self._num_sent
            self._keep_trying(lambda: self._take(room))
            is_in_vain = self._num_sent == before and self._detokenizer == "present" and self._left_s == -math.inf
            self._looked_for = (newest, told.but) if is_in_vain and looks else ("", ())
            self._left_newest = newest

    def _tell(self, update: Update) -> None:
        self._num_sent += 1
        self._updates.put(update)

    def _keep_trying(self, work: Callable[[], T]) -> T:
        """Call *work* until Redis answers. *work* must be safe to repeat.

        Raises:
            Fenced: Redis is another process than before.
        """
        group_lost = False
        while not self._stopped.is_set():
            try:
                if self._redis == "unchecked":
                    self._check_redis()
                if group_lost:
                    self._log.prepare(self._inbox)
                return work()
            except GroupLost as error:
                group_lost = True
                logger.warning("group_lost", error=str(error))
            except (LogUnavailable, LogFull) as error:
                self._redis = "unchecked"
                logger.warning("log_unavailable", error=str(error))
            self._stopped.wait(BACKOFF_S)
        return work()  # the last try, to commit the last step if Redis is back; else the next owner computes it again

    def _check_redis(self) -> None:
        incarnation = self._log.incarnation()
        if self._incarnation not in ("", incarnation):
            raise Fenced("Redis was started again, or another one took its place")
        self._incarnation, self._redis = incarnation, "same"

    def _commit(self, steps: Sequence[PendingStep]) -> tuple[str, int]:
        """Commit steps; return the result of `_append`."""
        began_s = time.perf_counter()
        newest, behind = self._append(steps)
        self._measures.observe(COMMIT_SECONDS, time.perf_counter() - began_s, "step")
        failpoint("generate.after_commit")
        return newest, behind

    def _append(self, steps: Sequence[PendingStep]) -> tuple[str, int]:
        """Commit steps, perhaps none, and pass on which requests ended elsewhere. Return the id of the newest entry of
        `tokenized`, delivered or not, and how many steps wait for the detokenizer.
        """
        ended = [uid for step in steps for uid in step.ended]
        clock, sent_s = self._clock, time.monotonic()
        made_ms = {step.number: clock.at(step.made_s) for step in steps}
        done = self._log.step(
            self._owner,
            {step.number: step.event.model_copy(update={"made_ms": made_ms[step.number]}) for step in steps},
            ended=[self._entry_ids[uid] for uid in ended if uid in self._entry_ids],
            control_cursor=self._control_cursor,
            lease_ms=self._lease_ms,
        )
        clock.learn(sent_s, time.monotonic(), done.ms)
        for uid in ended:
            self._entry_ids.pop(uid, None)
        self._pass_on(done.ended, done.flush, done.control_cursor)
        if time.monotonic() - self._live_s > LIVE_EVERY_S:
            self._check_live()
        return done.newest, done.steps_length

    def _take(self, room: Room) -> None:
        self._look_for_detokenizer()
        if self._detokenizer == "absent":
            room = Room()
        if self._deliveries == "unseen":
            pending, known = self._log.pending(self._inbox, self._owner.slot), set(self._entry_ids.values())
            self._bring([entry for entry in pending if entry.id not in known], resumed=None)
        self._deliveries = "unseen"
        taken = self._log.take(
            self._owner,
            max(room.count, 0),
            control_cursor=self._control_cursor,
            but=room.but,
            spare=room.spare,
            steal_after_s=self._steal_after_s,
        )
        if taken.entries:
            failpoint("generate.after_take")
        self._deliveries = "seen"
        self._cursor = taken.cursor
        self._left_s = time.monotonic() if taken.num_left and not taken.entries else -math.inf
        if room.count > 0 or room.spare <= 0:
            self._is_full = len(taken.entries) >= room.spare
        self._bring(taken.entries, resumed=False)
        self._pass_on(taken.ended, taken.flush, taken.control_cursor)

    def _look_for_detokenizer(self) -> None:
        if self._detokenizer == "present" and time.monotonic() - self._listened_s <= LISTEN_EVERY_S:
            return
        slot = slot_name(DETOKENIZE, slot_index(self._owner.slot))
        if self._log.lease(slot).holder:
            self._detokenizer, self._listened_s = "present", time.monotonic()
        else:
            if self._detokenizer != "absent":
                log = logger.info if self._detokenizer == "present" else logger.debug  # at the start this is normal
                log("waiting_for", stages=[slot])
            self._detokenizer = "absent"

    def _wait_for_update(self, job: Idle) -> None:
        self._told_room = job.room, job.num_read
        while self._num_sent == job.num_read and not self._stopped.is_set():
            self._keep_trying(lambda: self._take(job.room))
            self._keep_trying(self._check_live)
            self._keep_trying(self._advance_takeover)
            if job.brief:
                return
            polls = isinstance(self._takeover, _Guest) or self._detokenizer == "absent" or not job.room.count
            if self._num_sent == job.num_read and (polls or self._left_s > -math.inf):
                self._stopped.wait(POLL_S if polls else TAKE_EVERY_S)
            elif self._num_sent == job.num_read:
                self._keep_trying(lambda: self._log.wait(self._cursor, self._control_cursor, block_ms=BLOCK_MS))

    def _adopt(self) -> None:
        """Adopt the requests of the slot's former owner, once all its steps are in their histories."""
        entries = self._log.pending(self._inbox, self._owner.slot)
        while entries and self._log.backlog(Inbox.steps(self._log.names, self._owner.slot)):
            if self._stopped.wait(POLL_S):
                return
        if entries:
            logger.info("taken_over", slot=self._owner.slot, requests=len(entries))
            failpoint("generate.mid_takeover")
        self._bring(entries, resumed=True)

    def _advance_takeover(self) -> None:
        if isinstance(self._takeover, _Watching):
            self._look_at_others(self._takeover)
        if isinstance(self._takeover, _Guest):
            self._claim_as(self._takeover)

    def _look_at_others(self, watching: _Watching) -> None:
        """Become the guest of a slot that was free at the last look too."""
        if time.monotonic() - self._watched_s < LOOK_EVERY_S:
            return
        self._watched_s = time.monotonic()
        away = frozenset(self._log.forsaken(self._inbox, but=self._owner.slot))
        self._takeover = _Watching(away)
        for slot in sorted(away & watching.away):
            owner = acquire_guest(self._log, slot, self._lease_ms)
            if owner is not None:
                logger.info("guest", slot=slot, epoch=owner.epoch)
                self._takeover = _Guest(owner, away)
                return

    def _claim_as(self, guest: _Guest) -> None:
        """Claim the requests of the dead engine, once its steps are in their histories."""
        slot = guest.owner.slot
        if self._log.backlog(Inbox.steps(self._log.names, slot)):
            return
        before, self._deliveries = self._deliveries, "unseen"
        entries = self._log.claim_from(self._inbox, self._owner, guest.owner, MOST_CLAIMED)
        if entries:
            logger.info("taken_over", slot=slot, requests=len(entries))
            failpoint("generate.mid_takeover")
        self._bring(entries, resumed=True)
        self._deliveries = before
        if len(entries) < MOST_CLAIMED:
            self._takeover = _Watching(guest.away)
            self._log.release(guest.owner)

    def _bring(self, entries: Sequence[Entry], *, resumed: bool | None) -> None:
        """Read the histories of entries and pass the requests to the engine.

        *resumed*: whether another owner had them before; None: their histories show it.
        """
        readable = [entry for entry in entries if self._is_readable(entry)]
        uids = [entry.fields["uid"] for entry in readable]
        histories = self._keep_trying(lambda: self._log.histories(uids))
        for entry, uid, history in zip(readable, uids, histories, strict=True):
            try:
                past = past_of(uid, history)
            except Exception as error:  # UndecodableEvent, or numbers that no event has
                refused = error if isinstance(error, UndecodableEvent) else UndecodableEvent(repr(error))
                self._refuse(entry, refused, uids_of(entry))
                continue
            self._entry_ids[uid] = entry.id
            if past is None or self._is_ended(entry, past):
                self._tell(Ended(uid))
            else:
                was_here = past.had_begun if resumed is None else resumed
                if past.request.prompt_ids != self._prompt_ids:
                    self._prompt_ids = past.request.prompt_ids
                request = replace(past.request, prompt_ids=self._prompt_ids)
                self._tell(Arrived(request, was_here, was_here and past.num_taken_over > 0))

    def _is_readable(self, entry: Entry) -> bool:
        """Return whether an entry brings a request; if not, bury or leave the entry."""
        try:
            uid, _ = request_of(entry)
        except UndecodableEvent as error:
            self._refuse(entry, error, uids_of(entry))
            return False
        before = self._entry_ids.get(uid, entry.id)
        if before != entry.id and before in self._keep_trying(self._pending_ids):
            self._refuse(entry, UndecodableEvent(f"its request is in hand as the entry {before}"), ())
            return False
        return True

    def _pending_ids(self) -> set[str]:
        return {entry.id for entry in self._log.pending(self._inbox, self._owner.slot)}

    def _refuse(self, entry: Entry, error: UndecodableEvent, uids: Sequence[str]) -> None:
        self._keep_trying(lambda: self._unreadable.refuse(entry, error, self._owner.slot, uids))

    def _is_ended(self, entry: Entry, past: Past) -> bool:
        """End a request that another model began, or that killed too many engines; return whether it ended."""
        uid, frontend, dead = entry.fields["uid"], entry.fields["frontend"], None
        if reason := self._serving.why_not_continued(past.served_by):
            logger.error("begun_elsewhere", uid=uid, reason=reason)
            failed = Failed(status=500, code="other_model", message=reason)
        elif past.is_poisonous:
            deaths = past.num_deaths
            logger.error("buried", uid=uid, deaths=deaths)
            message = f"The request ended its engine {deaths} times, the last {past.num_alone} times alone."
            failed = Failed(status=500, code="poisonous", message=message)
            dead = DeadLetter(GENERATE, entry.fields, deaths, message)
        else:
            return False
        if self._keep_trying(lambda: self._log.end(uid, failed, frontend=frontend, dead=dead)):
            self._measures.add(REQUEST_SUCCESS, "error")
            if dead is not None:
                self._measures.add(BURIED)
        return True

    def _pass_on(self, uids: Sequence[str], flush: str, cursor: str) -> None:
        """Pass on what a reply brought from `control`, up to *cursor*."""
        self._control_cursor = cursor
        if flush:
            self._tell(Flush(flush))
        for uid in uids:
            if uid in self._entry_ids:
                self._tell(Ended(uid))

    def _check_live(self) -> None:
        """End the requests in hand that are no longer in `live`: `control` may have lost their entries.

        Also compare the number of pending entries. Redis may have executed a `take` late, after its caller had given
        up.
        """
        self._live_s = time.monotonic()
        if self._log.num_pending(self._inbox, self._owner.slot) > len(self._entry_ids):
            self._deliveries = "unseen"
        uids = list(self._entry_ids)
        gone = set(uids) - self._log.alive(uids)
        for uid in uids:
            if uid in gone:
                self._tell(Ended(uid))
        self._unreadable.look()
