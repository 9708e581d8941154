"""One file of an archive as versions before 0.2 wrote them. It is read until 0.3; nothing is added to it.

    <hour>-<slot>-<epoch>.zst      zstd frames, one for each batch, of lines of `encode_recording`
    <hour>-<slot>-<epoch>.index    `<uid> <made_ms> <ended_ms> <offset> <size>` for each request

Offset and size are those of the frame. The frames are the truth: an index that is missing, damaged or short is made
from them, as far as they are whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import structlog
import zstandard

from pipeline.archive.volume import (
    MOST_MS,
    READ_AT_ONCE,
    ArchiveDamaged,
    Place,
    Volume,
    VolumeBusy,
    end_of,
    place_of,
    size_of,
    text_of,
)
from pipeline.process.private import UnsafeFile, check_ours, open_ours
from pipeline.recording import MOST_BYTES, Recording, UnreadableRecording, decode_recording

logger = structlog.get_logger()

FRAMES: Final = ".zst"
INDEX: Final = ".index"
MOST_TEXT_BYTES: Final = (1 << 20) + MOST_BYTES
"""Largest text of a frame. A frame with more is damaged and is not unpacked further."""
INDEX_BYTES: Final = 256 << 20
"""Size above which an index is damaged: three million requests, of one archiver and hour."""
_LINE: Final = re.compile(rb"(\S{1,64}) ([0-9]{1,15}) ([0-9]{1,15}) ([0-9]{1,18}) ([0-9]{1,15})")
_CHUNK: Final = 1 << 10
"""Size of a read. Zstandard makes at most 32 MiB of so many bytes at once."""

Frame = tuple[int, int]
"""Offset and size."""


@dataclass(frozen=True, slots=True)
class OldVolume:
    """One file of an archive. Methods do the same as those of Volume."""

    hour: str
    slot: str
    epoch: int
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.hour}-{self.slot}-{self.epoch}{FRAMES}"

    @property
    def _index(self) -> Path:
        return self.path.with_suffix(INDEX)

    @property
    def until_s(self) -> float:
        return end_of(self.hour)

    def num_bytes(self) -> int:
        return size_of(self.path) + size_of(self._index)

    # for readers

    def find(self, uids: Collection[str]) -> list[Place]:
        wanted = {uid.encode() for uid in uids}
        return [place for place, _ in self._places(wanted)]

    def places(self, since_ms: int = 0, until_ms: int = MOST_MS) -> list[Place]:
        return [place for place, _ in self._places() if since_ms <= place.made_ms < until_ms]

    def newest(self, before: str, most: int) -> list[Place]:
        places = (place for place, _ in self._places() if place.uid < before)
        return sorted(places, key=lambda place: place.uid, reverse=True)[:most]

    def read(self, uids: Collection[str]) -> dict[str, Recording]:
        frames: dict[Frame, set[str]] = {}
        for place, frame in self._places({uid.encode() for uid in uids}):
            frames.setdefault(frame, set()).add(place.uid)
        found: dict[str, Recording] = {}
        for frame, inside in sorted(frames.items()):
            found |= {each.uid: each for each in self._recordings(frame) if each.uid in inside}
            if missing := inside - found.keys():
                raise ArchiveDamaged(f"{self.path}: {min(missing)} is not in the frame at byte {frame[0]}")
        return found

    def recordings(self) -> Iterator[Recording]:
        for frame in sorted({frame for _, frame in self._places()}):
            with contextlib.suppress(ArchiveDamaged):
                yield from self._recordings(frame)

    def _recordings(self, frame: Frame) -> list[Recording]:
        offset, size = frame
        try:
            with open(open_ours(self.path), "rb") as file:
                left = os.fstat(file.fileno()).st_size - offset
                file.seek(offset)
                packed = file.read(max(0, min(size, left, MOST_TEXT_BYTES)))  # packed, it is hardly ever larger
            return [decode_recording(line) for line in _lines_in(text_of(packed, MOST_TEXT_BYTES))]
        except FileNotFoundError:
            return []
        except (UnsafeFile, zstandard.ZstdError, UnreadableRecording) as error:
            raise ArchiveDamaged(f"{self.path} is damaged at byte {offset}: {error}") from error

    def _places(self, wanted: Collection[bytes] | None = None) -> Iterator[tuple[Place, Frame]]:
        """Yield the requests, all or the *wanted* ones, each with its frame."""
        for line in self._lines().splitlines():
            if wanted is not None and line.partition(b" ")[0] not in wanted:
                continue
            found = _LINE.fullmatch(line)
            if found is None or not line.isascii():
                raise ArchiveDamaged(f"{self._index} has the line {line[:200]!r}; remove this file, it is not needed")
            made_ms, ended_ms, offset, size = map(int, found.groups()[1:])
            if (uid := found[1].decode()) != "-":  # that stands for bytes that are no frame
                yield Place(uid, made_ms, ended_ms), (offset, size)

    def _lines(self) -> bytes:
        """Return the index of all whole frames; b"" if the file is gone, or is not ours."""
        try:
            lines, end = _trusted(self._index)
            with open(open_ours(self.path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if end > size:
                    lines, end = b"", 0
                return lines + b"".join(_scanned(file, end)) if end < size else lines
        except FileNotFoundError:
            return b""
        except UnsafeFile as error:
            _say_refused(error)
            return b""

    # for writers

    def mend(self) -> None:
        """Do nothing: readers pass by what is half written."""

    def leave_out(self, uids: Collection[str]) -> int:
        """Move the other requests into a Volume. What cannot be read is removed, too: it may hold some of *uids*."""
        try:
            with self._locked():
                num_removed = len(self.find(uids))
                some: list[Recording] = []
                new = Volume(self.hour, self.slot, self.epoch, self.folder)
                for recording in self.recordings():
                    if recording.uid not in uids:
                        some.append(recording)
                    if len(some) == READ_AT_ONCE:
                        new.append(some)
                        some.clear()
                new.append(some)
                self.remove()
                return num_removed
        except FileNotFoundError:  # it was removed meanwhile
            return 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file. Raise VolumeBusy if another process has it."""
        with open(open_ours(self.path), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise VolumeBusy(f"{self.path}: another process writes to it") from error
            if self.path.exists():
                yield
                return
        raise FileNotFoundError(errno.ENOENT, "it is gone", str(self.path))

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            check_ours(self.path)
        for path in (self._index, self.path):
            path.unlink(missing_ok=True)


def _trusted(path: Path) -> tuple[bytes, int]:
    """Return the lines of an index, and the end of the last frame that they name; nothing if it is damaged or not
    ours."""
    try:
        with open(open_ours(path), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > INDEX_BYTES:
                raise UnsafeFile(errno.EFBIG, f"{size:,} bytes, expected at most {INDEX_BYTES:,}", str(path))
            lines = file.read(size)
    except FileNotFoundError:
        return b"", 0
    except UnsafeFile as error:
        _say_refused(error)
        return b"", 0
    last = _LINE.fullmatch(lines[lines.rfind(b"\n", 0, -1) + 1 : -1])
    is_whole = last and lines.endswith(b"\n") and b"\0" not in lines
    return (lines, int(last[4]) + int(last[5])) if last and is_whole else (b"", 0)


def _scanned(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield the lines of the index for the whole frames from *offset* on."""
    while (found := _frame_at(file, offset)) is not None:
        size, recordings = found
        for uid, made_ms, ended_ms in map(place_of, recordings):
            yield f"{uid} {made_ms} {ended_ms} {offset} {size}\n".encode()
        offset += size


def _frame_at(file: BinaryIO, offset: int) -> tuple[int, list[Recording]] | None:
    """Return the size of the frame at *offset* and its requests, none if they cannot be read; None if there is no whole
    frame."""
    file.seek(offset)
    frame, size, text = zstandard.ZstdDecompressor().decompressobj(), 0, bytearray()
    try:
        while not frame.eof:
            chunk = file.read(_CHUNK)
            if not chunk:
                return None
            text += frame.decompress(chunk)
            size += len(chunk)
            if len(text) > MOST_TEXT_BYTES:
                return None
    except zstandard.ZstdError:
        return None
    size -= len(frame.unused_data)
    try:
        return size, [decode_recording(line) for line in _lines_in(bytes(text))]
    except UnreadableRecording:
        return size, []


def _lines_in(text: bytes) -> Iterator[bytes]:
    """Yield the lines of *text* that are not empty, one at a time: it may have as many as it has bytes."""
    first = 0
    while first < len(text):
        last = text.find(b"\n", first)
        last = len(text) if last < 0 else last
        if last > first:
            yield text[first:last]
        first = last + 1


def _say_refused(error: UnsafeFile) -> None:
    logger.warning("archive_file_refused", file=error.filename, reason=error.strerror)
