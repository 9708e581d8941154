"""Edits the file of `--limits` in place. Comments and layout stay, because it edits lines.

A [[key]] is its lines with the comments directly above and below, up to an empty line. An edit also changes the parsed
tables, and is refused where the new text does not say the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from pipeline.errors import ConfigError
from web.http.keys import content_of, limits_in

Value: TypeAlias = str | int | bool | date | datetime

_HEADER: Final = re.compile(r"\s*\[\[\s*key\s*\]\]")


class _Place(NamedTuple):
    """The lines of a [[key]]: where it starts, where its header is, and where it ends."""

    start: int
    header: int
    stop: int


class LimitsText:
    """The text of a file of limits, and the tables of its keys."""

    def __init__(self, content: bytes, where: str) -> None:
        """Raises ConfigError if the server would not take it."""
        limits_in(content, where)
        self._where, text = where, content.decode()
        self._end = "\r" if "\r\n" in text else ""
        self._lines = (text if text.endswith("\n") else f"{text}{self._end}\n").split("\n") if text else []
        self.keys: list[dict[str, Any]] = tomllib.loads(text).get("key", [])
        """What the tables say. The methods below change it with the text."""

    def content(self) -> bytes:
        """Return the new content. Raises ConfigError if the server would not take it, or it says something else."""
        content = "\n".join(self._lines).encode()
        limits_in(content, self._where)
        if tomllib.loads(content.decode()).get("key", []) != self.keys:
            raise ConfigError(f"{self._where}: cannot be edited without a change of other lines; edit it by hand")
        return content

    def append(self, values: dict[str, Value]) -> None:
        """Add a table at the end."""
        while self._lines and not self._lines[-1].strip():
            self._lines.pop()
        self._lines += [self._end] * bool(self._lines) + [f"[[key]]{self._end}"]
        self._lines += [self._line(name, value) for name, value in values.items()] + [""]
        self.keys.append(values)

    def remove(self, number: int) -> None:
        """Remove a table with its comments."""
        place = self._place(number)
        del self._lines[place.start : place.stop], self.keys[number]

    def change(self, number: int, **values: Value | None) -> None:
        """Set *values* in a table; None: remove it there."""
        place = self._place(number)
        for name, value in values.items():
            names = re.compile(rf"\s*{name}\s*=")
            at = [line for line in range(place.header + 1, place.stop) if names.match(self._lines[line])]
            new = [] if value is None else [self._line(name, value)]
            if at:
                self._lines[at[0] : at[0] + 1] = new
            else:
                self._lines[place.header + 1 : place.header + 1] = new
            place = self._place(number)
            self.keys[number].pop(name, None)
            if value is not None:
                self.keys[number][name] = value

    def copy(self, number: int) -> None:
        """Put a copy of a table before it, under its number."""
        place = self._place(number)
        lines = self._lines[place.start : place.stop]
        self._lines[place.start : place.start] = lines if not lines[-1].strip() else [*lines, self._end]
        self.keys.insert(number, dict(self.keys[number]))

    def _line(self, name: str, value: Value) -> str:
        if isinstance(value, date):
            text = value.isoformat().replace("+00:00", "Z")
        else:
            text = f'"{value}"' if isinstance(value, str) else str(value).lower()
        return f"{name} = {text}{self._end}"

    def _place(self, number: int) -> _Place:
        headers = [at for at, line in enumerate(self._lines) if line.lstrip().startswith("[")]
        starts = [self._start(header) for header in headers]
        places = [
            _Place(start, header, self._stop(header, limit))
            for start, header, limit in zip(starts, headers, [*starts[1:], len(self._lines)], strict=True)
            if _HEADER.match(self._lines[header])
        ]
        if len(places) != len(self.keys):
            raise ConfigError(
                f"{self._where}: cannot be edited; write each key as a [[key]] with a line for each field"
            )
        return places[number]

    def _start(self, header: int) -> int:
        while header and self._lines[header - 1].lstrip().startswith("#"):
            header -= 1
        return header

    def _stop(self, header: int, limit: int) -> int:
        fields = [at for at in range(header, limit) if self._lines[at].strip()[:1] not in ("", "#")]
        stop = fields[-1] + 1
        while stop < limit and self._lines[stop].strip():
            stop += 1
        while stop < min(limit, len(self._lines) - 1) and not self._lines[stop].strip():
            stop += 1
        return stop


@contextlib.contextmanager
def edited(path: str, where: str) -> Iterator[LimitsText]:
    """Give the text of a file for edits, and put the result in its place: at once and whole, readable for its owner
    alone. A file that is missing is made. Other edits wait meanwhile.

    Raises:
        ConfigError: It cannot be read or replaced, or is wrong before or after the edit. Then it stays as it was.
    """
    file = Path(path).expanduser().resolve()  # of a link, the target is replaced
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            text = LimitsText(content_of(str(file), where) if file.exists() else b"", where)
            yield text
            _replace(file, text.content())
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be written: {error.strerror}; it is as it was") from error


def _replace(file: Path, content: bytes) -> None:
    """Replace the file, which keeps its owner so that the server can still read it. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # with mode 600
    try:
        with os.fdopen(descriptor, "wb") as new:
            if file.exists():
                before = file.stat()
                os.fchown(new.fileno(), before.st_uid, -1)
                with contextlib.suppress(PermissionError):
                    os.fchown(new.fileno(), -1, before.st_gid)
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
