"""An archiver: reads ended requests, writes them into files, and then consumes their entries.

The order is: write and sync the frames, write the index, acknowledge. So a request that an archiver wrote and did not
acknowledge is read again, and found in the files. While the disk is full, only archiving waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from pipeline.archive.folder import make_archive
from pipeline.archive.volume import VolumeBusy
from pipeline.archive.writer import ArchiveFull, Writer
from pipeline.errors import ConfigError, LogError, LogUnavailable
from pipeline.events import Failed
from pipeline.log.forgetting import ended_inbox
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    ARCHIVE_BACKLOG,
    ARCHIVE_BYTES,
    ARCHIVE_STOPPED,
    ARCHIVE_UNARCHIVED,
    ARCHIVED,
    BURIED,
)
from pipeline.names import ARCHIVE, PROBE, SEAL
from pipeline.recording import Recording
from pipeline.stage.slots import SlotLease
from pipeline.stage.worker import Stop, WorkerProcess, follow
from stages.archive.config import ArchiveConfig
from stages.archive.recount import recounting

logger = structlog.get_logger()

MOST_READ: Final = 32
READ_AHEAD: Final = 1000
"""Number of entries of one more read, when the last ones were of erased requests .."""
MOST_AHEAD: Final = 10_000
""".. and largest number of entries in hand at the same time."""
DISK_PATIENCE_S: Final = 120.0
"""Longest time for one batch on a disk before the watchdog ends the process."""
FULL_RETRY_S: Final = 1.0
FULL_SAID_EVERY_S: Final = 60.0
BUSY_RETRY_S: Final = 0.02
TIDY_EVERY_S: Final = 60.0
DRAIN_S: Final = 5.0
"""Time for which an archiver that must end still writes: these requests may expire before the next server start."""
AGAIN_S: Final = 0.2


class ArchiveWorker:
    """The work of the owner of one slot."""

    def __init__(
        self,
        log: RedisLog,
        slot_lease: SlotLease,
        writer: Writer,
        archive_id: str,
        stop: Stop,
        *,
        retain_s: float = 0.0,
        measures: Measures | None = None,
    ) -> None:
        self._log = log
        self._slot_lease = slot_lease
        self._writer = writer
        self._archive_id = archive_id
        self._stop = stop
        self._retain_s = retain_s
        self._measures = measures or Measures()
        self._tidied_s = -TIDY_EVERY_S
        self._said_s = -FULL_SAID_EVERY_S
        self._is_sure = True
        self._unhandled: list[Entry] = []
        """Entries that were read."""
        self._erased: list[Entry] = []
        """Entries that were read, of erased requests."""

    def begin(self) -> None:
        """Mend the files of dead archivers."""
        self._on_disk(self._writer.begin)

    def handle(self, entries: Sequence[Entry]) -> None:
        """Archive the requests of *entries* of `ended`, or forget them, and consume the entries."""
        self._unhandled = [*entries]
        try:
            while self._unhandled and self._handle_next():
                pass
        finally:  # unhandled entries stay pending
            self._unhandled.clear()
            self._erased.clear()

    def _handle_next(self) -> bool:
        """Handle the next entries; return False if this worker must end before that is done."""
        self._report_progress()
        entries, self._unhandled = self._unhandled[:MOST_READ], self._unhandled[MOST_READ:]
        uids = [uid_of(entry) for entry in entries]
        kept, absent = list[Recording](), list[Entry]()
        for entry, uid, history in zip(entries, uids, self._log.histories(uids), strict=True):
            recording = Recording(uid, tuple(history))
            if not history:
                absent.append(entry)
            elif recording.is_sealed and is_kept(history[0].fields):  # unsealed: submitted again after a loss
                kept.append(recording)
        self._erased += self._erased_of(absent)
        lost = [entry for entry in absent if entry not in self._erased]
        if self._erased:
            self._read_again()
            self._read_on()
            if not self._on_disk(self._forget):
                return False

        def write() -> None:
            self._measures.add(ARCHIVED, amount=self._writer.write(kept))

        if kept and not self._on_disk(write, meanwhile=self._forget_meanwhile):
            return False
        # Only now: a request may have been erased after it was read.
        erased = self._erased_of([entry for entry in entries if entry not in absent or entry in lost])
        lost = [entry for entry in lost if entry not in erased]
        self._erased += erased
        if self._erased and not self._on_disk(self._forget):
            return False
        self._log.archived(self._slot_lease.owner, [entry for entry in entries if entry not in lost], lost)
        if lost:
            logger.warning("not_archived", requests=len(lost), reason="their histories had expired")
        return True

    def _erased_of(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return those of *entries* whose requests were erased."""
        begins = self._log.begins([uid_of(entry) for entry in entries]) if entries else {}
        return [entry for entry in entries if uid_of(entry) in begins and begins[uid_of(entry)].id == SEAL]

    def _read_again(self) -> None:
        """Add the erased requests among what this slot had read before, perhaps by an archiver that died."""
        in_hand = {entry.id for entry in self._erased}
        pending = self._log.pending(ended_inbox(self._log.names), self._slot_lease.owner.slot)
        pending = [entry for entry in pending if entry.id not in in_hand]
        for first in range(0, len(pending), READ_AHEAD):
            self._erased += self._erased_of(pending[first : first + READ_AHEAD])

    def _read_on(self) -> None:
        """Read on while most entries are of erased requests, so that each file is rewritten once for all of them."""
        inbox, slot = ended_inbox(self._log.names), self._slot_lease.owner.slot
        while len(self._erased) + len(self._unhandled) < MOST_AHEAD:
            entries = self._log.read(inbox, slot, max_entries=READ_AHEAD, block_ms=0)
            erased = self._erased_of(entries)
            self._erased += erased
            self._unhandled += [entry for entry in entries if entry not in erased]
            if 2 * len(erased) < READ_AHEAD:
                break

    def _forget(self) -> None:
        """Remove erased requests from the files, and consume their entries."""
        removed = self._writer.forget({uid_of(entry) for entry in self._erased}, self._report_progress)
        if removed:
            logger.info("archive_forgot", requests=removed)
        for first in range(0, len(self._erased), READ_AHEAD):
            self._log.archived(self._slot_lease.owner, self._erased[first : first + READ_AHEAD])
        self._erased.clear()

    def _forget_meanwhile(self) -> None:
        """Forget erased requests while the disk is full: that makes room."""
        self._read_on()
        if self._erased:
            with contextlib.suppress(ArchiveFull, VolumeBusy):
                self._forget()

    def _report_progress(self) -> None:
        self._slot_lease.report_progress(patience_s=DISK_PATIENCE_S)

    def bury(self, entry: Entry, deaths: int) -> None:
        """Consume an entry that ended its archiver *deaths* times, and keep it as a dead letter."""
        reason = f"it ended its archiver {deaths} times"
        event = Failed(status=500, code="poisonous", message=reason)
        self._log.bury(ended_inbox(self._log.names), entry, reason, event, {}, self._slot_lease.owner)
        self._measures.add(BURIED)

    def forget(self) -> None:
        """Open the archive again: after a loss of its data, the log may not know that it has one."""
        self._is_sure = False
        with contextlib.suppress(LogError):  # if it fails, the next look does it
            self._open()

    def look(self) -> None:
        """Remove old files, and publish the metrics."""
        if not self._is_sure:
            self._open()
        self._count_waiting()
        if time.monotonic() - self._tidied_s >= TIDY_EVERY_S:
            self._tidied_s = time.monotonic()
            self._report_progress()
            self._tidy()

    def drain(self) -> None:
        """Archive the requests that are left, for a while."""
        until_s = time.monotonic() + DRAIN_S
        inbox, slot = ended_inbox(self._log.names), self._slot_lease.owner.slot
        try:
            while time.monotonic() < until_s:
                entries = self._log.read(inbox, slot, max_entries=MOST_READ, block_ms=0)
                if not entries:
                    return
                self.handle(entries)
        except LogError as error:
            logger.warning("not_drained", error=str(error))

    def _open(self) -> None:
        open_archive(self._log, self._archive_id)
        self._is_sure = True

    def _tidy(self) -> None:
        try:
            self._writer.tidy(self._retain_s)
            self._measures.set(ARCHIVE_BYTES, self._writer.num_bytes())
        except (ArchiveFull, OSError) as error:
            logger.error("archive_not_tidied", error=str(error))

    def _count_waiting(self) -> None:
        self._measures.set(ARCHIVE_BACKLOG, self._log.backlog(ended_inbox(self._log.names)))
        self._measures.set(ARCHIVE_UNARCHIVED, self._log.num_unarchived())

    def _on_disk(self, work: Callable[[], object], meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Call *work* on the files until it succeeds; return False if this worker must end before.

        *meanwhile* is called between two tries while the disk is full.
        """
        while True:
            try:
                work()
                self._measures.set(ARCHIVE_STOPPED, 0)
                return True
            except VolumeBusy:
                pause_s = BUSY_RETRY_S
            except ArchiveFull as error:
                pause_s = FULL_RETRY_S
                self._measures.set(ARCHIVE_STOPPED, 1)
                if time.monotonic() - self._said_s >= FULL_SAID_EVERY_S:
                    self._said_s = time.monotonic()
                    logger.error("archiving_stopped", error=str(error))
                self._tidy()
                meanwhile()
                with contextlib.suppress(LogError):  # the work comes to it, too
                    self._count_waiting()
            self._report_progress()
            if self._stop.wait(pause_s) or self._slot_lease.lost.is_set():
                return False


def uid_of(entry: Entry) -> str:
    """Return the uid in an entry of `ended`."""
    return entry.fields.get("uid", "")


def is_kept(submitted: Mapping[str, str]) -> bool:
    """Return whether a request that begins so is archived: not a probe, and not a question to the tokenizer."""
    return submitted.get("endpoint") != PROBE and submitted.get("task", "generate") == "generate"


def open_archive(log: RedisLog, archive_id: str) -> None:
    """Let the log append ended requests to `ended`, for archivers.

    Raises:
        ConfigError: The namespace has another archive.
    """
    found = log.open_archive(archive_id)
    if found != archive_id:
        raise ConfigError(
            f"--to: this folder is the archive {archive_id}, and the namespace {log.names.namespace} is archived in "
            f"{found}; name that folder, or end its archiving with minisgl stage archive --leave"
        )


def serve(
    log: RedisLog,
    slot_lease: SlotLease,
    config: ArchiveConfig,
    archive_id: str,
    stop: Stop,
    measures: Measures | None = None,
) -> None:
    """Archive until *stop* or until the slot has another owner."""
    owner = slot_lease.owner
    writer = Writer(config.files.folder, owner.slot, owner.epoch, max_bytes=config.files.max_bytes)
    worker = ArchiveWorker(log, slot_lease, writer, archive_id, stop, retain_s=config.files.retain_s, measures=measures)
    worker.begin()
    follow(
        log,
        ended_inbox(log.names),
        slot_lease,
        worker.handle,
        worker.bury,
        stop,
        max_entries=MOST_READ,
        forget=worker.forget,
        look=worker.look,
    )
    if stop and not slot_lease.lost.is_set():
        worker.drain()


def run(config: ArchiveConfig, open_log: Callable[[], RedisLog]) -> int:
    """Run one archiver until SIGTERM; return the exit code.

    Raises:
        ConfigError: The folder cannot be an archive, or is not the one of this namespace.
    """
    archive_id = make_archive(config.files.folder, config.log.namespace)
    process = WorkerProcess(ARCHIVE, open_log, lease_ms=int(config.log.lease_s * 1000), preferred=config.worker.slot)
    log = open_log()
    while not process.stop:
        try:
            open_archive(log, archive_id)
            break
        except LogUnavailable as error:
            logger.warning("log_unavailable", error=str(error))
            process.stop.wait(AGAIN_S)
    for slot_lease in process.slot_leases():
        slot_lease.say(phase="ready")
        with recounting(log.another(), slot_lease.owner, config.files.folder):
            serve(log, slot_lease, config, archive_id, process.stop, process.measures)
    return 0
