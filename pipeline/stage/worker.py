"""The process of a stage's worker, and its consumer-group runtime, which reads entries, hands them over and loses none.

A worker first handles what its slot had read before and not consumed, one entry at a time. Then it reads new entries,
and claims entries of free slots. After a broken read, and once a second, it looks up its unconsumed entries again: a
reply may have been lost, or a former worker, which does not know that it lost the slot, may have read an entry.

An entry that was read before may have killed its worker. So the log counts each try before the work begins, and an
entry that was tried too often is buried instead.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence

import structlog

from pipeline.errors import Fenced, GroupLost, LogFull, LogUnavailable
from pipeline.log.protocol import Entry, Inbox
from pipeline.log.redis import RedisLog
from pipeline.metrics.process import ProcessMeasures
from pipeline.serving import Serving
from pipeline.stage.slots import Announcement, SlotLease, slot_leases

logger = structlog.get_logger()

BLOCK_MS = 500
CLAIM_EVERY_S = 1.0
BACKOFF_S = 0.2
LEAVING_S = 1.0
"""Longest time that a process which ends at once tries to leave its slot."""
MOST_DELIVERIES = 4
"""Number of tries, the last three of them alone, after which an entry has killed its workers."""

Handle = Callable[[Sequence[Entry]], Sequence[Entry] | None]
"""Does the work of a stage on the entries of one read, and commits it. Returns the entries that it puts off; each of
these comes again before what is read next, one at a time."""
Bury = Callable[[Entry, int], None]
"""Ends the request of an entry that killed its worker so many times, without doing its work. If the entry has several
requests, it finds the one at fault."""


class Stop:
    """Set by SIGTERM and SIGINT: finish the work in hand, then leave."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def on_signals(self) -> Stop:
        """Listen to the signals of this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._event.set())
        return self

    def set(self) -> None:
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until *timeout_s* is over or a stop comes; return whether it came."""
        return self._event.wait(timeout_s)


class EndAtOnce:
    """Lets SIGTERM and SIGINT end this process at once, until it is `over`: for work that is worth nothing half done.

    The main thread may wait in C, where Python calls no signal handler. So another thread waits for the signals.
    """

    def __init__(self, leave: Callable[[], object]) -> None:
        """Call it in the main thread. *leave* is called at the end, if the process has handlers for these signals."""
        self._leave = leave
        heard, self._said = os.pipe()
        os.set_blocking(self._said, False)  # signals require it
        self._before = signal.set_wakeup_fd(self._said, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(heard,), name="end at once", daemon=True).start()

    def over(self) -> None:
        """Leave the signals to their handlers."""
        signal.set_wakeup_fd(self._before)
        os.close(self._said)

    def _hear(self, heard: int) -> None:
        said = os.read(heard, 1)
        os.close(heard)
        if said:
            late = threading.Timer(LEAVING_S, os._exit, (0,))
            late.daemon = True
            late.start()
            self._leave()
            os._exit(0)


class WorkerProcess:
    """What a process that works for *stage* has from its start: signals, two connections to the log, metrics."""

    def __init__(
        self, stage: str, open_log: Callable[[], RedisLog], *, lease_ms: int, preferred: int | None = None
    ) -> None:
        self.stop = Stop().on_signals()
        self.log = open_log()
        self.measures = ProcessMeasures()
        self.lease_ms = lease_ms
        self._stage = stage
        self._lease_log = open_log()
        self._preferred = preferred

    def loading(self, detail: str, patience_s: float) -> Announcement:
        """Announce that the worker loads *detail*, and let the watchdog wait *patience_s*."""
        announcement = Announcement(self._lease_log, self._stage, self.lease_ms, preferred=self._preferred)
        announcement.report_progress(patience_s=patience_s)
        announcement.say(phase="loading", detail=detail)
        return announcement

    def slot_leases(self, serving: Serving | None = None) -> Generator[SlotLease, None, None]:
        """Return `pipeline.stage.slots.slot_leases`, until this process should end."""
        return slot_leases(
            self.log,
            self._lease_log,
            self._stage,
            self.lease_ms,
            preferred=self._preferred,
            stop=self.stop,
            measures=self.measures,
            serving=serving,
        )


def follow(
    log: RedisLog,
    inbox: Inbox,
    slot_lease: SlotLease,
    handle: Handle,
    bury: Bury,
    stop: Stop,
    *,
    max_entries: int,
    forget: Callable[[], None] = lambda: None,
    look: Callable[[], None] = lambda: None,
    in_order: bool = True,
    most_tries: int = MOST_DELIVERIES,
    held: Callable[[], Collection[str]] = tuple,
) -> None:
    """Feed *handle* from *inbox* until *stop* is set or the slot has another owner.

    Unless *in_order*, new entries come between those that the slot had read before, which can take long. *bury* gets an
    entry that was tried more than *most_tries* times.

    *held* returns the ids of the entries that *handle* took and continues later. While there are some, *handle* is
    called at each turn, also without entries; then it may wait a moment.

    *forget* is called when the log could not be reached: it may come back without the last commits. *look* is called
    once a second while there is nothing of its own to do.
    """
    reader = _Reader(log, inbox, slot_lease, bury, look, max_entries, in_order, most_tries, held)
    group_lost = True  # or not there yet
    while not stop and not slot_lease.lost.is_set():
        slot_lease.report_progress()
        try:
            if group_lost:
                log.prepare(inbox)
                group_lost = False
            entries = reader.next()
            if entries or held():
                reader.put_off(handle(entries) or ())
        except GroupLost as error:
            logger.warning("group_lost", stream=inbox.stream, error=str(error))
            if group_lost:  # making it again fails, too: the key may be of another type
                stop.wait(BACKOFF_S)
            group_lost = True
            forget()
            reader.unsure()
        except (LogUnavailable, LogFull) as error:
            logger.warning("log_unavailable", error=str(error))
            forget()
            reader.unsure()
            stop.wait(BACKOFF_S)
        except Fenced as error:
            logger.warning("fenced", error=str(error))
            slot_lease.lost.set()


class _Reader:
    """Decides which entries come next."""

    def __init__(
        self,
        log: RedisLog,
        inbox: Inbox,
        slot_lease: SlotLease,
        bury: Bury,
        look: Callable[[], None],
        max_entries: int,
        in_order: bool,
        most_tries: int,
        held: Callable[[], Collection[str]],
    ) -> None:
        self._log = log
        self._inbox = inbox
        self._slot_lease = slot_lease
        self._bury = bury
        self._look = look
        self._max_entries = max_entries
        self._in_order = in_order
        self._most_tries = most_tries
        self._held = held
        self._reads_next = False
        self._own: list[Entry] | None = None  # None: to be looked up
        self._put_off: list[Entry] = []
        self._suspect = True  # an entry that is looked up may have killed its worker
        self._tries: dict[str, int] = {}  # of suspect entries, by id; each worker counts once
        self._looked_s = time.monotonic()

    def unsure(self) -> None:
        """Look up the unconsumed entries of this slot again."""
        self._own = None
        self._put_off.clear()

    def put_off(self, entries: Sequence[Entry]) -> None:
        """Return *entries* again later, one beside each read."""
        self._put_off += entries

    def next(self) -> list[Entry]:
        owner = self._slot_lease.owner
        if self._own is None:
            self._own = self._unconsumed()
        if not self._own and time.monotonic() - self._looked_s > CLAIM_EVERY_S:
            self._looked_s = time.monotonic()
            self._look()
            self._own = self._unconsumed()
            if not self._own:
                self._suspect = True  # before the claim: if its reply is lost, `pending` finds the entries
                self._own = self._log.claim(self._inbox, owner, self._max_entries)
                if self._own:
                    logger.info("claimed", slot=owner.slot, entries=len(self._own))
        # An entry that may have killed its worker comes alone, not even beside held ones.
        while self._own and not self._reads_next and not (self._suspect and self._held()):
            entry = self._own[0]
            is_tried = self._may_be_tried(entry)
            del self._own[0]
            if is_tried:
                self._reads_next = not self._in_order
                return [entry]
        self._reads_next = False
        if not self._own:
            self._suspect = False
            self._tries.clear()
        block_ms = 0 if self._own or self._put_off or self._held() else BLOCK_MS
        new = self._log.read(self._inbox, owner.slot, max_entries=self._max_entries, block_ms=block_ms)
        return [*(self._put_off.pop(0) for _ in self._put_off[:1]), *new]

    def _unconsumed(self) -> list[Entry]:
        """Return what this slot has read and not consumed, except what is put off or held."""
        put_off = {*(entry.id for entry in self._put_off), *self._held()}
        pending = self._log.pending(self._inbox, self._slot_lease.owner.slot)
        return [entry for entry in pending if entry.id not in put_off]

    def _may_be_tried(self, entry: Entry) -> bool:
        if not self._suspect:
            return True
        if entry.id not in self._tries:
            self._tries[entry.id] = self._log.retry(self._inbox, self._slot_lease.owner, entry)
        times = self._tries[entry.id]
        if times > self._most_tries:
            logger.error("tried_too_often", stream=self._inbox.stream, id=entry.id, deaths=times - 1)
            self._bury(entry, times - 1)
        return 0 < times <= self._most_tries
