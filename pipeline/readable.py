"""What can be said of an entry before its fields are looked at: whether it is text, and of which version it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.errors import NewerVersion, UndecodableEvent
from pipeline.names import VERSION

UNREADABLE: Final = "unreadable"
"""A field that readers of the log add to an entry that is not text, or that stands for a key of another type: why."""
LONGEST_VERSION: Final = 6
"""Digits of a version; more are no version."""


def check_readable(fields: Mapping[str, str]) -> None:
    """Return if an entry with these fields is text, of a version that this code reads.

    Raises:
        NewerVersion: It is of a newer version.
        UndecodableEvent: It is not text, or has no version that can be.
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
