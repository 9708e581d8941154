"""An archiver between two commits of the log: what has ended is in the files once, whatever died."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.calls import noted
from support.lived_requests import LivedRequests
from support.measured import count_of
from support.redis_servers import command, until
from support.selection import AT_NIGHT, by_night

import stages.archive.worker
from ops.serve.processes import PROGRAM
from pipeline.archive.folder import make_archive
from pipeline.archive.reader import Archive, volumes
from pipeline.archive.writer import ArchiveFull, Writer
from pipeline.errors import ConfigError, GroupLost, LogUnavailable
from pipeline.events import Answered, Cancelled, Failed, SamplingParams, Submitted, new_uid
from pipeline.log.config import LogConfig
from pipeline.log.forgetting import ended_inbox
from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import ARCHIVE_BACKLOG, ARCHIVE_STOPPED, ARCHIVE_UNARCHIVED, ARCHIVED
from pipeline.names import ARCHIVE, PROBE, SEAL, Names
from pipeline.process.config import WorkerConfig
from pipeline.process.failpoints import FOLDER_VARIABLE, POINTS, VARIABLE
from pipeline.process.redis_server import EmbeddedRedis
from pipeline.recording import Recording
from pipeline.stage.slots import SlotLease, acquire_slot
from pipeline.stage.worker import Stop
from stages.archive.config import ArchiveConfig, FilesConfig
from stages.archive.worker import ArchiveWorker, open_archive, serve

LEASE_MS = 60_000
FOREVER_MS = 1 << 60
KILLS_S = by_night(4, 60)
"""How long somebody is killed each second."""


class Archiver:
    """An archiver of one slot, which does one thing after the other."""

    def __init__(self, log: RedisLog, folder: Path) -> None:
        self.log, self.folder, self.measures, self.stop = log, folder, Measures(), Stop()
        self.lived, self.inbox = LivedRequests(log), ended_inbox(log.names)
        self.id = make_archive(folder, log.names.namespace)
        open_archive(log, self.id)
        self.owner = acquire_slot(log, ARCHIVE, LEASE_MS)
        self.lease = SlotLease(log, self.owner, LEASE_MS, self.measures)
        self.writer = Writer(folder, self.owner.slot, self.owner.epoch)
        self.worker = ArchiveWorker(log, self.lease, self.writer, self.id, self.stop, measures=self.measures)

    def read(self) -> None:
        """Take in what has ended, and do no more."""
        self.entries = self.log.read(self.inbox, self.owner.slot, max_entries=100, block_ms=0)

    def work(self) -> None:
        self.read()
        self.worker.handle(self.entries)

    def finish(self) -> str:
        """Have a request end; return its uid."""
        uid = self.lived.running(prompt="Hi")
        self.lived.tokens(uid, "He", "llo")
        self.lived.finished(uid, 2)
        return uid

    def uids(self) -> list[str]:
        return uids(self.folder)

    def archived(self, some: Sequence[str]) -> dict[str, Recording]:
        return Archive(self.folder).read(some)


@pytest.fixture
def archiver(another_log: Callable[[], RedisLog], tmp_path: Path) -> Iterator[Archiver]:
    archiver = Archiver(another_log(), tmp_path)
    yield archiver
    archiver.lease.leave()


def uids(folder: Path) -> list[str]:
    return [place.uid for place in Archive(folder).listed(0, FOREVER_MS)]


def test_whatever_a_request_came_to_it_is_archived_as_the_log_has_it(archiver: Archiver) -> None:
    running = archiver.lived.running()
    done = [archiver.finish(), archiver.lived.submitted(), archiver.lived.submitted(), archiver.lived.dead()]
    archiver.lived.ended(done[1], Cancelled(by="client"))
    archiver.lived.ended(done[2], Failed(status=400, code="invalid_value", message="No."))
    archiver.work()
    histories = archiver.log.histories(done)
    expected = {uid: Recording(uid, tuple(history)) for uid, history in zip(done, histories, strict=True)}
    assert archiver.archived([*done, running]) == expected
    assert all(recording.is_sealed for recording in expected.values())
    assert archiver.log.backlog(archiver.inbox) == 0
    assert count_of(archiver.measures, ARCHIVED) == 4


def test_siblings_are_archived_whole(archiver: Archiver) -> None:
    long = "What they have in common. " * 50
    event = Submitted(endpoint="e", frontend="web-0", prompt=long, sampling=SamplingParams())
    uid = new_uid()
    archiver.log.submit(uid, [event, event, event])
    for index in range(3):
        archiver.log.end(f"{uid}.{index}", Cancelled(by="client"), frontend="web-0")
    archiver.work()
    found = archiver.archived([f"{uid}.{index}" for index in range(3)])
    assert [recording.entries[0].fields["prompt"] for recording in found.values()] == [long] * 3


def test_probes_and_questions_to_the_tokenizer_are_not_archived(archiver: Archiver) -> None:
    for event in (
        Submitted(endpoint=PROBE, frontend="web-0", prompt_ids=(1,), sampling=SamplingParams()),
        Submitted(endpoint="/tokenize", frontend="web-0", prompt="a", sampling=SamplingParams(), task="tokenize"),
    ):
        uid = new_uid()
        archiver.log.submit(uid, [event])
        archiver.log.end(uid, Answered(text="x", by="tokenize-0"), frontend="web-0")
    archiver.work()
    assert len(archiver.entries) == 2 and archiver.uids() == [] and archiver.log.backlog(archiver.inbox) == 0
    assert archiver.log.num_unarchived() == 0


def test_what_was_written_and_not_acknowledged_is_not_written_again(archiver: Archiver) -> None:
    first, second = archiver.finish(), archiver.finish()
    archiver.read()
    archiver.writer.write([Recording(first, tuple(archiver.log.histories([first])[0]))])  # and died
    archiver.log.release(archiver.owner)
    successor = Archiver(archiver.log, archiver.folder)
    log, inbox = archiver.log, archiver.inbox
    successor.entries = log.claim(inbox, successor.owner, 100) or log.pending(inbox, successor.owner.slot)
    successor.worker.handle(successor.entries)
    assert sorted(archiver.uids()) == sorted([first, second])
    assert count_of(successor.measures, ARCHIVED) == 1
    assert archiver.log.backlog(archiver.inbox) == 0
    successor.lease.leave()


# requests that are to be forgotten


def test_what_is_erased_is_removed_from_the_files_and_is_not_lost(archiver: Archiver) -> None:
    kept, gone, unread = archiver.finish(), archiver.finish(), archiver.lived.submitted()
    archiver.work()
    archiver.lived.ended(unread, Cancelled(by="client"))
    for uid in (gone, unread):
        archiver.log.erase(uid)
    archiver.work()
    assert len(archiver.entries) == 3
    assert archiver.uids() == [kept] and archiver.archived([gone, unread]) == {}
    assert archiver.log.backlog(archiver.inbox) == archiver.log.num_unarchived() == 0


def test_what_is_erased_between_the_read_and_the_acknowledgement_is_not_in_the_files(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = archiver.finish(), archiver.finish()
    archiver.read()
    write = archiver.writer.write

    def erased_then_written(recordings: list[Recording]) -> int:
        archiver.log.erase(gone)
        return write(recordings)

    monkeypatch.setattr(archiver.writer, "write", erased_then_written)
    archiver.worker.handle(archiver.entries)
    assert archiver.uids() == [kept]
    assert archiver.log.backlog(archiver.inbox) == 1, "the archivers are told of the tombstone"


def test_many_requests_are_forgotten_together(archiver: Archiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.archive.worker, "MOST_READ", 2)
    monkeypatch.setattr(stages.archive.worker, "READ_AHEAD", 4)
    asked = noted(monkeypatch, archiver.writer, "forget", lambda uids, _: len(uids))
    gone = [archiver.finish() for _ in range(12)]
    archiver.work()
    for uid in gone:
        archiver.log.erase(uid)
    kept = [archiver.finish() for _ in range(4)]
    entries = archiver.log.read(archiver.inbox, archiver.owner.slot, max_entries=2, block_ms=0)
    archiver.worker.handle(entries)
    assert asked == [12] and sorted(archiver.uids()) == sorted(kept)
    assert archiver.log.backlog(archiver.inbox) == archiver.log.num_unarchived() == 0
    assert archiver.log.pending(archiver.inbox, archiver.owner.slot) == []


def test_what_a_dead_archiver_had_read_and_was_to_forget_is_forgotten_together(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [archiver.finish() for _ in range(3)]
    archiver.work()
    for uid in gone:
        archiver.log.erase(uid)
    kept = archiver.finish()
    archiver.read()  # and died
    archiver.worker.handle(archiver.entries[:1])
    assert archiver.uids() == []
    assert [entry.fields["uid"] for entry in archiver.log.pending(archiver.inbox, archiver.owner.slot)] == [kept]


def test_while_the_disk_is_full_requests_are_forgotten(archiver: Archiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.archive.worker, "FULL_RETRY_S", 0.01)
    gone = archiver.finish()
    archiver.work()
    kept, write = [archiver.finish()], archiver.writer.write
    archiver.read()
    kept.append(archiver.finish())
    archiver.log.erase(gone)

    def full_until_it_is_gone(recordings: list[Recording]) -> int:
        if gone in archiver.uids():
            raise ArchiveFull("the disk is full")
        return write(recordings)

    monkeypatch.setattr(archiver.writer, "write", full_until_it_is_gone)
    archiver.worker.handle(archiver.entries)
    assert sorted(archiver.uids()) == sorted(kept) and archiver.log.backlog(archiver.inbox) == 0


def test_while_another_archiver_writes_to_a_file_forgetting_waits(archiver: Archiver) -> None:
    gone = archiver.finish()
    archiver.work()
    archiver.log.erase(gone)
    (volume,) = volumes(archiver.folder)
    archiver.read()
    thread = threading.Thread(target=archiver.worker.handle, args=(archiver.entries,))
    with closing(sqlite3.connect(volume.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and archiver.uids() == [gone]
    thread.join()
    assert archiver.uids() == []


def test_what_expired_before_it_was_read_is_counted(archiver: Archiver) -> None:
    archiver.log.limits = RequestLimits(retention_s=0.03)
    gone = archiver.finish()
    archiver.read()
    until(lambda: not archiver.log.histories([gone])[0])
    archiver.log.limits = RequestLimits()
    with capture_logs() as lines:
        archiver.worker.handle(archiver.entries)
    archiver.worker.look()
    assert [line["requests"] for line in lines if line["event"] == "not_archived"] == [1]
    assert (archiver.log.num_unarchived(), count_of(archiver.measures, ARCHIVE_UNARCHIVED)) == (1, 1)
    assert archiver.uids() == [] and archiver.log.backlog(archiver.inbox) == 0


def test_a_full_disk_stops_archiving_with_one_line_and_a_metric_until_there_is_room(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.archive.worker, "FULL_RETRY_S", 0.01)
    uid, tries, stopped, backlogs = archiver.finish(), 0, list[float](), list[float]()
    write = archiver.writer.write

    def full(recordings: list[Recording]) -> int:
        nonlocal tries
        tries += 1
        stopped.append(count_of(archiver.measures, ARCHIVE_STOPPED))
        backlogs.append(count_of(archiver.measures, ARCHIVE_BACKLOG))
        if tries < 4:
            archiver.finish()  # serving goes on
            raise ArchiveFull("the disk is full")
        return write(recordings)

    monkeypatch.setattr(archiver.writer, "write", full)
    with capture_logs() as lines:
        archiver.work()
    assert [line["error"] for line in lines if line["event"] == "archiving_stopped"] == ["the disk is full"]
    assert stopped == [0, 1, 1, 1, 0] and count_of(archiver.measures, ARCHIVE_STOPPED) == 0
    assert backlogs[:4] == [0, 2, 3, 4], "what waits is counted also meanwhile"
    assert uid in archiver.uids() and len(archiver.uids()) == 4


def test_an_archiver_that_is_to_end_while_the_disk_is_full_leaves_the_rest_pending(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiver.finish()

    def full(_: list[Recording]) -> int:
        archiver.stop.set()
        raise ArchiveFull("the disk is full")

    monkeypatch.setattr(archiver.writer, "write", full)
    archiver.work()
    assert archiver.log.pending(archiver.inbox, archiver.owner.slot) == archiver.entries != []


def test_an_entry_that_ends_its_archiver_again_and_again_becomes_a_dead_letter(archiver: Archiver) -> None:
    archiver.finish()
    archiver.read()
    (entry,) = archiver.entries
    archiver.worker.bury(entry, 4)
    (letter,) = archiver.log.dead_letters(10)
    assert letter.fields["stage"] == "archive" and "ended its archiver 4 times" in letter.fields["error"]
    assert archiver.log.backlog(archiver.inbox) == 0


def test_a_namespace_has_one_archive(archiver: Archiver) -> None:
    other = make_archive(archiver.folder / "other", "test")
    with pytest.raises(ConfigError, match=rf"is archived in {archiver.id}; name that folder, or end its archiving"):
        open_archive(archiver.log, other)
    open_archive(archiver.log, archiver.id)
    archiver.log.close_archive()
    open_archive(archiver.log, other)


def config_of(folder: Path) -> ArchiveConfig:
    return ArchiveConfig(WorkerConfig(), LogConfig(), FilesConfig(str(folder)))


def test_an_archiver_that_is_to_end_first_writes_what_is_there(archiver: Archiver) -> None:
    expected = sorted(archiver.finish() for _ in range(40))
    archiver.stop.set()
    serve(archiver.log, archiver.lease, config_of(archiver.folder), archiver.id, archiver.stop)
    assert sorted(archiver.uids()) == expected


def test_an_archiver_goes_on_when_the_log_has_lost_its_stream(
    another_log: Callable[[], RedisLog], archiver: Archiver
) -> None:
    own = another_log()
    config = config_of(archiver.folder)
    thread = threading.Thread(target=serve, args=(own, archiver.lease, config, archiver.id, archiver.stop))
    thread.start()

    def has_group() -> bool:
        try:
            return archiver.log.pending(archiver.inbox, archiver.owner.slot) == []
        except GroupLost:
            return False

    try:
        first = archiver.finish()
        until(lambda: archiver.uids() == [first])
        archiver.log.close_archive()
        until(has_group)
        assert archiver.log.open_archive("another") == archiver.id
        second = archiver.finish()
        until(lambda: sorted(archiver.uids()) == sorted([first, second]))
    finally:
        archiver.stop.set()
        thread.join()


class Killed:
    """Two archivers and the Redis of a server, of which somebody dies again and again."""

    def __init__(self, folder: Path) -> None:
        self.redis = EmbeddedRedis(folder / "data")
        self._write_at_once()
        self.folder = folder / "archive"
        self.flags = ["--to", str(self.folder), "--redis-url", self.redis.url, "--lease", "0.5"]
        self.archivers = [self._start(slot) for slot in (0, 1)]

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        words = [*PROGRAM, "stage", "archive", "--slot", str(slot), *self.flags]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _write_at_once(self) -> None:
        """Have Redis lose nothing when it is killed: with `everysec` it may acknowledge 2 s before it writes."""
        assert command(self.redis.url, "CONFIG", "SET", "appendfsync", "no") == b"OK"

    def kill(self, slots: Sequence[int], *, redis: bool) -> None:
        """Kill archivers, and perhaps Redis, at the same moment; start all again."""
        for slot in slots:
            self.archivers[slot].kill()
        if redis:
            self.redis.process.kill()
            self.redis.process.wait()
            self.redis.watch()
            self._write_at_once()
        for slot in slots:
            self.archivers[slot].wait()
            self.archivers[slot] = self._start(slot)

    def close(self) -> None:
        for process in self.archivers:
            process.kill()
            process.wait()
        self.redis.stop()


@pytest.mark.slow
def test_whoever_is_killed_every_request_that_ended_is_in_the_files_once(tmp_path: Path) -> None:
    """Archivers each second; at night for a minute, Redis and all together, too: while a disk is slow, that forgets the
    last second, so a request may live again."""
    chance, ended, killed = random.Random(7), list[str](), Killed(tmp_path)
    with contextlib.closing(RedisLog(killed.redis.url, Names())) as log:
        until(lambda: log.backlog(ended_inbox(log.names)) == 0 and len(log.statuses(ARCHIVE)) == 2, timeout_s=30)
        kill_s = [time.monotonic() + number for number in range(1, KILLS_S + 1)]
        while kill_s:
            uid = new_uid()
            prompt = chance.randbytes(chance.randrange(1, 20_000)).hex()
            event = Submitted(endpoint="e", frontend="web-0", prompt=prompt, sampling=SamplingParams())
            again(lambda uid=uid, event=event: log.submit(uid, [event]))  # type: ignore[misc]
            again(lambda uid=uid: log.end(uid, Cancelled(by="client"), frontend="web-0"))  # type: ignore[misc]
            ended.append(uid)
            time.sleep(0.005)
            if time.monotonic() > kill_s[0]:
                kill_s.pop(0)
                killed.kill(chance.choice([(0,), (1,), (0, 1)]), redis=AT_NIGHT and chance.random() < 0.3)
        until(lambda: log.backlog(ended_inbox(log.names)) == 0, timeout_s=60)
        assert log.num_unarchived() == 0
        histories = log.histories(ended)
    assert all(histories) and len(ended) > 5 * KILLS_S
    over = [place for place, history in enumerate(histories) if history[-1].id == SEAL]
    assert len(over) == len(ended) if not AT_NIGHT else len(over) > 0.9 * len(ended)
    ended, histories = [ended[place] for place in over], [histories[place] for place in over]
    killed.close()
    places = [place.uid for volume in volumes(killed.folder) for place in volume.places()]
    assert sorted(places) == sorted(ended)
    found = Archive(killed.folder).read(ended)
    assert [found[uid].entries for uid in ended] == [tuple(history) for history in histories]


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("point", [name for name in POINTS if name.startswith("archive.")])
def test_an_archiver_that_is_killed_while_it_forgets_is_followed_by_one_that_does_the_rest(
    point: str, tmp_path: Path
) -> None:
    redis, folder = EmbeddedRedis(tmp_path / "data"), tmp_path / "archive"
    words = [*PROGRAM, "stage", "archive", "--slot", "0", "--to", str(folder), "--redis-url", redis.url, "--lease", "1"]
    armed = {VARIABLE: f"{point}=exit", FOLDER_VARIABLE: str(tmp_path)}
    with contextlib.closing(RedisLog(redis.url, Names())) as log:
        with subprocess.Popen(words) as writer:
            until(lambda: len(log.statuses(ARCHIVE)) == 1, timeout_s=30)
            kept, gone = new_uid(), new_uid()
            for uid in (kept, gone):
                log.submit(uid, [Submitted(endpoint="e", frontend="web-0", prompt=uid, sampling=SamplingParams())])
                log.end(uid, Cancelled(by="client"), frontend="web-0")
            until(lambda: sorted(uids(folder)) == sorted([kept, gone]))
            writer.terminate()
        log.erase(gone)
        with subprocess.Popen(words, env=os.environ | armed) as killed:
            assert killed.wait(30) == -9
        assert sorted(uids(folder)) == sorted([kept, gone] if point == "archive.before_commit" else [kept])
        with subprocess.Popen(words) as successor:
            until(lambda: log.backlog(ended_inbox(log.names)) == 0, timeout_s=30)
            successor.terminate()
        assert uids(folder) == [kept]
        assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".sqlite"]
    redis.stop()


def again(commit: Callable[[], object]) -> None:
    """Make a commit that is safe to run twice, as soon as Redis is there."""
    while True:
        try:
            commit()
            return
        except LogUnavailable:
            time.sleep(0.01)
