"""Server-sent events, from the bytes as they come. Knows the format, not what is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_BREAK: Final = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Frame:
    """One event: its data, and its id and kind where it says them."""

    data: str
    id: str = ""
    kind: str = ""


class FrameReader:
    """Puts frames together. One that is not ended by a blank line never comes: it may be torn."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._id = ""
        self._kind = ""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that *data* ends."""
        data = self._rest + data
        *lines, self._rest = _BREAK.split(data)
        if data.endswith(b"\r"):  # perhaps half of a break
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
