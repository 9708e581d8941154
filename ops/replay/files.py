"""Files of recorded requests: Zstandard over lines of JSON, or the lines as they are. Knows no log.

    {"minisgl": "dump", "v": 1, "made_ms": .., ..}      the first line: a header
    {"v": 1, "uid": .., "entries": ..}                  one line for each request (pipeline.recording)
    {"minisgl": "end", "requests": 2}                   the last line; a file without it was cut off

Such files may be joined with `cat`. docs/debugging.md describes the format. The folder of an archive is read, too.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
import zstandard

from ops.replay.formats import LeftOut, Reader, reader_for
from pipeline import VERSION as PROGRAM_VERSION
from pipeline.archive.folder import archive_id
from pipeline.archive.reader import Archive
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.process.private import open_private, open_regular
from pipeline.recording import MOST_BYTES, Recording, UnreadableRecording, decode_recording, encode_recording

DUMP_VERSION: Final = 1
"""The newest version of a file that this code reads."""
FRAME_BYTES: Final = 1 << 20
"""A frame of Zstandard ends after so many bytes of lines. Its checksum is behind them."""
HELD_BYTES: Final = 64 << 20
"""So many bytes of a frame wait for its checksum; the lines of a larger frame, which others wrote, do not wait."""
READ_BYTES: Final = 1 << 10
"""Zstandard makes at most 32 MiB of so many bytes at once."""
MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""How a frame of Zstandard begins."""


class DamagedFile(MiniSGLError):
    """A file cannot be read from some line on; the message names file, line and reason."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")


@dataclass(frozen=True, slots=True)
class Dump:
    """A file that is being read."""

    header: Mapping[str, Any]
    recordings: Iterator[Recording]
    """Raises DamagedFile where the file cannot be read on; what came before is whole."""
    lines: Lines | None = None
    """The file; None: an archive."""


def read_dump(path: Path) -> Iterator[Recording]:
    """Yield the requests of a file or an archive, also of a batch of OpenAI or a trace of Mooncake. What comes before a
    damage is yielded.

    Raises:
        ConfigError: There is no such file, or it may not be read; or it is a folder, and no archive.
        DamagedFile: It holds something else, is damaged or cut off, or is of a newer version.
        ArchiveDamaged: A file of the archive is.
    """
    yield from open_dump(path).recordings


def open_dump(path: Path) -> Dump:
    """Begin to read a file. Raises as `read_dump` does."""
    if path.is_dir():
        if not archive_id(path):
            raise ConfigError(f"{path}: a folder that is no archive; name a file, or the folder of an archive")
        return Dump({}, Archive(path).recordings())
    lines = Lines(path)
    number, line = next(lines, (1, b""))
    header, reader = _marker(line), reader_for(line)
    if reader is not None:
        return Dump({}, _foreign(path, itertools.chain([(number, line)], lines), reader), lines)
    if header.get("minisgl") != "dump":
        expected = "expected the header of a dump, or a line of a batch of OpenAI or of a trace of Mooncake"
        raise DamagedFile(path, number, f"{expected}: {line[:60]!r}")
    _check_version(path, number, header)
    return Dump(header, _recordings(path, lines), lines)


def _recordings(path: Path, lines: Lines) -> Iterator[Recording]:
    number, has_ended = 1, False
    for number, line in lines:
        marker = _marker(line)
        if marker.get("minisgl") == "dump":
            _check_version(path, number, marker)
        has_ended = marker.get("minisgl") == "end"
        if marker:
            continue
        try:
            yield decode_recording(line)
        except UnreadableRecording as error:
            raise DamagedFile(path, number, str(error)) from error
    if not has_ended:
        raise DamagedFile(path, number + 1, "the file was cut off; expected more requests, or its last line")


def _foreign(path: Path, lines: Iterable[tuple[int, bytes]], reader: Reader) -> Iterator[Recording]:
    for number, line in lines:
        try:
            yield from reader(number, line)
        except UnreadableRecording as error:
            raise DamagedFile(path, number, str(error)) from error


def _marker(line: bytes) -> dict[str, Any]:
    """Return what the first or last line of a dump says; nothing for other lines."""
    if not line.startswith(b'{"minisgl":'):
        return {}
    with suppress(orjson.JSONDecodeError):
        plain = orjson.loads(line)
        if isinstance(plain, dict) and plain.get("minisgl") in ("dump", "end"):
            return plain
    return {}


def _check_version(path: Path, number: int, header: Mapping[str, Any]) -> None:
    version = header.get("v")
    if type(version) is not int or version < 1:
        raise DamagedFile(path, number, f"the header has the version {version!r}, expected {DUMP_VERSION}")
    if version > DUMP_VERSION:
        known = f"this MiniSGL reads up to {DUMP_VERSION}; read it with a newer one"
        raise DamagedFile(path, number, f"the file is of version {version}, and {known}")


class Lines:
    """The lines of a file that are not empty, compressed or not, each with its number from 1. One of them is in memory
    at a time, whatever the file unpacks to."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        """Of the last one that was read."""
        self._lines = _lines_of(path)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return self

    def __next__(self) -> tuple[int, bytes]:
        """Raises as `_lines_of`."""
        self.number, line = next(self._lines)
        return self.number, line


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield what `Lines` has.

    Raises:
        ConfigError: There is no such file, or it may not be read.
        DamagedFile: A line is too long, or what was compressed is damaged or cut off.
    """
    try:
        file = os.fdopen(open_regular(path), "rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    number = 0
    with file:
        is_compressed = file.read(len(MAGIC)) == MAGIC
        file.seek(0)
        try:
            parts = _unpacked(file) if is_compressed else iter(lambda: file.read(READ_BYTES), b"")
            for number, line in enumerate(_split(parts), 1):
                if line.strip():
                    yield number, line
        except (_Broken, OSError) as error:
            raise DamagedFile(path, number + 1, str(error)) from error


def _split(parts: Iterable[bytes]) -> Iterator[bytes]:
    line = bytearray()
    for part in parts:
        first = 0
        while first < len(part):
            end = part.find(b"\n", first)
            last = len(part) if end < 0 else end
            if len(line) + last - first > MOST_BYTES:
                raise _Broken(f"the line is too long; a request may have {MOST_BYTES:,} bytes")
            line += memoryview(part)[first:last]
            if end >= 0:
                yield bytes(line)
                line.clear()
            first = last + 1
    if line:
        yield bytes(line)


class _Broken(Exception):
    """The file cannot be read on."""


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Yield what each frame of *file* holds, once its checksum is right. Of a frame that is cut off, yield its part."""
    packed = b""
    while packed := packed or file.read(READ_BYTES):
        frame, held = zstandard.ZstdDecompressor().decompressobj(), bytearray()
        while not frame.eof:
            packed = packed or file.read(READ_BYTES)
            if not packed:
                yield bytes(held)
                raise _Broken("the file was cut off: it ends inside of a frame of Zstandard")
            try:
                held += frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise _Broken(f"the file is damaged from here on: {error}") from error
            packed = frame.unused_data if frame.eof else b""
            if len(held) > HELD_BYTES:
                yield bytes(held)
                held.clear()
        yield bytes(held)


def write_dump(
    path: Path,
    recordings: Iterable[Recording],
    about: Mapping[str, Any] | None = None,
    left_out: LeftOut = lambda reason: None,
) -> int:
    """Write *recordings* into a new file that only its owner may read; return how many there were.

    The header says what *about* does, besides the moment and our version. The file gets its name when it is whole.
    *left_out* is called with the reason for each request that no reader would read.

    Raises:
        ConfigError: There is such a file already, or none can be written there.
    """
    made = {"minisgl": "dump", "v": DUMP_VERSION, "made_ms": time.time_ns() // 1_000_000, "version": PROGRAM_VERSION}
    count = 0
    with _new_file(path) as file:
        frames = _Frames(file)
        frames.add(orjson.dumps(made | dict(about or {}), option=orjson.OPT_APPEND_NEWLINE))
        for recording in recordings:
            line = encode_recording(recording)
            if len(line) > MOST_BYTES:
                left_out(f"longer than {MOST_BYTES:,} bytes")
                continue
            frames.add(line)
            count += 1
        frames.add(orjson.dumps({"minisgl": "end", "requests": count}, option=orjson.OPT_APPEND_NEWLINE))
        frames.finish()
    return count


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write *lines* into a new file as they are; return how many there were. Raises as `write_dump` does."""
    count = 0
    with _new_file(path) as file:
        for line in lines:
            file.write(line)
            count += 1
    return count


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file that only its owner may read, and that has its name once it is whole. Raises ConfigError."""
    if path.exists():
        raise ConfigError(f"{path}: there is such a file already; remove it, or name another one")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb", opener=lambda _, flags: open_private(part, flags)) as file:
            yield file
        part.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


class _Frames:
    """Writes lines in frames of Zstandard, each with a checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._compressor = zstandard.ZstdCompressor(write_checksum=True)
        self._held = bytearray()

    def add(self, line: bytes) -> None:
        self._held += line
        if len(self._held) >= FRAME_BYTES:
            self.finish()

    def finish(self) -> None:
        if self._held:
            self._file.write(self._compressor.compress(bytes(self._held)))
            self._held.clear()
