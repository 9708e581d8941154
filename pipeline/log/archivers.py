"""What archivers need of the log besides StreamLog. The same contract suite holds for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.log.protocol import Entry, Inbox, Owner, StreamLog
from pipeline.names import ARCHIVE, Names


def ended_inbox(names: Names) -> Inbox:
    """Return the stream of what has ended, and the group of the archivers."""
    return Inbox(names.ended, ARCHIVE)


class ArchiverLog(StreamLog, Protocol):
    """The log as archivers use it."""

    def open_archive(self, archive_id: str) -> str:
        """Have the commits that end requests name them in `ended` from now on.

        Return the id of the archive that the namespace has: *archive_id*, unless it has another one.
        """

    def close_archive(self) -> bool:
        """Undo that, and drop what waits in `ended`. False if the namespace has no archive."""

    def archived(self, owner: Owner, entries: Sequence[Entry], lost: Sequence[Entry] = ()) -> None:
        """Consume *entries* of `ended`, and those whose requests are *lost*, which are counted. Raises Fenced."""

    def num_unarchived(self) -> int:
        """Return how many requests expired before an archiver had read them."""

    def begins(self, uids: Sequence[str]) -> dict[str, Entry]:
        """Return how the histories begin that are there; of a request that was erased, its tombstone."""
