"""One file of an archive: a SQLite database. It holds the requests that one archiver wrote in one hour.

    <hour>-<slot>-<epoch>.sqlite    table `requests`: uid, made_ms, ended_ms, and `frame`, a line of `encode_recording`
                                    in a frame of Zstandard

Any process may write to it, one at a time, and any number may read meanwhile: SQLite locks the file. What an archiver
that died has half written, the next one that opens the file takes back.
"""

from __future__ import annotations

import calendar
import contextlib
import errno
import os
import re
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
import zstandard

from pipeline.errors import LogError
from pipeline.process.failpoints import failpoint
from pipeline.process.private import UnsafeFile, check_ours, open_private
from pipeline.recording import MOST_BYTES, Recording, UnreadableRecording, decode_recording, encode_recording

logger = structlog.get_logger()

SUFFIX: Final = ".sqlite"
DAMAGED: Final = ".damaged-"
"""In the name of a file that was damaged, after the name that it had."""
BESIDE: Final = ("-journal", "-wal", "-shm")
"""Ends of the names of files that SQLite may open beside it."""
HOUR_S: Final = 3600
AT_ONCE: Final = 500
"""Uids in one question."""
READ_AT_ONCE: Final = 16
"""Requests in memory at a time."""
BUSY_S: Final = 10.0
"""How long a reader waits for another process that writes, and how long a writer for others."""
WRITE_BUSY_S: Final = 1.0
READ_S: Final = 60.0
"""After this long, a file that is read is taken for damaged."""
FORMAT: Final = 1
"""Newest `user_version` of a file that this code reads and writes."""
MOST_MS: Final = 1 << 62
_SCHEMA: Final = (
    "CREATE TABLE requests (uid TEXT PRIMARY KEY, made_ms INTEGER, ended_ms INTEGER, frame BLOB)",
    "CREATE INDEX made ON requests (made_ms)",
)
_NAME: Final = re.compile(r"([1-9][0-9]{3}(?:0[1-9]|1[0-2])[0-3][0-9][0-2][0-9])-([a-z]+-[0-9]+)-([0-9]{1,18})")


class ArchiveDamaged(LogError):
    """A file of the archive cannot be read, or does not hold what it should."""


class VolumeBusy(LogError):
    """Another process writes to the file."""


class Place(NamedTuple):
    """What is known of a request without reading it."""

    uid: str
    made_ms: int
    """When it was submitted, in ms of Redis' clock; 0: unknown."""
    ended_ms: int


def place_of(recording: Recording) -> Place:
    """Return the place of a request."""
    first, last = (recording.entries[at].fields.get("ms", "") if recording.entries else "" for at in (0, -1))
    return Place(recording.uid, _number(first), _number(last))


@dataclass(frozen=True, slots=True)
class Volume:
    """One file of an archive."""

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
    def path(self) -> Path:
        return self.folder / f"{self.hour}-{self.slot}-{self.epoch}{SUFFIX}"

    @property
    def until_s(self) -> float:
        """End of its hour, in seconds since 1970."""
        return end_of(self.hour)

    def num_bytes(self) -> int:
        """Return its size on the disk; 0 if it is gone."""
        return size_of(self.path) + size_of(beside(self.path, "-journal"))

    # for readers

    def find(self, uids: Collection[str]) -> list[Place]:
        """Return the places of those of *uids* that it has. This and the next two: [] if the file is gone, is not ours
        or is damaged.

        Raises:
            VolumeBusy: Another process has written to the file for long.
            OSError: It cannot be read now. Whoever forgets a request must not take it for gone.
        """
        question = "SELECT uid, made_ms, ended_ms FROM requests WHERE uid IN ({})"
        return [place for some in _parts(uids) for place in self._places(question.format(_marks(some)), some)]

    def places(self, since_ms: int = 0, until_ms: int = MOST_MS) -> list[Place]:
        """Return the places of all requests that were submitted from *since_ms* to before *until_ms*."""
        question = "SELECT uid, made_ms, ended_ms FROM requests WHERE made_ms >= ? AND made_ms < ?"
        return self._places(question, (max(0, since_ms), min(until_ms, MOST_MS)))

    def newest(self, before: str, most: int) -> list[Place]:
        """Return the places of the *most* largest uids that are smaller than *before*, the largest first."""
        question = "SELECT uid, made_ms, ended_ms FROM requests WHERE uid < ? ORDER BY uid DESC LIMIT ?"
        return self._places(question, (before, most))

    def read(self, uids: Collection[str]) -> dict[str, Recording]:
        """Return those requests of *uids* that it has.

        Raises:
            ArchiveDamaged: It, or one of them, is damaged. VolumeBusy, OSError: As `find`.
        """
        found: dict[str, Recording] = {}
        with self._reading() as database:
            if database is None:
                return found
            for some in _parts(uids):
                rows = database.execute(f"SELECT uid, frame FROM requests WHERE uid IN ({_marks(some)})", some)
                found |= {uid: self._unpacked(uid, frame) for uid, frame in rows}
        return found

    def recordings(self) -> Iterator[Recording]:
        """Yield all requests, except those that are damaged. Raise as `find`."""
        question = "SELECT uid, frame FROM requests WHERE uid > ? ORDER BY uid LIMIT ?"
        last = ""
        while page := self._asked(question, (last, READ_AT_ONCE)):
            for uid, frame in page:
                with contextlib.suppress(ArchiveDamaged):
                    yield self._unpacked(uid, frame)
            last = page[-1][0]

    def _places(self, question: str, words: Sequence[str | int]) -> list[Place]:
        # SQLite keeps any value in any column.
        return [Place(*row) for row in self._asked(question, words) if [*map(type, row)] == [str, int, int]]

    def _asked(self, question: str, words: Sequence[str | int]) -> list[tuple[Any, ...]]:
        """Return the rows that answer a question; [] if the file is gone, is not ours or is damaged."""
        try:
            with self._reading() as database:
                return database.execute(question, words).fetchall() if database else []
        except ArchiveDamaged as error:
            logger.warning("archive_file_refused", file=str(self.path), reason=str(error))
            return []

    def _unpacked(self, uid: str, frame: object) -> Recording:
        try:
            recording = decode_recording(text_of(frame if isinstance(frame, bytes) else b"", MOST_BYTES))
        except (zstandard.ZstdError, UnreadableRecording) as error:
            raise ArchiveDamaged(f"{self.path} is damaged at {uid}: {error}") from error
        if recording.uid != uid:
            raise ArchiveDamaged(f"{self.path}: expected {uid}, found {recording.uid[:80]}")
        return recording

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection that only reads; None if the file is gone, is empty or is not ours. Raise as `read`."""
        with self._translated():
            database = self._opened()
        if database is None:
            yield None
            return
        with closing(database), self._translated():
            yield database

    def _opened(self) -> sqlite3.Connection | None:
        try:
            try:
                return self._checked()
            except sqlite3.OperationalError as error:
                if not _name(error).startswith("SQLITE_READONLY"):
                    raise
            self.mend()  # a writer died in the middle
            return self._checked()
        except FileNotFoundError:
            return None
        except UnsafeFile as error:
            logger.warning("archive_file_refused", file=error.filename, reason=error.strerror)
            return None

    def _checked(self) -> sqlite3.Connection | None:
        database = self._open("ro")
        try:
            if _checked_format(database):
                return database
        except BaseException:
            database.close()
            raise
        database.close()
        return None

    def _open(self, mode: str) -> sqlite3.Connection:
        # `check_ours` opens nothing: closing a second descriptor would drop the locks of this process on the file.
        for path in (self.path, *(beside(self.path, end) for end in BESIDE)):
            try:
                check_ours(path)
            except FileNotFoundError:
                if path == self.path:
                    raise
        database = sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", uri=True, timeout=BUSY_S, isolation_level=None)
        until_s = time.monotonic() + READ_S
        if mode == "ro":
            database.set_progress_handler(lambda: time.monotonic() > until_s, 1_000_000)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        database.execute("PRAGMA trusted_schema=OFF")
        return database

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the errors of SQLite as VolumeBusy, OSError or ArchiveDamaged."""
        try:
            yield
        except sqlite3.Error as error:
            name = _name(error)
            if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise VolumeBusy(f"{self.path}: another process writes to it") from error
            if name.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR")) and not self.path.exists():
                raise FileNotFoundError(errno.ENOENT, "it is gone", str(self.path)) from error
            if name.startswith("SQLITE_FULL"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            if name.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_PERM")):
                raise OSError(errno.EIO, str(error), str(self.path)) from error
            raise ArchiveDamaged(f"{self.path} is damaged: {error}") from error

    # for writers

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction, which is on the disk when the block ends.

        Raises:
            VolumeBusy: Another process writes to the file.
            FileNotFoundError: There is no such file.
            OSError: It cannot be written.
            ArchiveDamaged: It cannot be read.
        """
        with self._translated(), closing(self._open("rw")) as database:
            database.execute(f"PRAGMA busy_timeout={int(WRITE_BUSY_S * 1000)}")
            for pragma in ("page_size=16384", "journal_mode=DELETE", "synchronous=EXTRA", "secure_delete=ON"):
                database.execute(f"PRAGMA {pragma}")
            database.execute("BEGIN IMMEDIATE")
            if not database.execute("PRAGMA user_version").fetchone()[0]:
                for statement in (*_SCHEMA, f"PRAGMA user_version={FORMAT}"):
                    database.execute(statement)
            _checked_format(database)
            yield database
            if database.in_transaction:
                failpoint("archive.before_commit")
                database.execute("COMMIT")

    def append(self, recordings: Sequence[Recording]) -> None:
        """Write *recordings*, each in the place of an older copy in this file. A request that is too long for readers
        is left out. Raises as `_writing`; then nothing is written.
        """
        rows = []
        for recording in recordings:
            line = encode_recording(recording)
            if len(line) <= MOST_BYTES:
                frame = zstandard.ZstdCompressor(write_checksum=True).compress(line)
                rows.append((*place_of(recording), frame))
            else:
                logger.warning("not_archived", uid=recording.uid, bytes=len(line), reason="it is too long to be read")
        if rows:
            os.close(open_private(self.path, os.O_RDWR | os.O_CREAT, is_ours=True))
            with self._writing() as database:
                database.executemany("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?)", rows)

    def mend(self) -> None:
        """Take back what a dead process has half written. Do nothing while another process writes.

        Raises:
            OSError: The file cannot be written.
        """
        with contextlib.suppress(VolumeBusy, FileNotFoundError, UnsafeFile, ArchiveDamaged), self._writing():
            pass

    def leave_out(self, uids: Collection[str]) -> int:
        """Remove the requests *uids*, and their bytes; return how many there were.

        If this dies before the commit, the next call does it all. If it dies after, the next one that removes something
        gives the room back. Raises as `_writing`.
        """
        try:
            with self._writing() as database:
                num_removed = 0
                for some in _parts(uids):
                    deleted = database.execute(f"DELETE FROM requests WHERE uid IN ({_marks(some)})", some)
                    num_removed += deleted.rowcount
                failpoint("archive.before_commit")
                database.execute("COMMIT")
                failpoint("archive.before_vacuum")
                database.execute("VACUUM")  # the bytes are zeros now; this gives the room back
                return num_removed
        except FileNotFoundError:  # it was removed meanwhile
            return 0

    def set_aside(self) -> None:
        """Give a damaged file another name, so that a new one can be written. Raise OSError if that fails."""
        aside = beside(self.path, f"{DAMAGED}{time.time_ns():x}")
        logger.error("archive_file_damaged", file=str(self.path), kept_as=aside.name)
        self.path.rename(aside)
        beside(self.path, "-journal").unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the file. Raise OSError if it cannot be deleted; UnsafeFile if it is not ours."""
        with contextlib.suppress(FileNotFoundError):
            check_ours(self.path)
        for path in (self.path, *(beside(self.path, end) for end in BESIDE)):
            path.unlink(missing_ok=True)


def parts_of(name: str) -> tuple[str, str, int] | None:
    """Return hour, slot and epoch in the name of a file without its suffix; None if it has no such name."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2], int(found[3])) if found else None


def hour_of(ms: float) -> str:
    """Return the hour of a time, in the form of a volume's name."""
    return time.strftime("%Y%m%d%H", time.gmtime(ms / 1000))


def end_of(hour: str) -> float:
    """Return the end of an hour, in seconds since 1970."""
    year, *others = (int(hour[first:last]) for first, last in ((0, 4), (4, 6), (6, 8), (8, 10)))
    return calendar.timegm((year, *others, 0, 0)) + HOUR_S


def text_of(frame: bytes, most_bytes: int) -> bytes:
    """Return the text in a frame. Its declared size is checked before it is unpacked. Raise ZstdError."""
    if (size := zstandard.frame_content_size(frame)) > most_bytes:
        raise zstandard.ZstdError(f"it would be {size:,} bytes, and at most {most_bytes:,} are unpacked")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=most_bytes)


def beside(path: Path, end: str) -> Path:
    """Return the path of a file that SQLite keeps beside *path*."""
    return path.with_name(path.name + end)


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if it is gone."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _checked_format(database: sqlite3.Connection) -> int:
    """Return the format of a file; 0: it is new. Raise DatabaseError unless it has our tables and nothing else: a view
    could make its readers work for ever."""
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT:
        raise sqlite3.DatabaseError(f"it has format {version}, and this MiniSGL reads up to {FORMAT}; use a newer one")
    found = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL LIMIT 9")]
    if version and sorted(found) != sorted(_SCHEMA):
        raise sqlite3.DatabaseError("its tables are none of ours")
    return version


def _name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")


def _parts(uids: Collection[str]) -> Iterator[list[str]]:
    left = iter(uids)
    while some := list(islice(left, AT_ONCE)):
        yield some


def _marks(uids: Sequence[str]) -> str:
    return ",".join("?" * len(uids))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 15 else 0
