"""What is about a request that is to be forgotten.

What is left of a request that was erased is its tombstone: a history of an end alone. Knows which entries of the shared
streams are about a request; `operations.forgetting` takes them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from pipeline.events import Cancelled
from pipeline.log.journal import Mentions
from pipeline.log.protocol import Entry, Inbox
from pipeline.names import ARCHIVE, Names, base_uid


def ended_inbox(names: Names) -> Inbox:
    """Return the stream of ended requests, and the group of the archivers."""
    return Inbox(names.ended, ARCHIVE)


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
