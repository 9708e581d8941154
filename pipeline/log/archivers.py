"""The methods of the log for archivers, beside StreamLog. The same contract suite tests them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.log.protocol import Entry, Inbox, Owner, StreamLog
from pipeline.names import ARCHIVE, Names


def ended_inbox(names: Names) -> Inbox:
    """Return the stream of ended requests, and the group of the archivers."""
    return Inbox(names.ended, ARCHIVE)


class ArchiverLog(StreamLog, Protocol):
    """The log for archivers."""

    def open_archive(self, archive_id: str) -> str:
        """Let the commits that end requests append their uids to `ended` from now on.

        Return the id of the namespace's archive: *archive_id*, unless it already has another one.
        """

    def close_archive(self) -> bool:
        """Undo `open_archive`, and drop the entries of `ended`. Return False if the namespace has no archive."""

    def archived(self, owner: Owner, entries: Sequence[Entry], lost: Sequence[Entry] = ()) -> None:
        """Consume *entries* of `ended`, and *lost* ones whose histories expired, which are counted. Raise Fenced."""

    def num_unarchived(self) -> int:
        """Return how many requests expired before an archiver read them."""

    def begins(self, uids: Sequence[str]) -> dict[str, Entry]:
        """Return the first entries of the histories that exist; for an erased request, its tombstone."""
