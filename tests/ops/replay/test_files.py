"""Files of recorded requests: what is written is read again, and what a damaged file says."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from ops.replay import files
from ops.replay.files import DamagedFile, open_dump, read_dump, write_dump
from pipeline.errors import ConfigError
from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.recording import Recording, encode_recording


def recording(number: int, size: int = 10) -> Recording:
    submitted = Entry("0-1", {"kind": "submitted", "prompt": f"{number} " * size})
    return Recording(f"{number:032x}", (submitted, Entry(SEAL, {"kind": "finished"})))


THREE = [recording(number) for number in range(3)]
HEADER = b'{"minisgl": "dump", "v": 1}\n'
END = b'{"minisgl": "end", "requests": 1}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.zst"


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is a frame."""
    monkeypatch.setattr(files, "FRAME_BYTES", 1)


def read(path: Path) -> tuple[list[Recording], str]:
    """Return what is read of a file, and what is wrong with the rest."""
    found: list[Recording] = []
    try:
        found.extend(read_dump(path))  # keeps what comes before an error
    except DamagedFile as error:
        return found, str(error)
    return found, ""


def test_what_is_written_is_read(path: Path) -> None:
    assert write_dump(path, THREE, {"namespace": "test"}) == 3
    dump = open_dump(path)
    assert list(dump.recordings) == THREE
    assert dump.header["namespace"] == "test"
    assert dump.header["made_ms"] > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_of_no_requests_is_read_as_one(path: Path) -> None:
    assert write_dump(path, []) == 0
    assert read(path) == ([], "")


def test_many_frames_are_one_file(path: Path, small_frames: None) -> None:
    write_dump(path, THREE)
    assert path.read_bytes().count(files.MAGIC) > 3
    assert read(path) == (THREE, "")


def test_the_lines_may_come_in_one_frame_of_another_program_or_in_none(path: Path) -> None:
    lines = HEADER + encode_recording(THREE[0]) + b"\n" + END
    path.write_bytes(lines)
    assert read(path) == (THREE[:1], "")
    path.write_bytes(zstandard.ZstdCompressor().compress(lines))
    assert read(path) == (THREE[:1], "")


def test_joined_files_are_one_file(path: Path) -> None:
    write_dump(path, THREE[:2])
    first = path.read_bytes()
    path.unlink()
    write_dump(path, THREE[2:])
    path.write_bytes(first + path.read_bytes())
    assert read(path) == (THREE, "")


def test_a_file_that_is_there_is_not_overwritten(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(ConfigError):
        write_dump(path, THREE)
    assert path.read_text() == "mine"


def test_a_file_that_cannot_be_written_or_read_is_an_error_of_the_command_line(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_dump(path / "below", THREE)
    with pytest.raises(ConfigError, match="No such file"):
        next(read_dump(path))


def test_what_fails_while_it_is_written_leaves_no_file(path: Path) -> None:
    def failing() -> Iterator[Recording]:
        yield THREE[0]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_dump(path, failing())
    assert list(path.parent.iterdir()) == []


def test_wherever_a_file_is_cut_what_came_before_is_read_and_the_line_is_named(path: Path, small_frames: None) -> None:
    write_dump(path, THREE)
    whole, counts = path.read_bytes(), set[int]()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found, said = read(path)
        assert found == THREE[: len(found)]
        assert f"{path}, line " in said
        counts.add(len(found))
    assert counts == {0, 1, 2, 3}


def test_wherever_a_byte_is_wrong_nothing_wrong_is_read(path: Path, small_frames: None) -> None:
    write_dump(path, THREE)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found, said = read(path)
        assert found == THREE[: len(found)]
        assert len(found) == 3 or f"{path}, line " in said


def test_the_lines_of_a_frame_that_is_too_large_to_wait_for_its_checksum_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "HELD_BYTES", 1000)
    monkeypatch.setattr(files, "READ_BYTES", 100)
    many = [recording(number, size=1000) for number in range(20)]
    write_dump(path, many)
    assert read(path) == (many, "")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (b"", 1, "expected the header of a dump"),
        (b"PK\x03\x04", 1, "expected the header of a dump"),
        (b'{"minisgl": "dump"}\n', 1, "the version None"),
        (b'{"minisgl": "dump", "v": 2}\n', 1, "the file is of version 2, and this MiniSGL reads up to 1"),
        (HEADER + b'{"v": 7, "uid": "a", "entries": []}\n' + END, 2, "it is of version 7"),
        (HEADER + b"\nwhat?\n" + END, 3, "not JSON"),
        (HEADER + b'{"minisgl": "sequel"}\n' + END, 2, "expected"),
        (HEADER + END + b'{"minisgl": "dump", "v": 2}\n', 3, "the file is of version 2"),
        (HEADER, 2, "the file was cut off"),
        (HEADER + encode_recording(THREE[0]), 3, "the file was cut off"),
    ],
)
def test_a_file_that_holds_something_else_says_where_and_what(path: Path, text: bytes, line: int, said: str) -> None:
    path.write_bytes(text)
    _, error = read(path)
    assert error.startswith(f"{path}, line {line}: ")
    assert said in error


def bomb(head: bytes, num_bytes: int) -> bytes:
    """Return a frame that says nothing of its size: *head*, and then zeros."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    parts = [frame.compress(head)]
    parts += [frame.compress(bytes(1 << 20)) for _ in range(num_bytes >> 20)]
    return b"".join((*parts, frame.flush()))


@pytest.mark.parametrize("is_compressed", [True, False])
def test_a_line_that_is_too_long_is_refused_before_it_is_unpacked_further(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_compressed: bool
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(files, "HELD_BYTES", 1 << 20)
    head = HEADER + encode_recording(THREE[0])
    path.write_bytes(bomb(head, 200 << 20) if is_compressed else head + bytes(200 << 20))
    tracemalloc.start()
    found, said = read(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found, said) == (
        THREE[:1],
        f"{path}, line 3: the line is too long; a request may have 1,048,576 bytes",
    )
    assert most < 80 << 20, "of 200 MiB, and Zstandard makes up to 32 MiB at once"


def test_a_request_that_no_reader_would_read_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    reasons: list[str] = []
    assert write_dump(path, [THREE[0], recording(1, size=1000), THREE[2]], left_out=reasons.append) == 2
    assert reasons == ["longer than 1,000 bytes"]
    assert read(path) == ([THREE[0], THREE[2]], "")


def test_a_pipe_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError):
        next(read_dump(path))


def test_a_link_to_a_file_that_is_named_is_read(path: Path) -> None:
    write_dump(path.with_name("real"), THREE)
    path.symlink_to("real")
    assert read(path) == (THREE, "")
