"""A request outside of the log: in a dump, or in the archive. One line of JSON, with its version.

`{"v": 1, "uid": "..", "entries": [["0-1", {"kind": "submitted", ..}], ..]}`: the entries of its history, each with its
id and its fields as text, as Redis has them. Entries of siblings are complete: they refer to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from pipeline.errors import LogError
from pipeline.log.protocol import Entry
from pipeline.names import SEAL

RECORDING_VERSION: Final = 1
"""Newest version of a line that this code reads."""
MOST_BYTES: Final = 128 << 20
"""Longest line that is read. Parsed, it can take several times as much memory."""
SHOWN: Final = 60
"""Number of characters of a bad line that an error shows."""


class UnreadableRecording(LogError):
    """A line is not a recorded request; the message says what was found instead."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The history of one request."""

    uid: str
    entries: tuple[Entry, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Other JSON values of its file: its origin, for example."""

    @property
    def is_sealed(self) -> bool:
        """Whether the request has ended, so that nothing more can come."""
        return bool(self.entries) and self.entries[-1].id == SEAL


def encode_recording(recording: Recording) -> bytes:
    """Return the line of *recording*, with its line break."""
    plain = {"v": RECORDING_VERSION, "uid": recording.uid}
    plain |= {"about": dict(recording.about)} if recording.about else {}
    entries = [[entry.id, dict(entry.fields)] for entry in recording.entries]
    return orjson.dumps(plain | {"entries": entries}, option=orjson.OPT_APPEND_NEWLINE)


def decode_recording(line: bytes) -> Recording:
    """Return the request in *line*.

    Raises:
        UnreadableRecording: There is none, it is too long, or is of a newer version.
    """
    if len(line) > MOST_BYTES:
        raise UnreadableRecording(f"a request of {len(line):,} bytes; at most {MOST_BYTES:,} are read")
    try:
        plain = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UnreadableRecording(f"not JSON ({error}): {_start_of(line)}") from error
    version = plain.get("v") if isinstance(plain, dict) else None
    if type(version) is not int or version < 1:
        raise UnreadableRecording(f'expected {{"v": {RECORDING_VERSION}, "uid": .., "entries": ..}}: {_start_of(line)}')
    if version > RECORDING_VERSION:
        raise UnreadableRecording(
            f"it is of version {version}, and this MiniSGL reads up to {RECORDING_VERSION}; read it with a newer one"
        )
    uid, entries, about = plain.get("uid"), plain.get("entries"), plain.get("about", {})
    if not (isinstance(uid, str) and uid and isinstance(entries, list) and isinstance(about, dict)):
        raise UnreadableRecording(f"expected a uid and a list of entries: {_start_of(line)}")
    return Recording(uid, tuple(_entry(item) for item in entries), about)


def _entry(item: Any) -> Entry:
    match item:
        case [str(entry_id), dict(fields)] if all(isinstance(text, str) for text in fields.values()):
            return Entry(entry_id, fields)
    raise UnreadableRecording(f"expected an entry as [id, {{name: text}}]: {_start_of(orjson.dumps(item))}")


def _start_of(line: bytes) -> str:
    text = line[:SHOWN].decode(errors="replace")
    return repr(text) + (" .." if len(line) > SHOWN else "")
