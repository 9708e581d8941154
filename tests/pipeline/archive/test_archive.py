"""Requests in files: what is written is found, whatever died while it was written."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from support.calls import noted
from support.selection import by_night

from pipeline.archive.folder import archive_id, make_archive
from pipeline.archive.reader import Archive
from pipeline.archive.volume import ArchiveDamaged, Volume, VolumeBusy, volumes
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
    return volume


def test_what_is_written_is_read_as_it_was(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(5)]
    assert writer.write(some[:3]) == 3
    assert writer.write(some[3:]) == 2
    archive = Archive(tmp_path)
    assert archive.read([each.uid for each in some]) == {each.uid: each for each in some}
    assert archive.read([uid_of(99), "not a uid", ""]) == {}


def test_a_file_has_one_frame_for_each_batch_and_zstd_reads_it(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(5)]
    writer.write(some[:2])
    writer.write(some[2:])
    volume = only_volume(tmp_path)
    assert volume.frames.name == "2027011508-archive-0-1.zst"
    assert [place.offset == 0 for place in volume.places()] == [True, True, False, False, False]
    with volume.frames.open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    assert [decode_recording(line) for line in text.splitlines()] == some


def test_a_frame_is_decompressed_once_for_all_its_requests(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [request(number) for number in range(200)]
    for first in range(0, 200, 50):
        writer.write(some[first : first + 50])
    used = noted(monkeypatch, zstandard, "ZstdDecompressor")
    archive = Archive(tmp_path)
    assert [*archive.recordings()] == some
    assert len(used) == 4
    asked = [some[number] for number in (199, 60, 0, 40, 61)]
    assert [*archive.read([each.uid for each in asked]).items()] == [(each.uid, each) for each in asked]
    assert len(used) == 7


def test_a_frame_that_is_damaged_or_holds_something_else_is_named_when_several_are_read(
    tmp_path: Path, writer: Writer
) -> None:
    some = [request(number) for number in range(4)]
    writer.write(some[:2])
    writer.write(some[2:])
    volume = only_volume(tmp_path)
    content, places = volume.frames.read_bytes(), volume.places()
    archive, asked = Archive(tmp_path), [each.uid for each in some]
    volume.frames.write_bytes(content[: places[2].offset + 20] + b"damaged" + content[places[2].offset + 27 :])
    with pytest.raises(ArchiveDamaged, match=str(places[2].offset)):
        archive.read(asked)
    volume.frames.write_bytes(content)
    places[2] = dataclasses.replace(places[2], offset=0, size=places[0].size)
    volume.index.write_bytes(b"".join(place.line() for place in places))
    with pytest.raises(ArchiveDamaged, match=some[2].uid):
        archive.read(asked)


def test_only_their_owner_can_read_the_files(tmp_path: Path, writer: Writer) -> None:
    make_archive(tmp_path / "made", "minisgl")
    writer.write([request(1)])
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) == 3 and {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_a_batch_of_much_text_becomes_several_frames(tmp_path: Path, writer: Writer) -> None:
    some = [request(number, text=f"{number}" * 400_000) for number in range(7)]
    writer.write(some)
    assert len({place.offset for place in only_volume(tmp_path).places()}) == 3
    assert Archive(tmp_path).read([some[6].uid]) == {some[6].uid: some[6]}


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


def everything_but_the_end(volume: Volume, size: int) -> None:
    """Leave the frames as they are when their writer died after *size* bytes; the index has not the last batch."""
    before = volume.places()
    last = before[-1].offset
    os.truncate(volume.frames, size)
    volume.index.write_bytes(b"".join(place.line() for place in before if place.offset < last))


def test_wherever_the_writer_died_its_successor_finds_whole_requests_and_writes_the_rest(
    tmp_path: Path, writer: Writer
) -> None:
    first, second = [request(number) for number in (1, 2)], [request(number) for number in (3, 4)]
    writer.write(first)
    middle = only_volume(tmp_path).frames.stat().st_size
    writer.write(second)
    whole = only_volume(tmp_path).frames.stat().st_size
    for size in {*range(middle, whole, by_night(17, 1)), middle + 1, whole - 1, whole}:
        folder = tmp_path / f"{size}"
        folder.mkdir()
        for name in (only_volume(tmp_path).frames.name, only_volume(tmp_path).index.name):
            shutil.copy(tmp_path / name, folder)
        volume = only_volume(folder)
        everything_but_the_end(volume, size)
        kept = first + (second if size == whole else [])
        assert uids(folder) == [each.uid for each in kept], "a reader needs no successor"
        successor = Writer(folder, "archive-0", 2, clock_s=lambda: NOW_S)
        successor.begin()
        assert volume.frames.stat().st_size == (whole if size == whole else middle)
        assert [place.uid for place in volume.places()] == [each.uid for each in kept]
        assert successor.write([*second, request(5)]) == (1 if size == whole else 3)
        assert Archive(folder).read(uids(folder)) == {each.uid: each for each in (*first, *second, request(5))}


@pytest.mark.parametrize("damage", ["gone", "empty", "torn", "zeros", "nonsense", "beyond"])
def test_an_index_can_be_made_again_from_the_frames(tmp_path: Path, writer: Writer, damage: str) -> None:
    some = [request(number) for number in range(6)]
    for each in some:
        writer.write([each])
    volume = only_volume(tmp_path)
    whole = volume.index.read_bytes()
    spoil: dict[str, Callable[[], object]] = {
        "gone": volume.index.unlink,
        "empty": lambda: volume.index.write_bytes(b""),
        "torn": lambda: volume.index.write_bytes(whole[:-7]),
        "zeros": lambda: volume.index.write_bytes(whole[:100] + bytes(50) + whole[150:]),
        "nonsense": lambda: volume.index.write_bytes(whole[:100] + b"what is\n"),
        "beyond": lambda: volume.index.write_bytes(whole + some[0].uid.encode() + b" 1 2 100000 9\n"),
    }
    spoil[damage]()
    assert Archive(tmp_path).read([each.uid for each in some]) == {each.uid: each for each in some}
    writer.begin()
    assert volume.index.read_bytes() == whole
    assert writer.write(some) == 0


def test_damage_in_the_middle_costs_the_frame_that_it_is_in(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(4)]
    for each in some:
        writer.write([each])
    volume = only_volume(tmp_path)
    place = volume.places()[1]
    content = bytearray(volume.frames.read_bytes())
    content[place.offset + 20] ^= 1
    volume.frames.write_bytes(content)
    with pytest.raises(ArchiveDamaged, match=str(place.offset)):
        Archive(tmp_path).read([place.uid])
    volume.index.unlink()
    writer.begin()
    assert volume.frames.read_bytes() == bytes(content), "nothing is cut"
    assert uids(tmp_path) == [some[0].uid, some[2].uid, some[3].uid]
    assert writer.write(some) == 1
    assert Archive(tmp_path).read([each.uid for each in some]) == {each.uid: each for each in some}


def test_the_file_of_a_writer_in_the_middle_of_its_work_is_left_alone(tmp_path: Path, writer: Writer) -> None:
    writer.write([request(1)])
    volume = only_volume(tmp_path)
    with volume.frames.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"half a frame")
        file.flush()
        size = volume.frames.stat().st_size
        Writer(tmp_path, "archive-1", 1, clock_s=lambda: NOW_S).begin()
        assert volume.frames.stat().st_size == size
        with pytest.raises(VolumeBusy):
            volume.append([request(2)])
    writer.begin()
    assert uids(tmp_path) == [uid_of(1)] and volume.frames.stat().st_size == volume.places()[-1].size


# requests that are to be forgotten


def bytes_of(folder: Path) -> bytes:
    """Return all names and bytes of a folder, and the texts of its frames."""
    found = b""
    for path in folder.iterdir():
        found += path.name.encode() + path.read_bytes()
        if path.suffix in (".zst", ".new"):
            with path.open("rb") as file:
                found += zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    return found


def three_hours(folder: Path) -> list[Recording]:
    """Write two requests in a frame, and one more, in each of three hours."""
    some = [request(number, made_s=NOW_S + 3600 * (number // 3)) for number in range(9)]
    for hour in range(3):
        writer = Writer(folder, f"archive-{hour}", 1, clock_s=lambda hour=hour: NOW_S + 3600 * hour)  # type: ignore[misc]
        writer.write(some[3 * hour : 3 * hour + 2])
        writer.write(some[3 * hour + 2 : 3 * hour + 3])
    return some


def test_what_is_forgotten_is_gone_from_all_files_and_all_else_is_as_it_was(tmp_path: Path, writer: Writer) -> None:
    some = three_hours(tmp_path)
    writer.write([request(0, took_ms=900)])  # it ended again: a second copy
    gone, kept = [some[0], some[4], some[5]], [some[number] for number in (1, 2, 3, 6, 7, 8)]
    untouched = {path.name: path.read_bytes() for path in tmp_path.glob("2027011510*")}
    assert writer.forget({each.uid for each in gone}) == 4
    for each in gone:
        assert each.uid.encode() not in bytes_of(tmp_path)
    assert f"prompt {0}".encode() not in bytes_of(tmp_path)
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
    found = Archive(folder).read([each.uid for each in some])
    assert {uid: each for uid, each in found.items() if uid != gone.uid} == {each.uid: each for each in kept}
    successor = Writer(folder, "archive-0", 3)
    successor.begin()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    successor.forget({gone.uid})
    assert gone.uid.encode() not in bytes_of(folder) and b"prompt 3" not in bytes_of(folder)
    assert Archive(folder).read([each.uid for each in some]) == {each.uid: each for each in kept}
    assert sorted(path.suffix for path in folder.iterdir()) == [".index"] * 3 + [".zst"] * 3


def test_a_file_that_somebody_writes_to_is_not_written_anew(tmp_path: Path, writer: Writer) -> None:
    writer.write([request(1)])
    with only_volume(tmp_path).locked(), pytest.raises(VolumeBusy):
        writer.forget({uid_of(1)})
    assert writer.forget({uid_of(1)}) == 1
    assert uids(tmp_path) == [] and only_volume(tmp_path).frames.stat().st_size == 0


@pytest.mark.parametrize("point", [name for name in POINTS if name.startswith("archive.")])
def test_nobody_writes_to_a_file_that_is_written_anew_before_it_has_its_index(
    tmp_path: Path, writer: Writer, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write([request(1), request(2)])
    tried = list[str]()

    def meanwhile(name: str) -> None:
        if name == point:
            tried.append(name)
            with pytest.raises(VolumeBusy):
                only_volume(tmp_path).append([request(3)])
            with pytest.raises(VolumeBusy):
                only_volume(tmp_path).remove()
            only_volume(tmp_path).mend()
            assert Writer(tmp_path, "archive-1", 1, clock_s=lambda: NOW_S + 7200).tidy(0.001) == []

    monkeypatch.setattr("pipeline.archive.volume.failpoint", meanwhile)
    assert writer.forget({uid_of(1)}) == 1
    assert tried == [point] and uids(tmp_path) == [uid_of(2)]
    writer.write([request(3)])
    assert uids(tmp_path) == [uid_of(2), uid_of(3)]


def test_a_round_is_told_before_each_file_that_may_be_written_anew(tmp_path: Path, writer: Writer) -> None:
    some, rounds = three_hours(tmp_path), list[int]()
    writer.forget({each.uid for each in some}, lambda: rounds.append(len(uids(tmp_path))))
    assert rounds == [9, 6, 3]


def test_a_frame_that_cannot_be_read_goes_with_what_is_to_be_forgotten(tmp_path: Path, writer: Writer) -> None:
    some = [request(number) for number in range(3)]
    for each in some:
        writer.write([each])
    volume = only_volume(tmp_path)
    place, content = volume.places()[1], bytearray(volume.frames.read_bytes())
    content[place.offset + 20] ^= 1
    volume.frames.write_bytes(content)
    writer.forget({some[1].uid})
    assert Archive(tmp_path).read([each.uid for each in some]) == {each.uid: each for each in (some[0], some[2])}
    assert len(volume.frames.read_bytes()) < len(content)


# room


def test_old_files_are_removed_by_age_and_by_size_and_this_hour_stays(
    tmp_path: Path, writer: Writer, clock: Clock
) -> None:
    for hour in range(5):
        clock.now_s = NOW_S + 3600 * hour
        writer.write([request(hour, made_s=clock.now_s, text=os.urandom(3000).hex())])
    names = [volume.name for volume in volumes(tmp_path)]
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
    with pytest.raises(OSError, match="No space left"):
        only_volume(small_disk).leave_out({some[0].uid})
    assert not [path for path in small_disk.iterdir() if path.name.startswith(".")]
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


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        make_archive(tmp_path / "file" / "b", "minisgl")
