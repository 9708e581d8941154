"""One file of an archive and its index. docs/operations.md describes the format.

    <hour>-<slot>-<epoch>.zst      zstd frames, one for each batch, of lines of `encode_recording`
    <hour>-<slot>-<epoch>.index    `<uid> <made_ms> <ended_ms> <offset> <size>` for each request

Offset and size are those of the frame. The frames are the truth: an index that is missing, damaged or short is made
from them. Only the holder of the frames' lock writes either file. Readers need no lock.
"""

from __future__ import annotations

import calendar
import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Final

import structlog
import zstandard

from pipeline.archive.frames import MOST_TEXT_BYTES, frames_in, frames_of, lines_in, only, text_of
from pipeline.errors import LogError
from pipeline.process.failpoints import failpoint
from pipeline.process.private import UnsafeFile, open_ours, open_private
from pipeline.recording import Recording, UnreadableRecording, decode_recording

logger = structlog.get_logger()

FRAMES: Final = ".zst"
INDEX: Final = ".index"
HOUR_S: Final = 3600
INDEX_BYTES: Final = 256 << 20
"""Size above which an index is damaged: three million requests, of one archiver and hour."""
DAMAGED: Final = "-"
"""Stands for a uid in an index line about bytes that are not a frame."""

_NAME: Final = re.compile(r"([1-9][0-9]{3}(?:0[1-9]|1[0-2])[0-3][0-9][0-2][0-9])-([a-z]+-[0-9]+)-([0-9]{1,18})")
_LINE: Final = re.compile(rb"(\S{1,64}) ([0-9]{1,15}) ([0-9]{1,15}) ([0-9]{1,18}) ([0-9]{1,15})\n?")
_UID: Final = re.compile(rb'"uid":"([^"]*)"')
_HEAD_BYTES: Final = 200  # the first bytes of a line, which have its uid
_LAST_LINE: Final = 256
"""Number of bytes at the end of an index that hold at least one line."""


class ArchiveDamaged(LogError):
    """A file of the archive does not match its index."""


class VolumeBusy(LogError):
    """Another process writes to the file."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a request in its file."""

    uid: str
    made_ms: int
    ended_ms: int
    offset: int
    size: int

    def line(self) -> bytes:
        return f"{self.uid} {self.made_ms} {self.ended_ms} {self.offset} {self.size}\n".encode()


def parse_place(line: bytes) -> Place:
    """Return the place in a line of an index. Raise ArchiveDamaged if it is not such a line."""
    found = _LINE.fullmatch(line)
    if found is None or not line.isascii():
        raise ArchiveDamaged(f"an index of the archive has the line {line[:200]!r}; remove its file, it is made again")
    made_ms, ended_ms, offset, size = map(int, found.groups()[1:])
    return Place(found[1].decode(), made_ms, ended_ms, offset, size)


def moments_of(recording: Recording) -> tuple[int, int]:
    """Return when a request was submitted and when it ended, in ms of Redis' clock; 0: unknown."""
    first, last = (recording.entries[at].fields.get("ms", "") if recording.entries else "" for at in (0, -1))
    return _number(first), _number(last)


@dataclass(frozen=True, slots=True, order=True)
class Volume:
    """One file of an archive, with its index. Volumes are ordered by hour."""

    hour: str
    """Hour when its requests were archived: `YYYYMMDDHH`, UTC."""
    slot: str
    epoch: int
    folder: Path

    @classmethod
    def now(cls, folder: Path, slot: str, epoch: int, now_s: float) -> Volume:
        """Return the volume to which the owner of a slot writes now."""
        return cls(hour_of(now_s * 1000), slot, epoch, folder)

    @property
    def name(self) -> str:
        return f"{self.hour}-{self.slot}-{self.epoch}"

    @property
    def frames(self) -> Path:
        return self.folder / (self.name + FRAMES)

    @property
    def index(self) -> Path:
        return self.folder / (self.name + INDEX)

    @property
    def until_s(self) -> float:
        """End of its hour, in seconds since 1970."""
        year, *others = (int(self.hour[first:last]) for first, last in ((0, 4), (4, 6), (6, 8), (8, 10)))
        return calendar.timegm((year, *others, 0, 0)) + HOUR_S

    def num_bytes(self) -> int:
        """Return its size on the disk; 0 if it is gone."""
        return sum(_size(path) for path in (self.frames, self.index))

    # for readers

    def lines(self) -> bytes:
        """Return the index of all whole frames; b"" if the file is gone, or is not ours. Lines that the index file
        lacks are made."""
        try:
            return self._lines()
        except UnsafeFile as error:
            _say_refused(error)
            return b""

    def _lines(self) -> bytes:
        """Return the same as `lines`. Raise UnsafeFile if the file is not ours."""
        lines, end = _trusted(self.index)
        try:
            # Nearly always the index is complete. There may be a thousand files, and opening each would take longest.
            frames = os.lstat(f"{self.folder}/{self.name}{FRAMES}") if lines else None
            if frames is not None and frames.st_size == end and stat.S_ISREG(frames.st_mode):
                return lines
            with open(open_ours(self.frames), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if end > size:
                    lines, end = b"", 0
                return lines + b"".join(_scanned(file, end)) if end < size else lines
        except FileNotFoundError:
            return b""

    def places(self, since_ms: int = 0, until_ms: int = 1 << 63) -> list[Place]:
        """Return the places of all requests in the file that were submitted from *since_ms* to before *until_ms*."""
        places = map(parse_place, self.lines().splitlines())
        return [place for place in places if place.uid != DAMAGED and since_ms <= place.made_ms < until_ms]

    def read(self, places: Sequence[Place]) -> dict[str, Recording]:
        """Return the requests at *places*, which are all in one frame, by their uids.

        Raises:
            ArchiveDamaged: A request is not there.
            FileNotFoundError: The file is gone.
        """
        first, wanted, found = places[0], {place.uid.encode() for place in places}, dict[str, Recording]()
        try:
            for line in lines_in(text_of(self._frame(first))):
                if (name := _UID.search(line, 0, _HEAD_BYTES)) and name[1] in wanted:
                    recording = decode_recording(line)
                    found.setdefault(recording.uid, recording)
        except UnsafeFile as error:
            raise ArchiveDamaged(f"{self.frames}: {error.strerror}") from error
        except (zstandard.ZstdError, UnreadableRecording) as error:
            raise ArchiveDamaged(f"{self.frames} is damaged at byte {first.offset}: {error}") from error
        if missing := next((place.uid for place in places if place.uid not in found), ""):
            raise ArchiveDamaged(f"{self.frames}: {missing} is not in the frame at byte {first.offset}")
        return found

    def recordings(self) -> Iterator[Recording]:
        """Yield all requests, also while the file is replaced, except those of frames that cannot be read."""
        with contextlib.suppress(FileNotFoundError, UnsafeFile), open(open_ours(self.frames), "rb") as file:
            for _, _, inside in frames_in(file, 0):
                yield from inside

    # for writers

    @contextlib.contextmanager
    def locked(self, *, make: bool = False) -> Iterator[int]:
        """Yield the descriptor of the frames, locked against other writers of this volume.

        Raises:
            VolumeBusy: Another process holds the lock.
            FileNotFoundError: There is no such file, and *make* is not set.
        """
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if make else 0)
        while True:
            descriptor = open_private(self.frames, flags, is_ours=True)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        raise
                    raise VolumeBusy(f"{self.frames}: another process writes to it") from error
                if _is_same(descriptor, self.frames):  # else it was replaced meanwhile
                    yield descriptor
                    return
            finally:
                os.close(descriptor)

    def append(self, recordings: Sequence[Recording]) -> None:
        """Write *recordings*: the frames, then their lines in the index. When this returns they are on the disk.

        Raises:
            OSError: Nothing is written, and the file is as it was.
        """
        if not recordings:
            return
        with self.locked(make=True) as descriptor:
            end = before = self._mend(descriptor, thorough=False)
            lines = bytearray()
            try:
                for frame, inside in frames_of(recordings):
                    _write_all(descriptor, frame)
                    for recording in inside:
                        lines += Place(recording.uid, *moments_of(recording), end, len(frame)).line()
                    end += len(frame)
                os.fsync(descriptor)
                if not before:
                    sync_folder(self.folder)
            except OSError:
                with contextlib.suppress(OSError):  # the next writer cuts it
                    os.ftruncate(descriptor, before)
                raise
            index = open_private(self.index, os.O_WRONLY | os.O_CREAT | os.O_APPEND, is_ours=True)
            try:
                _write_all(index, lines)
            finally:
                os.close(index)

    def mend(self) -> None:
        """Cut a half-written frame, and complete the index. Do nothing while another process writes.

        Raises:
            OSError: The files cannot be written.
        """
        with contextlib.suppress(VolumeBusy, FileNotFoundError, UnsafeFile), self.locked() as descriptor:
            self._mend(descriptor, thorough=True)
            self._drop_unfinished()

    def leave_out(self, uids: Collection[str]) -> int:
        """Rewrite the file without the requests *uids*; return how many there were.

        An unreadable frame with one of them is removed whole. If this dies at any point, the next call does the rest.

        Raises:
            VolumeBusy: Another process writes to the file.
            OSError: The file is as it was, or its index has to be made.
        """
        try:
            with self.locked() as descriptor:
                self._mend(descriptor, thorough=False)
                self._drop_unfinished()
                kept = [parse_place(line) for line in self._lines().splitlines()]
                num_before = len(kept)
                spoilt = {place.offset for place in kept if place.uid in uids}
                kept = [place for place in kept if place.uid not in uids]
                if spoilt:
                    self._write_anew(kept, spoilt)
                return num_before - len(kept)
        except FileNotFoundError:  # it was removed meanwhile
            return 0

    def _write_anew(self, kept: Sequence[Place], spoilt: Collection[int]) -> None:
        """Replace the file by one with the requests *kept*; some of them are in the *spoilt* frames."""
        new, lines, end = self.frames.with_name(f".{self.name}.new"), bytearray(), 0
        descriptor = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, is_ours=True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # no other process may write to it before it has its index
            for offset, places in groupby(kept, key=lambda place: place.offset):
                inside = list(places)
                frame = self._frame(inside[0])
                if offset in spoilt:
                    frame = only(frame, {place.uid for place in inside})
                if frame:
                    _write_all(descriptor, frame)
                    for place in inside:
                        lines += dataclasses.replace(place, offset=end, size=len(frame)).line()
                    end += len(frame)
            os.fsync(descriptor)
            failpoint("archive.before_replace")
            # Without an index, readers make one from the frames, so it never names what the frames do not hold.
            self.index.unlink(missing_ok=True)
            sync_folder(self.folder)
            failpoint("archive.without_index")
            new.replace(self.frames)
            sync_folder(self.folder)
            failpoint("archive.after_replace")
            replace(self.index, lines)
        except OSError:  # the disk may be full
            self._drop_unfinished()
            raise
        finally:
            os.close(descriptor)

    def _frame(self, place: Place) -> bytes:
        with open(open_ours(self.frames), "rb") as file:
            left = os.fstat(file.fileno()).st_size - place.offset
            file.seek(place.offset)
            return file.read(max(0, min(place.size, left, MOST_TEXT_BYTES)))  # packed, it is hardly ever larger

    def remove(self) -> None:
        """Delete the files.

        Raises:
            VolumeBusy: Another process writes to them.
            OSError: They cannot be deleted.
        """
        with contextlib.suppress(FileNotFoundError), self.locked():
            for path in (self.index, self.frames):
                path.unlink(missing_ok=True)
            self._drop_unfinished()

    def _drop_unfinished(self) -> None:
        """Delete the files of processes that died while they replaced a file. The caller has the lock."""
        for path in self.folder.glob(f".{self.name}.*"):
            path.unlink(missing_ok=True)

    def _mend(self, descriptor: int, *, thorough: bool) -> int:
        """Mend the file; return the size of the frames. Unless *thorough*, look only at the end of the index."""
        size = os.fstat(descriptor).st_size
        end = _trusted(self.index)[1] if thorough else _end_of(_tail(self.index))
        if end == size:
            return size
        lines = self._lines()
        end = _end_of(lines)
        if end < size:
            logger.warning("archive_cut", file=self.frames.name, bytes=size - end, reason="a frame was half written")
            os.ftruncate(descriptor, end)
            os.fsync(descriptor)
        replace(self.index, lines)
        return end


def volumes(folder: Path) -> list[Volume]:
    """Return the volumes in *folder*, by hour; [] if there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (_NAME.fullmatch(name.removesuffix(FRAMES)) for name in names if name.endswith(FRAMES))
    parts = sorted((match[1], match[2], int(match[3])) for match in found if match)
    return [Volume(*each, folder) for each in parts]


def hour_of(ms: float) -> str:
    """Return the hour of a time, in the form of a volume's name."""
    return time.strftime("%Y%m%d%H", time.gmtime(ms / 1000))


def sync_folder(folder: Path) -> None:
    """Write the names of new files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes | bytearray) -> None:
    """Write a private file, whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, is_ours=True)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    new.replace(path)
    sync_folder(path.parent)


def _scanned(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield the lines of the index for the whole frames from *offset* on, and for damaged parts between them."""
    for at, size, recordings in frames_in(file, offset):
        lines = (Place(recording.uid, *moments_of(recording), at, size).line() for recording in recordings)
        found = [line for line in lines if _LINE.fullmatch(line)]
        yield b"".join(found) or Place(DAMAGED, 0, 0, at, size).line()


def _trusted(path: Path) -> tuple[bytes, int]:
    """Return the whole lines of an index, and the end of the last frame that they name; nothing if it is damaged or not
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
    lines = lines[: lines.rfind(b"\n") + 1]
    end = _end_of(lines)
    return (b"", 0) if end < 0 or b"\0" in lines else (lines, end)


def _tail(path: Path) -> bytes:
    """Return the end of an index."""
    try:
        with open(open_ours(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LAST_LINE))
            return file.read(_LAST_LINE)
    except (FileNotFoundError, UnsafeFile):
        return b""


def _say_refused(error: UnsafeFile) -> None:
    logger.warning("archive_file_refused", file=error.filename, reason=error.strerror)


def _end_of(lines: bytes) -> int:
    """Return the end of the frame in the last of *lines*, 0 without any, and -1 if that is not a whole line."""
    if not lines:
        return 0
    try:
        last = parse_place(lines[lines.rfind(b"\n", 0, -1) + 1 :])
    except ArchiveDamaged:
        return -1
    return last.offset + last.size if lines.endswith(b"\n") else -1


def _write_all(descriptor: int, content: bytes | bytearray) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 15 else 0
