"""Usage that Redis has lost is counted again from the archive, by the rules of the log, and nothing of it twice."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import add
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.calls import failing_once, noted
from support.lived_requests import LivedRequests
from support.old_archive import written_as_before
from support.redis_servers import command, until

import stages.archive.recount
from ops.serve.processes import PROGRAM
from pipeline.archive.folder import make_archive
from pipeline.archive.reader import Archive
from pipeline.archive.volume import Volume, hour_of
from pipeline.archive.writer import Writer
from pipeline.errors import Fenced, LogUnavailable
from pipeline.events import (
    Admitted,
    Cancelled,
    Failed,
    Presentation,
    Replay,
    SamplingParams,
    Submitted,
    Tokenized,
    new_uid,
)
from pipeline.log.config import LogConfig
from pipeline.log.operations.usage import DAY_MS, KEPT_DAYS
from pipeline.log.protocol import Entry, Inbox, Used
from pipeline.log.redis import RedisLog
from pipeline.names import ARCHIVE, PROBE, Names
from pipeline.process.config import WorkerConfig
from pipeline.recording import Recording
from pipeline.stage.slots import SlotLease, acquire_slot
from pipeline.stage.worker import Stop
from stages.archive.config import ArchiveConfig, FilesConfig
from stages.archive.recount import recount, recounting, used_by
from stages.archive.worker import open_archive, serve

LEASE_MS = 60_000
TODAY = int(time.time() * 1000) // DAY_MS
CANCELLED, FAILED = Cancelled(by="client"), Failed(status=400, code="invalid_value", message="No.")
Usage = dict[tuple[str, int, str], Used]


class Place:
    """A log, and its archive."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.log = url, folder, RedisLog(url, Names())
        self.id = make_archive(folder, self.log.names.namespace)
        self.begin()

    def begin(self) -> None:
        """Have an archiver begin."""
        open_archive(self.log, self.id)
        self.lived = LivedRequests(self.log)
        self.owner = acquire_slot(self.log, ARCHIVE, LEASE_MS)
        self.writer = Writer(self.folder, self.owner.slot, self.owner.epoch)

    def lose(self) -> None:
        """Have Redis lose its data, and the next archiver begin."""
        command(self.url, "FLUSHALL")
        self.begin()

    def finish(self, owner: str = "alice") -> str:
        """Have a request end; return its uid."""
        self.lived.owner = owner
        return self.lived.answered("He", "llo")

    def submit(self, count: int = 1, **fields: Any) -> list[str]:
        """Begin requests, up to the tokenizer."""
        uid = new_uid()
        given = {"endpoint": "e", "frontend": "web-0", "owner": "alice", "prompt": "Hi", "sampling": SamplingParams()}
        self.log.submit(uid, [Submitted(**given | fields)] * count)  # type: ignore[arg-type]
        for entry in self.log.read(Inbox.submitted(self.log.names), "tokenize-0", max_entries=count, block_ms=0):
            self.log.tokenized(entry, Tokenized(token_ids=(5, 6, 7, 8), fingerprint="t", by="tokenize-0"))
        return [uid] if count == 1 else [f"{uid}.{index}" for index in range(count)]

    def admit(self, uid: str) -> None:
        event = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w1", cached_tokens=3, prompt_tokens=4)
        self.lived.mark(uid, 0, event)

    def recordings(self, uids: Iterable[str]) -> list[Recording]:
        uids = [*uids]
        return [Recording(uid, tuple(history)) for uid, history in zip(uids, self.log.histories(uids), strict=True)]

    def archive(self, *uids: str) -> None:
        assert self.writer.write(self.recordings(uids)) == len(uids)

    def usage(self) -> Usage:
        return self.log.usage(["", "alice", "bob"], range(TODAY - KEPT_DAYS, TODAY + 2))

    def recount(self) -> None:
        """Recount as an archiver does that has nothing else to do."""
        with recounting(self.log.another(), self.owner, self.folder):
            until(self.log.is_recounted)


@pytest.fixture
def place(redis_url: str, tmp_path: Path) -> Iterator[Place]:
    place = Place(redis_url, tmp_path / "archive")
    with contextlib.closing(place.log):
        yield place


def summed(recordings: Iterable[Recording]) -> Usage:
    found = defaultdict[tuple[str, int, str], Used](Used)
    for owner, day, model, used in filter(None, map(used_by, recordings)):
        found[owner, day, model] = Used(*map(add, found[owner, day, model], used))
    return dict(found)


def a_mix(place: Place) -> list[str]:
    """Have requests end in all ways; return them."""
    uids = [place.finish(), place.finish("bob"), place.finish("")]
    siblings = place.submit(4, model="m", presentation=Presentation(choices=2))
    for uid in siblings:
        place.admit(uid)
    for uid in siblings[:3]:
        place.lived.tokens(uid, "He", "llo", "!")
        place.lived.finished(uid, 3)
    place.lived.ended(siblings[3], FAILED)
    for end in (CANCELLED, FAILED):
        never, admitted = place.submit(model="m"), place.submit(model="m")
        place.admit(admitted[0])
        place.lived.tokens(admitted[0], "He")
        for uid in (*never, *admitted):
            place.lived.ended(uid, end)
        uids += never + admitted
    probes = place.submit(endpoint=PROBE) + place.submit(replay=Replay(of=uids[0])) + place.submit(task="tokenize")
    for uid in probes:
        place.lived.ended(uid, CANCELLED)
    return [*uids, *siblings, *probes]


def test_a_recorded_request_has_used_what_the_log_has_counted(place: Place) -> None:
    uids = a_mix(place)
    counted = place.usage()
    assert summed(place.recordings(uids)) == counted
    assert {(owner, model) for owner, _, model in counted} == {
        ("alice", "m"), ("alice", "nonsense"), ("bob", "nonsense"), ("", "nonsense")
    }  # fmt: skip
    of_alice = next(used for (owner, _, model), used in counted.items() if (owner, model) == ("alice", "m"))
    assert of_alice[:2] == (8, 3) and of_alice.output_tokens == 11
    assert of_alice.cached_tokens == 2 + 2 + 3 + 3


def test_what_runs_does_not_decode_or_was_erased_has_used_nothing(place: Place) -> None:
    (whole,) = place.recordings([place.finish()])
    first, *others = whole.entries
    nonsense = Entry(first.id, {**first.fields, "sampling": "nonsense"})
    assert used_by(whole) is not None
    for entries in ((first, *others[:-1]), (nonsense, *others), others[-1:], (first,), ()):
        assert used_by(Recording(whole.uid, tuple(entries))) is None


def test_of_an_older_version_the_length_of_the_prompt_is_that_of_its_tokens(place: Place) -> None:
    (uid,) = place.submit()
    place.admit(uid)
    place.lived.ended(uid, CANCELLED)
    (now,) = place.recordings([uid])
    older = [Entry(entry.id, {k: v for k, v in entry.fields.items() if k != "prompt_tokens"}) for entry in now.entries]
    assert used_by(Recording(uid, tuple(older))) == used_by(now) == ("alice", TODAY, "", Used(1, 0, 4, 3, 0))


def test_after_a_loss_the_next_archiver_restores_usage(place: Place) -> None:
    place.archive(*a_mix(place))
    before = place.usage()
    place.lose()
    assert place.usage() == {}
    place.recount()
    assert place.usage() == before
    assert sorted(place.log.users(TODAY - 1)) == ["", "alice", "bob"]


def test_requests_that_end_during_the_recount_are_not_counted_twice(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = [place.finish() for _ in range(3)]
    place.archive(*uids)
    place.lose()
    uids.append(place.finish())  # before the files are read ..
    place.archive(uids[-1])
    recordings, told = Volume.recordings, list[Used]()

    def slow(volume: Volume) -> Iterator[Recording]:
        for recording in recordings(volume):
            if len(uids) < 6:
                uids.append(place.finish())  # .. while they are, so that it comes last ..
                place.archive(uids[-1])
            yield recording

    monkeypatch.setattr(Volume, "recordings", slow)
    assert recount(place.log, place.folder, lambda: False) == 6
    told.append(place.usage()["alice", TODAY, "nonsense"])
    place.archive(place.finish())  # .. and afterwards
    recount(place.log, place.folder, lambda: False)
    told.append(place.usage()["alice", TODAY, "nonsense"])
    assert told == [Used(6, 0, 18, 12, 12), Used(7, 0, 21, 14, 14)]


def moved(recording: Recording, days: int) -> Recording:
    """Return a request of *days* ago."""
    fields = [{**entry.fields, "ms": str(int(entry.fields["ms"]) - days * DAY_MS)} for entry in recording.entries]
    return Recording(recording.uid, tuple(Entry(e.id, f) for e, f in zip(recording.entries, fields, strict=True)))


def volume_of(place: Place, days: int, slot: str = ARCHIVE + "-0") -> Volume:
    return Volume(hour_of(time.time() * 1000 - days * DAY_MS), slot, 1, place.folder)


def test_the_newest_days_come_first_and_those_that_are_too_old_do_not_come(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for days, uid in ((days, place.finish()) for days in (0, 1, 2, KEPT_DAYS - 1, KEPT_DAYS, 300)):
        volume_of(place, days).append([moved(each, days) for each in place.recordings([uid])])
    (late,) = place.recordings([place.finish("bob")])
    volume_of(place, 0).append([moved(late, 2)])  # as an import is
    place.lose()
    asked = noted(monkeypatch, place.log, "recount", lambda owner, day, used: (owner, TODAY - day))
    assert recount(place.log, place.folder, lambda: False) == 5
    assert sorted(asked[:2]) == [("alice", 0), ("bob", 2)]
    assert asked[2:] == [("alice", 1), ("alice", 2), ("alice", KEPT_DAYS - 1)]
    assert {key[:2] for key in place.usage()} == {(owner, TODAY - days) for owner, days in asked}


def test_a_request_in_two_files_is_counted_once(place: Place) -> None:
    (one,) = place.recordings([place.finish()])
    volume_of(place, 0).append([one])
    volume_of(place, 0, ARCHIVE + "-1").append([one])
    before = place.usage()
    place.lose()
    place.recount()
    assert place.usage() == before


def test_it_is_done_once_in_the_life_of_a_log_by_the_first_archiver(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.archive(place.finish())
    before = place.usage()
    place.recount()
    asked = noted(monkeypatch, stages.archive.recount, "recount")
    second = acquire_slot(place.log, ARCHIVE, LEASE_MS)
    with recounting(place.log.another(), place.owner, place.folder):
        pass
    place.lose()
    with recounting(place.log.another(), second, place.folder):
        pass
    assert asked == [] and place.usage() == {}
    place.recount()
    assert len(asked) == 1 and place.usage() == before


def test_a_stop_ends_it_and_the_next_archiver_begins_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.archive(place.finish())
    before = place.usage()
    place.lose()
    begun, recordings = threading.Event(), Volume.recordings

    def endless(volume: Volume) -> Iterator[Recording]:
        (one,) = recordings(volume)
        for number in itertools.count():
            yield Recording(f"{one.uid}.{number}", one.entries)
            begun.set()

    with monkeypatch.context() as patch:
        patch.setattr(Volume, "recordings", endless)
        with recounting(place.log.another(), place.owner, place.folder):
            assert begun.wait(10)
        assert not any(thread.name == "recount" for thread in threading.enumerate())
    assert not place.log.is_recounted() and place.usage() == {}
    place.recount()
    assert place.usage() == before


def test_a_loss_meanwhile_is_not_taken_for_recounted(place: Place) -> None:
    owner = place.owner
    place.log.recounted(owner)
    assert place.log.is_recounted()
    place.lose()
    with pytest.raises(Fenced):
        place.log.recounted(owner)
    assert not place.log.is_recounted()


def test_after_an_error_it_begins_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.archive.recount, "AGAIN_S", 0.0)
    place.archive(place.finish())
    before = place.usage()
    place.lose()
    failing_once(monkeypatch, RedisLog, "recount", LogUnavailable("gone"))
    failing_once(monkeypatch, stages.archive.recount, "volumes", PermissionError(13, "Permission denied"))
    with capture_logs() as lines:
        place.recount()
    assert [line["event"] for line in lines] == ["usage_not_recounted", "usage_not_recounted", "usage_recounted"]
    assert place.usage() == before


def test_a_damaged_file_is_one_line_and_all_others_are_counted(place: Place) -> None:
    uids = [place.finish() for _ in range(3)]
    place.archive(uids[0])
    index, _ = written_as_before(place.folder, volume_of(place, 1).path.stem, [place.recordings(uids[1:])])
    index.write_bytes(b"nonsense\n" + index.read_bytes())
    volume_of(place, 2).path.write_bytes(b"nonsense" * 1000)
    volume_of(place, 3).append([moved(each, 3) for each in place.recordings(uids[2:])])
    place.lose()
    with capture_logs() as lines:
        place.recount()
    refused = [line["file"] for line in lines if line["event"] == "archive_file_refused"]
    assert [Path(file).suffix for file in refused] == [".zst", ".sqlite"]
    assert {key[1]: used.requests for key, used in place.usage().items()} == {TODAY: 1, TODAY - 3: 1}


@pytest.mark.slow
def test_an_archiver_that_runs_restores_usage_after_a_loss(place: Place) -> None:
    place.archive(*a_mix(place))
    before = place.usage()
    place.log.release(place.owner)
    flags = ["--to", str(place.folder), "--redis-url", place.url, "--lease", "0.5"]
    with subprocess.Popen([*PROGRAM, "stage", "archive", *flags]) as archiver:
        until(place.log.is_recounted, timeout_s=30)
        command(place.url, "FLUSHALL")
        until(place.log.is_recounted)
        archiver.terminate()
    assert place.usage() == before


def test_while_the_archive_cannot_be_read_archiving_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> list[Volume]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(stages.archive.recount, "volumes", refuse)
    stop, own, lease = Stop(), place.log.another(), SlotLease(place.log.another(), place.owner, LEASE_MS)
    config = ArchiveConfig(WorkerConfig(), LogConfig(), FilesConfig(str(place.folder)))
    thread = threading.Thread(target=serve, args=(own, lease, config, place.id, stop))
    with capture_logs() as lines, recounting(place.log.another(), place.owner, place.folder):
        until(lambda: lines)
        thread.start()
        uid = place.finish()
        until(lambda: Archive(place.folder).find([uid]))
        stop.set()
        thread.join()
    lease.leave()
    own.close()
    (error,) = [line["error"] for line in lines if line["event"] == "usage_not_recounted"]
    assert "Permission denied" in error
