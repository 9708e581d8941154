"""Requests in files: what is written is found, whatever died while it was written."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from pipeline.archive.folder import archive_id, make_archive
from pipeline.archive.reader import Archive, volumes
from pipeline.archive.volume import ArchiveDamaged, Volume, VolumeBusy
from pipeline.archive.writer import ArchiveFull, Writer
from pipeline.errors import ConfigError
from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.process.failpoints import FOLDER_VARIABLE, POINTS, VARIABLE, arm
from pipeline.recording import Recording, decode_recording

NOW_S = 1_800_000_000.0
"""Where the clock of the tests stands: 2027-01-15 08:00 UTC."""


def uid_of(number: int, made_s: float = NOW_S) -> str:
    return f"{int(made_s * 1000):012x}7abc8{number:015x}"


def request(number: int, *, made_s: float = NOW_S, took_ms: int = 500, text: str = "") -> Recording:
    made_ms = int(made_s * 1000)
    first = {"kind": "submitted", "ms": str(made_ms), "prompt": text or f"prompt {number}"}
    last = {"kind": "finished", "ms": str(made_ms + took_ms)}
    return Recording(uid_of(number, made_s), (Entry("0-1", first), Entry(SEAL, last)))


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(tmp_path: Path, clock: Clock) -> Writer:
    return Writer(tmp_path, "archive-0", 1, clock_s=clock)


def uids(folder: Path) -> list[str]:
    return [place.uid for place in Archive(folder).listed(0, 1 << 60)]


def only_volume(folder: Path) -> Volume:
    (volume,) = volumes(folder)
    assert isinstance(volume, Volume)
    return volume


def test_what_is_written_is_read_as_it_was(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(5)]
    assert writer.write(some[:3]) == 3
    assert writer.write(some[3:]) == 2
    archive = Archive(tmp_path)
    assert archive.read([each.uid for each in some]) == {each.uid: each for each in some}
    assert archive.read([uid_of(99), "not a uid", ""]) == {}


def test_the_file_of_an_hour_is_a_database_with_a_row_for_each_request(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(5)]
    writer.write(some[:2])
    writer.write(some[2:])
    path = only_volume(tmp_path).path
    assert path.name == "2027011508-archive-0-1.sqlite" and [path] == list(tmp_path.iterdir())
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT * FROM requests ORDER BY uid").fetchall()
    assert [(uid, made_ms, ended_ms) for uid, made_ms, ended_ms, _ in rows] == [
        (each.uid, int(NOW_S * 1000), int(NOW_S * 1000) + 500) for each in some
    ]
    assert [decode_recording(zstandard.ZstdDecompressor().decompress(frame)) for *_, frame in rows] == some


def test_a_frame_that_is_damaged_or_holds_something_else_is_named(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(3)]
    writer.write(some)
    archive, asked = Archive(tmp_path), [each.uid for each in some]
    other = "UPDATE requests SET frame = (SELECT frame FROM requests WHERE uid = ?) WHERE uid = ?"
    for damage, words in ((other, (asked[0], asked[1])), ("UPDATE requests SET frame = 'x' WHERE uid = ?", asked[1:2])):
        with closing(sqlite3.connect(only_volume(tmp_path).path)) as database, database:
            database.execute(damage, words)
        with pytest.raises(ArchiveDamaged, match=asked[1]):
            archive.read(asked)
        assert archive.read([asked[0], asked[2]]) == {each.uid: each for each in (some[0], some[2])}
        assert [each.uid for each in archive.copies()] == [asked[0], asked[2]]


def test_only_their_owner_can_read_the_files(tmp_path: Path, writer: Writer) -> None:
    make_archive(tmp_path / "made", "minisgl")
    writer.write([request(1)])
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) == 2 and {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_requests_are_listed_by_the_time_of_their_submit(tmp_path: Path, writer: Writer, clock: Clock) -> None:
    hours = [request(hour, made_s=NOW_S + 3600 * hour) for hour in range(5)]
    for each in reversed(hours):  # the archiver was late
        clock.now_s += 3600
        writer.write([each])
    assert uids(tmp_path) == [each.uid for each in hours]
    since_ms = int((NOW_S + 3600) * 1000)
    found = Archive(tmp_path).listed(since_ms, since_ms + 2 * 3_600_000)
    assert [place.uid for place in found] == [each.uid for each in hours[1:3]]
    assert (found[0].made_ms, found[0].ended_ms) == (since_ms, since_ms + 500)


def test_what_is_there_is_not_written_again_whoever_wrote_it(tmp_path: Path, writer: Writer) -> None:
    writer.write([request(1)])
    successor = Writer(tmp_path, "archive-1", 4, clock_s=lambda: NOW_S + 7200)
    assert successor.write([request(1), request(2)]) == 1
    assert uids(tmp_path) == [uid_of(1), uid_of(2)]
    assert [len(volume.places()) for volume in volumes(tmp_path)] == [1, 1]


def test_a_request_that_ended_again_replaces_the_older_copy(tmp_path: Path, writer: Writer) -> None:
    writer.write([request(1), request(2)])
    again = request(1, took_ms=900)
    assert Writer(tmp_path, "archive-1", 1, clock_s=lambda: NOW_S).write([again]) == 1
    assert Archive(tmp_path).read([again.uid]) == {again.uid: again}
    assert uids(tmp_path) == [uid_of(1), uid_of(2)]
    assert writer.write([request(1)]) == 0, "the older end"


# kill points


def killed_in_the_middle(folder: Path) -> None:
    """Write in a process that is killed when a part of the pages is in the file."""
    program = f"""
import os, signal, sqlite3
from contextlib import closing
database = sqlite3.connect({str(only_volume(folder).path)!r}, isolation_level=None)
database.execute("PRAGMA cache_size=2")
database.execute("BEGIN IMMEDIATE")
for number in range(400):
    database.execute("INSERT INTO requests VALUES (?, 1, 2, ?)", (f"half {{number}}", os.urandom(20000)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)


def test_what_a_killed_writer_has_half_written_is_taken_back_by_readers_and_successors(
    tmp_path: Path, writer: Writer
) -> None:
    some = [request(number) for number in range(4)]
    writer.write(some[:2])
    path = only_volume(tmp_path).path
    size = path.stat().st_size
    for take_back in (lambda: uids(tmp_path), Writer(tmp_path, "archive-0", 2, clock_s=lambda: NOW_S).begin):
        killed_in_the_middle(tmp_path)
        assert path.stat().st_size > size and path.with_name(path.name + "-journal").exists()
        take_back()
        assert path.stat().st_size == size and [path] == list(tmp_path.iterdir())
        assert Archive(tmp_path).read(uids(tmp_path)) == {each.uid: each for each in some[:2]}
    killed_in_the_middle(tmp_path)
    assert Writer(tmp_path, "archive-0", 1, clock_s=lambda: NOW_S).write(some) == 2
    assert Archive(tmp_path).read(uids(tmp_path)) == {each.uid: each for each in some}


def test_of_a_batch_whose_writer_dies_before_the_commit_nothing_is_there_and_it_can_be_written_again(
    tmp_path: Path,
) -> None:
    folder, fired = tmp_path / "archive", tmp_path / "fired"
    folder.mkdir()
    fired.mkdir()
    some = [request(number) for number in range(3)]

    def write() -> None:
        Writer(folder, "archive-0", 1, clock_s=lambda: NOW_S).write(some)

    arm({VARIABLE: "archive.before_commit=exit", FOLDER_VARIABLE: str(fired)})
    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    arm({})
    assert process.exitcode and uids(folder) == []
    assert Writer(folder, "archive-0", 2, clock_s=lambda: NOW_S).write(some) == 3
    assert Archive(folder).read([each.uid for each in some]) == {each.uid: each for each in some}


def test_a_damaged_file_is_passed_by_and_its_writer_begins_another_one(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(50)]
    writer.write(some)
    Writer(tmp_path, "archive-1", 1, clock_s=lambda: NOW_S).write([request(60)])
    path = tmp_path / "2027011508-archive-0-1.sqlite"
    content = bytearray(path.read_bytes())
    content[16384:] = os.urandom(len(content) - 16384)
    path.write_bytes(content)
    assert uids(tmp_path) == [uid_of(60)]
    assert Archive(tmp_path).newest("~", 10)[0].keys() == {uid_of(60)}
    assert writer.write(some) == 50
    assert Archive(tmp_path).read([each.uid for each in some]) == {each.uid: each for each in some}
    (aside,) = (each for each in tmp_path.iterdir() if ".damaged-" in each.name)
    assert aside.read_bytes() == bytes(content)
    os.utime(aside, (NOW_S - 7200, NOW_S - 7200))
    assert writer.tidy(7300) == [] and aside.exists()
    assert writer.tidy(7100) == [] and not aside.exists()


def test_readers_find_what_was_there_while_somebody_writes_and_two_do_not_write_at_once(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.archive.volume.WRITE_BUSY_S", 0.0)
    writer.write([request(1)])
    tried = list[str]()

    def meanwhile(name: str) -> None:
        if not tried:
            tried.append(name)
            assert uids(tmp_path) == [uid_of(1)]
            with pytest.raises(VolumeBusy):
                only_volume(tmp_path).append([request(3)])
            Writer(tmp_path, "archive-1", 1, clock_s=lambda: NOW_S).begin()

    monkeypatch.setattr("pipeline.archive.volume.failpoint", meanwhile)
    writer.write([request(2)])
    assert tried and uids(tmp_path) == [uid_of(1), uid_of(2)]


# requests that are to be forgotten


def bytes_of(folder: Path) -> bytes:
    """Return all names and bytes of a folder."""
    return b"".join(path.name.encode() + path.read_bytes() for path in folder.iterdir())


def frames_of(folder: Path, uids: Sequence[str]) -> list[bytes]:
    """Return what the files hold of *uids*, packed."""
    found = list[bytes]()
    for path in folder.iterdir():
        with closing(sqlite3.connect(path)) as database:
            found += [frame for uid, frame in database.execute("SELECT uid, frame FROM requests") if uid in uids]
    return found


def three_hours(folder: Path) -> list[Recording]:
    """Write two requests, and then one more, in each of three hours."""
    some = [request(number, made_s=NOW_S + 3600 * (number // 3)) for number in range(9)]
    for hour in range(3):
        writer = Writer(folder, f"archive-{hour}", 1, clock_s=lambda hour=hour: NOW_S + 3600 * hour)  # type: ignore[misc]
        writer.write(some[3 * hour : 3 * hour + 2])
        writer.write(some[3 * hour + 2 : 3 * hour + 3])
    return some


def test_what_is_forgotten_is_gone_from_all_files_and_all_else_is_as_it_was(tmp_path: Path, writer: Writer) -> None:
    some = three_hours(tmp_path)
    Writer(tmp_path, "archive-7", 1, clock_s=lambda: NOW_S).write([request(0, took_ms=900)])  # it ended again
    gone, kept = [some[0], some[4], some[5]], [some[number] for number in (1, 2, 3, 6, 7, 8)]
    packed = frames_of(tmp_path, [each.uid for each in gone])
    untouched = {path.name: path.read_bytes() for path in tmp_path.glob("2027011510*")}
    assert writer.forget({each.uid for each in gone}) == 4
    for each in gone:
        assert each.uid.encode() not in bytes_of(tmp_path)
    assert len(packed) == 4 and not any(frame in bytes_of(tmp_path) for frame in packed)
    archive = Archive(tmp_path)
    assert archive.read([each.uid for each in some]) == {each.uid: each for each in kept}
    assert [each.uid for each in archive.recordings()] == uids(tmp_path) == [each.uid for each in kept]
    assert {path.name: path.read_bytes() for path in tmp_path.glob("2027011510*")} == untouched
    assert writer.forget({each.uid for each in gone}) == 0
    assert writer.write([gone[0], kept[0]]) == 1, "files can be written to as before"


@pytest.mark.parametrize("point", [name for name in POINTS if name.startswith("archive.")])
def test_killed_while_it_forgets_readers_find_all_others_and_the_next_one_does_the_rest(
    tmp_path: Path, point: str
) -> None:
    folder, fired = tmp_path / "archive", tmp_path / "fired"
    folder.mkdir()
    fired.mkdir()
    some = three_hours(folder)
    gone, kept = some[3], [each for each in some if each is not some[3]]
    arm({VARIABLE: f"{point}=raise", FOLDER_VARIABLE: str(fired)})
    with pytest.raises(RuntimeError, match=point):
        Writer(folder, "archive-0", 2).forget({gone.uid})
    arm({})
    assert (gone.uid.encode() in bytes_of(folder)) == (point == "archive.before_commit")
    found = Archive(folder).read([each.uid for each in some])
    assert {uid: each for uid, each in found.items() if uid != gone.uid} == {each.uid: each for each in kept}
    successor = Writer(folder, "archive-0", 3)
    successor.begin()
    successor.forget({gone.uid})
    assert gone.uid.encode() not in bytes_of(folder)
    assert Archive(folder).read([each.uid for each in some]) == {each.uid: each for each in kept}
    assert [path.suffix for path in folder.iterdir()] == [".sqlite"] * 3


def test_what_is_forgotten_gives_its_room_back(tmp_path: Path, writer: Writer) -> None:
    some = [request(number, text=os.urandom(20_000).hex()) for number in range(20)]
    writer.write(some)
    size = only_volume(tmp_path).num_bytes()
    assert writer.forget({each.uid for each in some[:15]}) == 15
    assert only_volume(tmp_path).num_bytes() < size / 2
    assert writer.forget({each.uid for each in some}) == 5 and uids(tmp_path) == []


def test_what_is_to_be_forgotten_waits_for_a_file_that_cannot_be_read_now(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.archive.volume.BUSY_S", 0.0)
    writer.write([request(1)])
    with closing(sqlite3.connect(only_volume(tmp_path).path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(VolumeBusy):
            writer.forget({uid_of(1)})
    assert writer.forget({uid_of(1)}) == 1


def test_a_round_is_told_before_each_file_that_may_be_written_anew(tmp_path: Path, writer: Writer) -> None:
    some, rounds = three_hours(tmp_path), list[int]()
    writer.forget({each.uid for each in some}, lambda: rounds.append(len(uids(tmp_path))))
    assert rounds == [9, 6, 3]


# room


def test_old_files_are_removed_by_age_and_by_size_and_this_hour_stays(
    tmp_path: Path, writer: Writer, clock: Clock
) -> None:
    for hour in range(5):
        clock.now_s = NOW_S + 3600 * hour
        writer.write([request(hour, made_s=clock.now_s, text=os.urandom(3000).hex())])
    names = [volume.path.name for volume in volumes(tmp_path)]
    assert writer.tidy(0) == []
    assert writer.tidy(2.5 * 3600) == names[:1]
    one = volumes(tmp_path)[0].num_bytes()
    bounded = Writer(tmp_path, "archive-0", 1, max_bytes=2 * one + 100, clock_s=clock)
    assert bounded.tidy(0) == names[1:3]
    assert Writer(tmp_path, "archive-0", 1, max_bytes=1, clock_s=clock).tidy(0.001) == names[3:4]
    assert uids(tmp_path) == [uid_of(4, NOW_S + 4 * 3600)]
    assert writer.num_bytes() == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_archiving_stops_before_the_disk_is_full_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    writer = Writer(small_disk, "archive-0", 1, clock_s=lambda: NOW_S)
    (small_disk / "other").write_bytes(bytes(1 << 20))
    written = list[str]()

    def fill() -> None:
        for number in range(1000):
            writer.write([request(number, text=os.urandom(20_000).hex())])
            written.append(uid_of(number))

    with pytest.raises(ArchiveFull):
        fill()
    assert len(written) > 10 and shutil.disk_usage(small_disk).free > 50_000
    assert uids(small_disk) == written
    with pytest.raises(OSError, match="No space left"):
        only_volume(small_disk).append([request(5000, text=os.urandom(200_000).hex())] * 3)
    writer.begin()
    assert uids(small_disk) == written, "what had begun is taken back"
    (small_disk / "other").unlink()
    assert writer.write([request(5000)]) == 1


def test_forgetting_takes_half_of_what_must_stay_free_and_no_more(small_disk: Path) -> None:
    writer = Writer(small_disk, "archive-0", 1, clock_s=lambda: NOW_S)
    some = [request(number, text=os.urandom(50_000).hex()) for number in range(4)]
    writer.write(some)
    free, size = shutil.disk_usage(small_disk).free, only_volume(small_disk).num_bytes()
    for left in (size + 45_000, size - 90_000):
        (small_disk / "other").write_bytes(bytes(free - left))
        with pytest.raises(ArchiveFull):
            writer.forget({some[0].uid})
    assert Archive(small_disk).read([each.uid for each in some]) == {each.uid: each for each in some}
    (small_disk / "other").write_bytes(bytes(free - size - 80_000))
    assert writer.forget({some[0].uid}) == 1


# whose folder it is


def test_a_folder_has_one_id_whoever_makes_it(tmp_path: Path) -> None:
    assert archive_id(tmp_path) == ""
    made = make_archive(tmp_path / "a" / "b", "minisgl")
    assert made and make_archive(tmp_path / "a" / "b", "minisgl") == archive_id(tmp_path / "a" / "b") == made
    assert make_archive(tmp_path / "c", "minisgl") != made
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["archive.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"[1]", "expected the id"),
        (b'{"v": 1}', "expected the id"),
        (b'{"v": 2, "id": "x"}', "of version 2"),
    ],
)
def test_a_folder_that_is_none_of_ours_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "archive.json").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        make_archive(tmp_path, "minisgl")


def test_a_folder_whose_file_system_has_no_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlocked(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unlocked)
    with pytest.raises(ConfigError, match="locks no files"):
        make_archive(tmp_path, "minisgl")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        make_archive(tmp_path / "file" / "b", "minisgl")
