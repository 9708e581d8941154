"""The methods of the log for erasing requests. The same contract suite tests them.

An erased request leaves a tombstone: a history of only an end. Knows which entries of the shared streams are about a
request; `operations.forgetting` and `memory_forgetting` remove them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from pipeline.events import Cancelled
from pipeline.log.archivers import ArchiverLog
from pipeline.log.journal import Mentions
from pipeline.log.protocol import Entry
from pipeline.names import base_uid

FORGETTING: Final = "forgetting"
"""`by` in a tombstone until the rest of the request is removed .."""
FORGOTTEN: Final = "forget"
""".. and `by` from then on."""

Chooser: TypeAlias = Callable[[Sequence[Entry]], list[str]]
"""Called with the entries of a stream, in parts and in order; returns the ids of those to remove."""


@dataclass(frozen=True, slots=True)
class Purged:
    """Number of entries that were removed from shared streams."""

    letters: int = 0
    """Number of dead letters."""
    replies: int = 0
    steps: int = 0
    """Number of steps in the engines' journals."""


class Unconsumed(NamedTuple):
    """Entries of `ended` that archivers have not consumed."""

    first: str
    """Id of the first entry of `ended`, whatever it is about; "" if there is none."""
    num_entries: int
    """Number of entries about the requests in question."""


class ForgettingLog(ArchiverLog, Protocol):
    """The log for `minisgl replay forget`."""

    def archive_id(self) -> str:
        """Return the id of the archive of the namespace; "" if it has none."""

    def at_work(self, uids: Collection[str]) -> list[str]:
        """Return the streams in which tokenizers and engines still find some of *uids*: `submitted`, `tokenized`."""

    def unread_steps(self) -> dict[str, tuple[str, str]]:
        """Return the ids of the first and the last step that no detokenizer has consumed, of engines that have some."""

    def told(self, uids: Collection[str]) -> Unconsumed:
        """Return what archivers have not consumed about *uids*."""

    def erase(self, uid: str, *, finished: bool = False) -> bool:
        """Replace the history of *uid* by a tombstone, which is kept for the retention, even if there is no history.

        Its siblings' shared texts go, too, so erase all siblings. Archivers get an entry of `ended`, unless *finished*:
        then the request is removed everywhere. Return False, and change nothing, if the request has not ended.
        """

    def purge(self, uids: Collection[str]) -> Purged:
        """Remove the entries about *uids* and their siblings from dead letters, replies, journals and `control`.

        Nothing of them stays in the memory of the server, nor what was deleted from these streams before. The other
        entries stay as they are. Other clients may write and purge at the same time.
        """

    def rewrite_files(self) -> bool:
        """Let the server rewrite its files, without what it no longer holds. Return False if it cannot now."""

    def are_rewritten(self) -> bool:
        """Return whether the files are rewritten. Raise LogUnavailable if that failed."""


def tombstone(*, finished: bool) -> Cancelled:
    """Return the event of a tombstone."""
    return Cancelled(by=FORGOTTEN if finished else FORGETTING)


def uids_in(texts: Iterable[str]) -> set[str]:
    """Return every part of *texts* that may be a uid."""
    return {uid for text in texts for uid in _UID.findall(text)}


def of_letters(uids: Collection[str]) -> Chooser:
    """Choose the dead letters of *uids*, and letters about unreadable entries that name one of them."""
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
    """Choose the steps with one of *uids*; snapshots after the first of them, because they have hashes of its prompt;
    and steps whose requests are unknown.
    """
    mentions = Mentions({*map(base_uid, uids)}, uids_in)
    return lambda entries: [entry.id for entry in entries if mentions.has(entry)]


_UID = re.compile("[0-9a-f]{32}")
