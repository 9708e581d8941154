"""Server-sent events, from the bytes as they come, as a browser reads them (WHATWG HTML, 9.2.6).

Knows the format, not the data in it. The benchmarks, the shell and the tests read streams with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_BREAK: Final = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Frame:
    """One event: its data, and its own id and kind, empty where it has none."""

    data: str
    id: str = ""
    kind: str = ""


class FrameReader:
    """Puts frames together. A frame without a blank line after it does not count: it may be torn."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._id = ""
        self._kind = ""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that *data* completes."""
        data = self._rest + data
        *lines, self._rest = _BREAK.split(data)
        if data.endswith(b"\r"):  # it may be half of a \r\n
            self._rest = lines.pop() + b"\r"
        for line in lines:
            frame = self._take(line.decode(errors="replace"))
            if frame is not None:
                yield frame

    def _take(self, line: str) -> Frame | None:
        if not line:
            frame = Frame("\n".join(self._data), self._id, self._kind) if self._data else None
            self._data, self._id, self._kind = [], "", ""
            return frame
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "id":
                self._id = value
            case "event":
                self._kind = value
        return None


def frames_in(stream: bytes) -> list[Frame]:
    """Return the frames of a whole stream."""
    return list(FrameReader().feed(stream))
