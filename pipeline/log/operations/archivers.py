"""Operations for archivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.log.operation import Batch, Command, LogContext, Script, Steps, Words, commit
from pipeline.log.operations.requests import wholes
from pipeline.log.protocol import Entry, Owner
from pipeline.log.replies import as_text, history_of, nothing, unless_fenced
from pipeline.names import ARCHIVE


def open_archive(log: LogContext, archive_id: str) -> Script[str]:
    """Let the commits that end requests append their uids to `ended` from now on.

    Return the id of the namespace's archive: *archive_id*, unless it already has another one.
    """
    keys = {"ended": log.names.ended, "archive": log.names.archive}
    return commit("open_archive", as_text, keys, group=ARCHIVE, archive=archive_id)


def close_archive(log: LogContext) -> Command[bool]:
    """Undo `open_archive`, and drop the entries of `ended`. Return False if the namespace has no archive."""
    return Command(["DEL", log.names.ended, log.names.archive], bool)


def archived(log: LogContext, owner: Owner, entries: Sequence[Entry], lost: Sequence[Entry] = ()) -> Script[None]:
    """Consume *entries* and *lost* of `ended`. The histories of *lost* had expired; they are counted. Raise Fenced."""

    def parse(reply: Any) -> None:
        nothing(unless_fenced(owner, reply))

    return commit(
        "archived",
        parse,
        {"owner": log.names.owner(owner.slot), "ended": log.names.ended, "archive": log.names.archive},
        owner=str(owner),
        group=ARCHIVE,
        done=[entry.id for entry in entries],
        lost=[entry.id for entry in lost],
    )


def begins(log: LogContext, uids: Sequence[str]) -> Steps[dict[str, Entry]]:
    commands: list[Words] = [["XRANGE", log.names.request(uid), "-", "+", "COUNT", 1] for uid in uids]
    raw = yield from Batch(commands, lambda replies: [*map(history_of, replies)], any_type=True)
    found = yield from wholes(log.names, list(zip(uids, raw, strict=True)))
    return {uid: first[0] for uid, first in zip(uids, found, strict=True) if first}


def num_unarchived(log: LogContext) -> Command[int]:
    """Return how many requests expired before an archiver read them."""
    return Command(["HMGET", log.names.archive, "unarchived"], lambda found: int(found[0] or 0))


def is_recounted(log: LogContext) -> Command[bool]:
    """Return whether usage was recounted from the archive since the log began, or last lost its data."""
    return Command(["HMGET", log.names.archive, "recounted"], lambda found: found[0] is not None)


def recounted(log: LogContext, owner: Owner) -> Script[None]:
    """Note that usage was recounted. Raise Fenced."""

    def parse(reply: Any) -> None:
        nothing(unless_fenced(owner, reply))

    keys = {"owner": log.names.owner(owner.slot), "archive": log.names.archive}
    return commit("recounted", parse, keys, owner=str(owner))
