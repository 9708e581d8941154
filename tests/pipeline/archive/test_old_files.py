"""Files that a version before 0.2 wrote are read as they are, and lose what is to be forgotten."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from support.old_archive import written_as_before

from pipeline.archive.reader import Archive, volumes
from pipeline.archive.volume import ArchiveDamaged, VolumeBusy
from pipeline.archive.writer import Writer
from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.recording import Recording

NOW_S = 1_800_000_000.0


def request(number: int, *, hour: int = 0, took_ms: int = 500) -> Recording:
    made_ms = int(NOW_S * 1000) + 3_600_000 * hour + number
    first, last = {"ms": str(made_ms), "prompt": f"prompt {number}"}, {"ms": str(made_ms + took_ms)}
    return Recording(f"{made_ms:012x}7abc8{number:015x}", (Entry("0-1", first), Entry(SEAL, last)))


OLD = [request(number, hour=number // 4) for number in range(8)]
"""Four requests, two to a frame, in each of two hours."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written_as_before(tmp_path, "2027011508-archive-0-1", [OLD[:2], OLD[2:4]])
    written_as_before(tmp_path, "2027011509-archive-0-1", [OLD[4:6], OLD[6:]])
    return tmp_path


@pytest.fixture
def writer(folder: Path) -> Writer:
    return Writer(folder, "archive-0", 2, clock_s=lambda: NOW_S + 3600)


def uids(folder: Path) -> list[str]:
    return [place.uid for place in Archive(folder).listed(0, 1 << 60)]


def all_of(*requests: Recording) -> dict[str, Recording]:
    return {each.uid: each for each in requests}


def test_they_are_found_listed_and_read_beside_new_ones(folder: Path, writer: Writer) -> None:
    new = request(9, hour=1)
    writer.begin()
    assert writer.write([*OLD, new]) == 1
    archive = Archive(folder)
    assert archive.read([each.uid for each in (*OLD, new)]) == all_of(*OLD, new)
    assert uids(folder) == [each.uid for each in (*OLD, new)]
    assert [*archive.recordings()] == [*OLD, new] and [*archive.copies()] == [*OLD, new]
    newest, floor = archive.newest("~", 3)
    assert [*newest][:3] == [each.uid for each in (new, OLD[7], OLD[6])] and archive.since_ms() == NOW_S * 1000
    assert floor <= OLD[6].uid
    assert {type(volume).__name__ for volume in volumes(folder)} == {"Volume", "OldVolume"}


def test_a_request_that_ended_again_counts_in_its_new_form(folder: Path, writer: Writer) -> None:
    again = request(5, hour=1, took_ms=900)
    assert writer.write([again]) == 1
    assert Archive(folder).read([again.uid]) == all_of(again) and len(uids(folder)) == 8


@pytest.mark.parametrize("damage", ["gone", "empty", "torn", "zeros", "nonsense", "beyond"])
def test_without_a_whole_index_the_frames_say_what_is_there(folder: Path, damage: str) -> None:
    index = folder / "2027011508-archive-0-1.index"
    whole = index.read_bytes()
    spoil: dict[str, Callable[[], object]] = {
        "gone": index.unlink,
        "empty": lambda: index.write_bytes(b""),
        "torn": lambda: index.write_bytes(whole[:-7]),
        "zeros": lambda: index.write_bytes(whole[:100] + bytes(50) + whole[150:]),
        "nonsense": lambda: index.write_bytes(whole[:100] + b"what is\n"),
        "beyond": lambda: index.write_bytes(whole + OLD[0].uid.encode() + b" 1 2 100000 9\n"),
    }
    spoil[damage]()
    assert Archive(folder).read([each.uid for each in OLD]) == all_of(*OLD)


def test_what_is_half_written_is_passed_by(folder: Path) -> None:
    index, frames = folder / "2027011508-archive-0-1.index", folder / "2027011508-archive-0-1.zst"
    content = frames.read_bytes()
    frames.write_bytes(content[:-5])
    assert uids(folder) == [each.uid for each in (*OLD[:2], *OLD[4:])]
    frames.write_bytes(content + content[:20])
    index.unlink()
    assert Archive(folder).read([each.uid for each in OLD]) == all_of(*OLD)


def test_a_damaged_frame_is_named_and_costs_no_other_one(folder: Path) -> None:
    frames = folder / "2027011508-archive-0-1.zst"
    content = bytearray(frames.read_bytes())
    content[20] ^= 1
    frames.write_bytes(content)
    with pytest.raises(ArchiveDamaged, match="byte 0"):
        Archive(folder).read([OLD[0].uid])
    assert Archive(folder).read([each.uid for each in OLD[2:]]) == all_of(*OLD[2:])


def test_an_index_with_a_line_that_is_none_says_what_to_do(folder: Path) -> None:
    index = folder / "2027011508-archive-0-1.index"
    first, *others = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(first.replace(first.split()[1], b"soon") + b"".join(others))
    with pytest.raises(ArchiveDamaged, match="remove this file"):
        Archive(folder).read([OLD[0].uid])
    index.unlink()
    assert Archive(folder).read([OLD[0].uid]) == all_of(OLD[0])


def test_what_is_to_be_forgotten_leaves_a_new_file_with_the_rest(folder: Path, writer: Writer) -> None:
    kept = [each for each in OLD if each is not OLD[2]]
    packed = (folder / "2027011508-archive-0-1.zst").read_bytes()
    assert writer.forget({OLD[2].uid}) == 1
    assert Archive(folder).read([each.uid for each in OLD]) == all_of(*kept) and len(uids(folder)) == 7
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["2027011508-archive-0-1.sqlite", "2027011509-archive-0-1.index", "2027011509-archive-0-1.zst"]
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    assert OLD[2].uid.encode() not in content and packed[-30:] not in content
    assert writer.forget({OLD[2].uid}) == 0


def test_killed_in_the_middle_nothing_is_lost_and_the_next_one_does_the_rest(
    folder: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Path, *, missing_ok: bool) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fails)
        with pytest.raises(OSError, match="killed"):
            volumes(folder)[0].leave_out({OLD[2].uid})
    assert Archive(folder).read([each.uid for each in OLD]) == all_of(*OLD)
    assert writer.forget({OLD[2].uid}) == 1 and len(uids(folder)) == 7


def test_a_file_that_an_older_archiver_still_writes_to_is_not_moved(folder: Path) -> None:
    volume = volumes(folder)[0]
    with volume.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(VolumeBusy):
            volume.leave_out({OLD[2].uid})
    assert len(uids(folder)) == 8


def test_they_are_removed_by_age(folder: Path) -> None:
    late = Writer(folder, "archive-0", 2, clock_s=lambda: NOW_S + 86400)
    assert late.num_bytes() == sum(path.stat().st_size for path in folder.iterdir())
    assert late.tidy(3600) == ["2027011508-archive-0-1.zst", "2027011509-archive-0-1.zst"]
    assert [*folder.iterdir()] == []
