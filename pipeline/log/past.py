"""The methods of the log for past requests: which ones there were, and how one is imported from a file.

Knows the rules; `operations.past` and `memory_past` follow them in Redis and in memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from pipeline.errors import LogError
from pipeline.names import SEAL

if TYPE_CHECKING:
    from pipeline.log.protocol import Entry

MOMENT_DIGITS: Final = 12
"""Number of hex digits at the beginning of a uid: the time when it was made."""
UID_DIGITS: Final = 32
LARGEST: Final = 2**64 - 1
"""Largest half of an id in Redis."""


class NotWhole(LogError):
    """Entries are not a whole history, so they were not imported."""


class Forgotten(LogError):
    """A request was erased. Its tombstone refuses an import."""

    def __init__(self, left_ms: int) -> None:
        super().__init__(f"it was erased; its tombstone stays for {left_ms} ms")
        self.left_ms = left_ms


class PastRequests(Protocol):
    """The part of StreamLog about past requests."""

    def made_between(self, since_ms: int, until_ms: int) -> list[str]:
        """Return the uids of the requests that were made from *since_ms* to before *until_ms*, the oldest first.

        The times are those in the uids, by the clock of the process that drew them. This reads all keys of the server.
        """

    def import_history(self, uid: str, entries: Sequence[Entry], *, again: bool = False) -> bool:
        """Write the whole history of an ended request unchanged, and keep it for the retention of this log.

        Return False if there is a history of *uid*, which stays as it is.

        Raises:
            NotWhole: The new history has no seal.
            Forgotten: The request was erased, and *again* is not set.
            LogFull: Redis is at its maxmemory.
        """


def is_between(uid: str, since_ms: int, until_ms: int) -> bool:
    """Return whether *uid*, which may be any text, was made from *since_ms* to before *until_ms*."""
    moment = uid[:MOMENT_DIGITS]
    return len(uid) >= UID_DIGITS and _digits(since_ms) <= moment < _digits(until_ms)


def _digits(moment_ms: int) -> str:
    return f"{min(max(moment_ms, 0), 16**MOMENT_DIGITS - 1):0{MOMENT_DIGITS}x}"


def check_whole(uid: str, entries: Sequence[Entry]) -> None:
    """Check that *entries* are a history to which nothing can be added.

    Raises:
        NotWhole: They have no seal, or are not entries of a stream in order.
    """
    if not entries or entries[-1].id != SEAL:
        raise NotWhole(f"{uid}: the history has no end; only requests that have ended can be imported")
    last = (0, 0)
    for entry in entries:
        new = _parsed(entry.id)
        if new <= last or not entry.fields:
            raise NotWhole(f"{uid}: expected ids in rising order, each with fields; found {entry.id!r} after {last}")
        last = new


def _parsed(entry_id: str) -> tuple[int, int]:
    """Return the halves of an id in Redis' format; (0, 0) if *entry_id* is not one."""
    found = _ID.fullmatch(entry_id)
    first, second = (int(found[1]), int(found[2])) if found else (0, 0)
    return (first, second) if max(first, second) <= LARGEST else (0, 0)


_ID: Final = re.compile("(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})")
