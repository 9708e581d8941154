"""Operations that erase requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Final

from pipeline.errors import LogUnavailable
from pipeline.log.entries import COPY_TTL_MS
from pipeline.log.forgetting import Chooser, Purged, Unconsumed, of_journals, of_letters, of_replies, tombstone
from pipeline.log.operation import Batch, Command, LogContext, Script, Steps, Words, commit
from pipeline.log.operations.frontends import scan
from pipeline.log.operations.requests import end_words, shared_by
from pipeline.log.operations.slots import SLOTS_PER_LOOK, slots_of
from pipeline.log.replies import as_text, entries_of, info_of, is_ok, nothing
from pipeline.names import GENERATE

KEYS_PER_LOOK: Final = 1000
"""Number of keys that are read at a time, also of entries with only a uid."""
ENTRIES_PER_LOOK: Final = 200
MOST_BEGINNINGS: Final = 100
"""Number of times that a stream is copied from its start because another process has purged it meanwhile."""


def archive_id(log: LogContext) -> Command[str]:
    """Return the id of the archive of the namespace; "" if it has none."""
    return Command(["HMGET", log.names.archive, "id"], lambda found: as_text(found[0] or b""))


def at_work(log: LogContext, uids: Collection[str]) -> Steps[list[str]]:
    """Return where tokenizers and engines still find some of *uids*: `submitted`, `tokenized`."""
    submitted = yield from _told(log.names.submitted, uids)
    tokenized = yield from _told(log.names.tokenized, uids)
    return [name for name, found in (("submitted", submitted), ("tokenized", tokenized)) if found.num_entries]


def unread_steps(log: LogContext) -> Steps[dict[str, tuple[str, str]]]:
    """Return the ids of the first and the last step that no detokenizer has consumed, of engines that have some."""
    found: dict[str, tuple[str, str]] = {}
    for first in count(0, SLOTS_PER_LOOK):
        engines = slots_of(GENERATE, first)
        ends: list[Words] = [["XRANGE", log.names.steps(engine), "-", "+", "COUNT", 1] for engine in engines]
        ends += [["XREVRANGE", log.names.steps(engine), "+", "-", "COUNT", 1] for engine in engines]
        *steps, owners = yield from Batch([*ends, ["MGET", *map(log.names.owner, engines)]], list)
        ids = [entries_of(each)[0].id if each else "" for each in steps]
        here = zip(engines, ids[: len(engines)], ids[len(engines) :], strict=True)
        found |= {engine: (oldest, newest) for engine, oldest, newest in here if oldest and newest}
        if not any(ids) and not any(owners):
            break
    return found


def told(log: LogContext, uids: Collection[str]) -> Steps[Unconsumed]:
    """Say what of *uids* waits for archivers."""
    return (yield from _told(log.names.ended, uids))


def _told(stream: str, uids: Collection[str]) -> Steps[Unconsumed]:
    first, num_named, start = "", 0, "-"
    while True:
        entries = yield from Command(["XRANGE", stream, start, "+", "COUNT", KEYS_PER_LOOK], entries_of)
        first = first or (entries[0].id if entries else "")
        num_named += sum(entry.fields.get("uid") in uids for entry in entries)
        if len(entries) < KEYS_PER_LOOK:
            return Unconsumed(first, num_named)
        start = f"({entries[-1].id}"


def erase(log: LogContext, uid: str, *, finished: bool = False) -> Script[bool]:
    """Replace the history of *uid* by a tombstone, which is kept for the retention, also if there is no history.

    What its siblings share goes, too: erase them all. The archivers are told, unless *finished*: then all of the
    request is gone everywhere. False, and nothing is changed, if it has not ended.
    """
    names, words = log.names, end_words(tombstone(finished=finished))
    return commit(
        "erase",
        is_ok,
        {
            "history": names.request(uid),
            "ended": names.ended,
            "reader": names.reader(uid),
            "shared": shared_by(names, uid),
            "stored": names.stored,
            "stored_bytes": names.stored_bytes,
        },
        *words,
        "n",
        0,
        uid=uid,
        retention_ms=log.limits.retention_ms,
        tells=not finished,
    )


def purge(log: LogContext, uids: Collection[str]) -> Steps[Purged]:
    """Take what is about *uids* and their siblings out of dead letters, replies, journals and `control`.

    Nothing of it stays in the memory of the server, nor what was deleted from these streams before. The other
    entries stay as they are. It is safe beside others who write, and who purge.
    """
    names = log.names
    for copy in (yield from _keys(names.copy(""))):  # copies of runs that died; living runs begin again
        yield from Command(["PEXPIRE", copy, -1], nothing)
    letters = yield from _purged(log, names.dead, lambda: of_letters(uids))
    yield from _purged(log, names.control, lambda: of_replies(uids))
    replies, steps = 0, 0
    for key in (yield from _keys(names.replies(""))):
        replies += yield from _purged(log, key, lambda: of_replies(uids))
    for key in (yield from _keys(names.journal(""))):
        steps += yield from _purged(log, key, lambda: of_journals(uids))
    return Purged(letters, replies, steps)


def _keys(prefix: str) -> Steps[list[str]]:
    """Return the keys that begin with *prefix*."""
    found, cursor = set[str](), ""
    while cursor != "0":
        cursor, keys = yield from scan(prefix, cursor or "0", KEYS_PER_LOOK)
        found |= set(keys)
    return sorted(found)


def _purged(log: LogContext, key: str, chooser: Callable[[], Chooser]) -> Steps[int]:
    """Remove the chosen entries from the stream *key*; return how many."""
    for _ in range(MOST_BEGINNINGS):
        outcome, num_chosen = yield from _purge_once(log, key, chooser())
        if outcome == "DONE":
            return num_chosen
    raise LogUnavailable(f"{key} is purged by others all the time; try again")


def _purge_once(log: LogContext, key: str, choose: Chooser) -> Steps[tuple[str, int]]:
    keys = {"stream": key, "copy": log.names.copy(secrets.token_hex(8)), "versions": log.names.copies}
    cursor, num_chosen, outcome = "", 0, "MORE"
    while outcome == "MORE":
        first = f"({cursor}" if cursor else "-"
        entries = yield from Command(["XRANGE", key, first, "+", "COUNT", ENTRIES_PER_LOOK], entries_of)
        if not entries and not cursor:
            return "DONE", 0
        chosen, last = choose(entries), entries[-1].id if entries else cursor
        ids = {"from": cursor or None, "to": last}
        outcome = yield from commit("purge", as_text, keys, *chosen, copy_ms=COPY_TTL_MS, once=True, **ids)
        cursor, num_chosen = last, num_chosen + len(chosen)
    return outcome, num_chosen


def rewrite_files(_: LogContext) -> Steps[bool]:
    """Have the server write its files anew, without what it does not hold any more. False: not now, ask again."""
    if _is_rewriting((yield from _persistence())):
        return False
    yield from Command(["BGREWRITEAOF"], as_text)
    return True


def are_rewritten(_: LogContext) -> Steps[bool]:
    """Return whether it has done that. Raises LogUnavailable if it failed."""
    told = yield from _persistence()
    if _is_rewriting(told):
        return False
    if told.get("aof_last_bgrewrite_status", "ok") != "ok":
        raise LogUnavailable("it could not write its append-only file anew; its log says why")
    return True


def _persistence() -> Command[dict[str, str]]:
    return Command(["INFO", "persistence"], info_of)


def _is_rewriting(told: Mapping[str, str]) -> bool:
    return any(told.get(f"aof_rewrite_{what}", "0") != "0" for what in ("in_progress", "scheduled"))
