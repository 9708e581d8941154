"""Files in the folder of an archive that no archiver wrote: they hold nobody up, take little memory, and hide nothing.

Only the public reader and writer are used: the format may change.
"""

from __future__ import annotations

import os
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zstandard
from support.old_archive import written_as_before
from support.selection import by_night

from pipeline.archive import old_volume, volume
from pipeline.archive.folder import archive_id, make_archive
from pipeline.archive.reader import Archive, open_archive
from pipeline.archive.writer import Writer
from pipeline.errors import ConfigError, LogError
from pipeline.events import new_uid
from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.recording import MOST_BYTES as MOST_LINE
from pipeline.recording import Recording

NOW_S = 1_800_000_000.0
FRAME_BYTES = by_night(4 << 20, MOST_LINE)
MOST_BYTES = by_night(80 << 20, 3 * MOST_LINE)
"""Memory that a reader may take, whatever is there."""
BOMB_BYTES = by_night(200 << 20, 3 << 30)


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """By day no frame may hold more than FRAME_BYTES."""
    monkeypatch.setattr(volume, "MOST_BYTES", FRAME_BYTES)
    monkeypatch.setattr(old_volume, "MOST_TEXT_BYTES", FRAME_BYTES)


def request(ms: str = f"{int(NOW_S * 1000)}", text: str = "") -> Recording:
    first, last = {"kind": "submitted", "ms": ms, "prompt": text}, {"kind": "finished", "ms": ms}
    return Recording(new_uid(), (Entry("0-1", first), Entry(SEAL, last)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_archive(tmp_path / "archive", "minisgl")
    return tmp_path / "archive"


def written(folder: Path, *requests: Recording, slot: str = "archive-0") -> list[Path]:
    """Archive *requests*; return the files that are new."""
    before = set(folder.iterdir())
    Writer(folder, slot, 1, clock_s=lambda: NOW_S).write(requests)
    return sorted(set(folder.iterdir()) - before)


def written_before(folder: Path, *requests: Recording) -> list[Path]:
    """The same, as a version before 0.2 wrote them."""
    return written_as_before(folder, "2027011508-archive-0-1", [requests])


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def asked(folder: Path, *uids: str) -> dict[str, Recording]:
    """Ask in every way that there is; return what is found of *uids*, as a GET does."""
    archive = Archive(folder)
    listed = archive.listed(0, 1 << 60)
    newest, _ = archive.newest("~", 100)
    assert {place.uid for place in listed} == newest.keys()
    assert {each.uid for each in archive.copies()} >= newest.keys()
    return archive.read(uids)


def link(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.moved"))
    path.symlink_to(f"{path.name}.moved")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)


def nonsense(path: Path) -> None:
    path.write_bytes(os.urandom(50_000))


FOREIGN = (link, pipe, device)


@pytest.mark.parametrize(
    ("spoil", "which"), [*((spoil, which) for spoil in FOREIGN for which in range(3)), (large, 0), (nonsense, 0)]
)
def test_what_is_no_file_of_ours_holds_nobody_up_and_other_files_are_read(
    folder: Path, spoil: Callable[[Path], None], which: int
) -> None:
    lost, kept = request(), request()
    spoil([*written(folder, lost), *written_before(folder, lost)][which])
    written(folder, kept, slot="archive-1")
    with little_memory():
        found = asked(folder, kept.uid, lost.uid)
    assert found.pop(kept.uid) == kept
    assert found in ({}, {lost.uid: lost}), "it was in two files"
    successor = Writer(folder, "archive-0", 2, clock_s=lambda: NOW_S)
    successor.begin()
    assert successor.write([more := request()]) == 1
    assert Archive(folder).read([more.uid, kept.uid]) == {more.uid: more, kept.uid: kept}


@pytest.mark.parametrize("spoil", FOREIGN)
def test_an_archiver_does_not_write_through_a_link_or_into_a_pipe(
    folder: Path, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    files = written(folder, request())
    for file in files:
        spoil(file)
    with pytest.raises(LogError):
        written(folder, request())
    assert Writer(folder, "archive-0", 1, clock_s=lambda: NOW_S + 86400).tidy(retain_s=1) == []


def test_a_file_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = request()
    files = written(folder, kept)
    monkeypatch.setattr("os.geteuid", lambda: 4321)  # the folder and its files belong to somebody else
    assert asked(folder, kept.uid) == {kept.uid: kept}, "to one and the same"
    if os.getuid() == 0:
        for file in files:
            os.chown(file, 1234, 1234)
        assert asked(folder, kept.uid) == {}


@pytest.mark.parametrize("spoil", [*FOREIGN, large])
def test_the_file_that_names_an_archive_is_a_small_file_of_ours(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder / "archive.json")
    with little_memory(), pytest.raises(ConfigError, match=r"archive\.json"):
        archive_id(folder)


def test_the_folder_of_an_archive_may_be_a_link(folder: Path) -> None:
    kept = request()
    written(folder, kept)
    folder.with_name("link").symlink_to(folder)
    assert open_archive(str(folder.with_name("link"))).read([kept.uid]) == {kept.uid: kept}


def bomb(*, says_size: bool) -> bytes:
    zeros = bytes(1 << 20)
    frame = zstandard.ZstdCompressor(write_content_size=says_size).compressobj(size=BOMB_BYTES if says_size else -1)
    return b"".join((*(frame.compress(zeros) for _ in range(BOMB_BYTES >> 20)), frame.flush()))


@pytest.mark.parametrize("says_size", [True, False])
def test_a_frame_that_unpacks_to_gigabytes_is_damaged(folder: Path, says_size: bool) -> None:
    before, lost = request(), request()
    content = bomb(says_size=says_size)
    assert len(content) < 400_000
    (file,) = written(folder, before, lost)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE requests SET frame = ? WHERE uid = ?", (content, lost.uid))
    with little_memory():
        listed = [place.uid for place in Archive(folder).listed(0, 1 << 60)]
        assert sorted(listed) == sorted((before.uid, lost.uid))
        assert [*Archive(folder).copies()] == [before]
        with pytest.raises(LogError, match=lost.uid):
            Archive(folder).read([lost.uid])


@pytest.mark.parametrize("says_size", [True, False])
def test_a_frame_of_an_old_file_that_unpacks_to_gigabytes_is_damaged(folder: Path, says_size: bool) -> None:
    before, after = request(), request()
    (file,) = [path for path in written_before(folder, before) if path.suffix == ".zst"]
    with file.open("ab") as output:
        output.write(bomb(says_size=says_size))
    written(folder, after, slot="archive-1")
    with little_memory():
        assert asked(folder, before.uid, after.uid) == {before.uid: before, after.uid: after}


@pytest.mark.parametrize(
    "harm",
    [
        """CREATE VIEW requests AS WITH RECURSIVE a(uid) AS (SELECT 'a' UNION ALL SELECT uid || 'a' FROM a)
        SELECT uid, 1 AS made_ms, 2 AS ended_ms, x'' AS frame FROM a""",
        "CREATE TABLE requests (uid TEXT, made_ms AS (length(zeroblob(1000000000))), ended_ms, frame)",
        "CREATE TABLE other (a)",
    ],
)
def test_a_database_with_other_tables_than_ours_is_passed_by(folder: Path, harm: str) -> None:
    kept = request()
    written(folder, kept)
    with closing(sqlite3.connect(folder / "2027011508-archive-5-1.sqlite")) as database, database:
        database.execute(harm)
        database.execute("PRAGMA user_version=1")
    with little_memory():
        assert asked(folder, kept.uid) == {kept.uid: kept}


def test_values_that_no_archiver_writes_are_passed_by(folder: Path) -> None:
    kept = request()
    (file,) = written(folder, kept)
    with closing(sqlite3.connect(file)) as database, database:
        rows = [(None, 1, 2, b""), (b"\xff", 1, 2, b""), ("soon", "now", 2, b""), ("text", 1, 2.5, "text")]
        database.executemany("INSERT INTO requests VALUES (?, ?, ?, ?)", rows)
    assert asked(folder, kept.uid, "soon") == {kept.uid: kept}


def test_an_index_that_names_a_bomb_or_that_is_endless_takes_little_memory(folder: Path) -> None:
    kept = request()
    index, packed = sorted(written_before(folder, kept))
    content, line = bomb(says_size=True), index.read_bytes().split()
    packed.write_bytes(content)
    index.write_bytes(b" ".join((*line[:3], b"0", b"%d" % len(content))) + b"\n")
    with little_memory(), pytest.raises(LogError):
        Archive(folder).read([kept.uid])
    large(index)
    with little_memory():
        assert Archive(folder).read([kept.uid]) == {}


@pytest.mark.parametrize("ms", ["900000000000000000", "9" * 5000, "soon", "-1"])
def test_a_request_with_times_that_cannot_be_is_found_by_its_uid(folder: Path, ms: str) -> None:
    odd, kept = request(ms), request()
    written(folder, odd, kept)
    assert asked(folder, odd.uid, kept.uid) == {odd.uid: odd, kept.uid: kept}


@pytest.mark.parametrize("hour", ["9999999999", "2026023299", "0000010100", "२०२६०११५०८"])
def test_a_file_with_the_name_of_no_hour_is_passed_by(folder: Path, hour: str) -> None:
    kept = request()
    written(folder, kept)
    for suffix in ("sqlite", "zst"):
        (folder / f"{hour}-archive-7-1.{suffix}").write_bytes(b"nothing")
    assert asked(folder, kept.uid) == {kept.uid: kept}
    assert Archive(folder).since_ms() == NOW_S * 1000


def test_a_request_that_no_reader_would_read_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.archive.volume.MOST_BYTES", 1000)
    kept, long = request(), request(text="a" * 1000)
    written(folder, kept, long)
    assert asked(folder, kept.uid, long.uid) == {kept.uid: kept}
