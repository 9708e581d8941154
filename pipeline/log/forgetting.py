"""What the log does for those who forget requests. The same contract suite holds for it.

What is left of a request that was erased is its tombstone: a history of an end alone. Knows which entries of the shared
streams are about a request; `operations.forgetting` and `memory_forgetting` take them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from pipeline.events import Cancelled
from pipeline.log.journal import Mentions
from pipeline.log.protocol import Entry, Inbox, Owner, StreamLog
from pipeline.names import ARCHIVE, Names, base_uid


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


FORGETTING: Final = "forgetting"
"""By whom the request of a tombstone was ended, until everything else of it is gone, too .."""
FORGOTTEN: Final = "forget"
""".. and from then on."""

Chooser: TypeAlias = Callable[[Sequence[Entry]], list[str]]
"""Is given the entries of a stream, piece by piece and in order; returns the ids of those that are to go."""


@dataclass(frozen=True, slots=True)
class Purged:
    """How many entries were taken out of shared streams."""

    letters: int = 0
    """Dead letters."""
    replies: int = 0
    steps: int = 0
    """Of the journals of the engines."""


class Unconsumed(NamedTuple):
    """What archivers have not consumed."""

    first: str
    """Id of the first entry of `ended`, whatever it is about; "" if there is none."""
    num_entries: int
    """How many entries are about the requests in question."""


class ForgettingLog(ArchiverLog, Protocol):
    """The log as `minisgl replay forget` uses it."""

    def archive_id(self) -> str:
        """Return the id of the archive of the namespace; "" if it has none."""

    def at_work(self, uids: Collection[str]) -> list[str]:
        """Return where tokenizers and engines still find some of *uids*: `submitted`, `tokenized`."""

    def unread_steps(self) -> dict[str, tuple[str, str]]:
        """Return the ids of the first and the last step that no detokenizer has consumed, of engines that have some."""

    def told(self, uids: Collection[str]) -> Unconsumed:
        """Say what of *uids* waits for archivers."""

    def erase(self, uid: str, *, finished: bool = False) -> bool:
        """Replace the history of *uid* by a tombstone, which is kept for the retention, also if there is no history.

        What its siblings share goes, too: erase them all. The archivers are told, unless *finished*: then all of the
        request is gone everywhere. False, and nothing is changed, if it has not ended.
        """

    def purge(self, uids: Collection[str]) -> Purged:
        """Take what is about *uids* and their siblings out of dead letters, replies, journals and `control`.

        Nothing of it stays in the memory of the server, nor what was deleted from these streams before. The other
        entries stay as they are. It is safe beside others who write, and who purge.
        """

    def rewrite_files(self) -> bool:
        """Have the server write its files anew, without what it does not hold any more. False: not now, ask again."""

    def are_rewritten(self) -> bool:
        """Return whether it has done that. Raises LogUnavailable if it failed."""


def tombstone(*, finished: bool) -> Cancelled:
    """Return the end that a tombstone is."""
    return Cancelled(by=FORGOTTEN if finished else FORGETTING)


def uids_in(texts: Iterable[str]) -> set[str]:
    """Return whatever in *texts* may be a uid."""
    return {uid for text in texts for uid in _UID.findall(text)}


def of_letters(uids: Collection[str]) -> Chooser:
    """Choose the dead letters of *uids*, and entries that could not be read and name one of them."""
    bases = {*map(base_uid, uids)}

    def is_about(letter: Entry) -> bool:
        named = base_uid(letter.fields.get("uid", "")) in bases
        return named or ("stream" in letter.fields and not bases.isdisjoint(uids_in([letter.fields.get("entry", "")])))

    return lambda letters: [letter.id for letter in letters if is_about(letter)]


def of_replies(uids: Collection[str]) -> Chooser:
    """Choose the entries of `replies` and `control` that name one of *uids*."""
    bases = {*map(base_uid, uids)}
    return lambda entries: [entry.id for entry in entries if not bases.isdisjoint(uids_in(entry.fields.values()))]


def of_journals(uids: Collection[str]) -> Chooser:
    """Choose the steps that had one of *uids*; snapshots after the first of them, because they have hashes of its
    prompt; and steps of which nobody can tell what they had.
    """
    mentions = Mentions({*map(base_uid, uids)}, uids_in)
    return lambda entries: [entry.id for entry in entries if mentions.has(entry)]


_UID = re.compile("[0-9a-f]{32}")
