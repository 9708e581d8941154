"""Checks of an entry before its fields are read: whether it is text, and of which version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.errors import NewerVersion, UndecodableEvent
from pipeline.names import VERSION

UNREADABLE: Final = "unreadable"
"""Field with the reason, which readers of the log add to an entry that is not text, or whose key has another type."""
LONGEST_VERSION: Final = 6
"""Largest number of digits of a version."""


def check_readable(fields: Mapping[str, str]) -> None:
    """Return if an entry with these fields is text, of a version that this code reads.

    Raises:
        NewerVersion: The entry is of a newer version.
        UndecodableEvent: The entry is not text, or its version is not possible.
    """
    if UNREADABLE in fields:
        raise UndecodableEvent(fields[UNREADABLE])
    if "v" not in fields:
        return
    said = fields["v"]
    version = int(said) if said.isdecimal() and len(said) <= LONGEST_VERSION else 0
    if version > VERSION:
        raise NewerVersion(version)
    if version < 1:
        raise UndecodableEvent(f"its version is {said[:20]!r}, expected a whole number from 1 on")
