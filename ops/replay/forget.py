"""`minisgl replay forget UID.. | --user LABEL`: removes requests, with everything that is kept of them.

The order is: end what runs, flush the prefix caches, put tombstones in the place of histories, purge what several
requests share, wait for the archivers, have Redis write its files anew, and only then mark the tombstones as done. If a
run dies, the next one completes it: it finds tombstones that are not marked.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import NotThere, counted, learn_retention, one_line, running_log, uid_in
from ops.dead import letters_in
from ops.trace import as_json
from pipeline.archive.folder import archive_id
from pipeline.archive.reader import Archive, open_archive
from pipeline.errors import ConfigError
from pipeline.events import Cancelled
from pipeline.flags import flag, parse_flags, split_names
from pipeline.log.forgetting import FORGOTTEN, Purged, Unconsumed, uids_in
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import ARCHIVE, GENERATE, SEAL, SUBMITTED_ID, base_uid, parse_id
from pipeline.process.failpoints import failpoint
from pipeline.stage.slots import read_statuses
from pipeline.views.history import REQUEUED_FROM, copied_history
from web.wire.copies import COPY_OF

ABOUT: Final = """\
Removes requests: their histories, dead letters, replies and steps in journals, and their copies in the archive. With a
request go those of the same body, those that compute it again, and those that replay drive sent again. A request that
runs is cancelled first.
"""
READ_AT_ONCE: Final = 100
"""Requests in one read."""
MOST_NAMED: Final = 10
"""Dead letters that one line names."""
PATIENCE_S: Final = 10.0
"""How long workers may take to let a request go."""
ARCHIVE_PATIENCE_S: Final = 120.0
"""How long archivers may take for one batch."""
FILES_PATIENCE_S: Final = 600.0
POLL_S: Final = 0.02
SAID: Final = {
    "cancelled": "running request",
    "histories": "history",
    "dead_letters": "dead letter",
    "replies": "reply",
    "steps": "journal step",
    "archived": "archived request",
}
"""What was removed, for people."""


@dataclass(frozen=True, slots=True)
class WhoseConfig:
    """Which requests."""

    user: str = flag(
        "--user", default="", help="remove all requests whose field `user` had this value; pass it instead of UIDs"
    )


FLAGS: Final = (ConnectConfig, RetentionConfig, ArchivedConfig, WhoseConfig, PrintConfig)


@dataclass(slots=True)
class Tally:
    """What became of it."""

    uids: list[str]
    """The requests, those of an earlier run that had died too."""
    cancelled: int = 0
    histories: int = 0
    purged: Purged = field(default_factory=Purged)
    archived: int = 0
    left: list[str] = field(default_factory=list)
    """Where something may be left, and what to do."""
    notes: list[str] = field(default_factory=list)
    """What only the user can do."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Forget requests; return the exit code: 1 if something is left.

    Raises:
        ConfigError: The flags cannot work, or the namespace has an archive that is not named.
        NotThere: There is no such request; all others are forgotten.
        LogUnavailable: There is no such server, or it went away meanwhile; run it again.
    """
    names, flags = split_names(arguments, FLAGS)
    connect, retention, archived, whose, prints = parse_flags(
        "replay forget UID..|--user U", FLAGS, flags, environment, about=ABOUT
    )
    if bool(names) == bool(whose.user):
        raise ConfigError("replay forget: name UIDs, or whose requests with --user, one of both")
    bases = list(dict.fromkeys(base_uid(uid_in(name)) for name in names))
    with running_log(connect) as log:
        learn_retention(log, retention.retention_s)
        archive = _archive_of(log, archived.archive)
        requests = Requests(whose.user)
        requests.look(log, archive, bases)
        missing = [base for base in bases if not requests.has(base)]
        uids = requests.chosen(bases)
        tally = forget(log, archive, requests, uids, None if connect.redis_url else connect.folder)
    if uids:
        _say(tally, as_plain=prints.as_json)
    if missing or not uids:
        who = ", ".join(map(one_line, missing)) or f"--user {one_line(whose.user)}"
        unknown = f". {requests.unknown([])}" if not uids and requests.unknown([]) else ""
        raise NotThere(f"{who}: no such request, in the log or in an archive; nothing was removed of it{unknown}")
    return 1 if tally.left else 0


def _archive_of(log: RedisLog, folder: str) -> Archive | None:
    """Return the archive in *folder*. Raises ConfigError if it is not that of the namespace."""
    archive, found = open_archive(folder) if folder else None, log.archive_id()
    if found and archive is None:
        raise ConfigError(
            f"the namespace {log.names.namespace} has an archive; name its folder with --archive, so that requests are "
            "found there, too"
        )
    if found and archive is not None and archive_id(archive.folder) != found:
        raise ConfigError(f"--archive: {folder} is another archive than that of the namespace {log.names.namespace}")
    return archive


class Requests:
    """All requests that are kept somewhere, and which of them belong together."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._family: dict[str, set[str]] = defaultdict(set)
        """Base uid -> uids."""
        self._again: dict[str, set[str]] = defaultdict(set)
        """Base uid -> base uids of requests that compute it again."""
        self._users: set[str] = set()
        """Base uids of the user's requests."""
        self._unfinished: set[str] = set()
        """Base uids of tombstones that an earlier run has left."""
        self._known: set[str] = set()
        """Base uids of requests of which it is known whose they are."""
        self._letters: dict[str, set[str]] = {}
        """Id of a dead letter -> base uids of the requests that it may be about."""
        self.frontends: dict[str, str] = {}
        """Of the requests in the log."""
        self.archived: set[str] = set()

    def look(self, log: RedisLog, archive: Archive | None, bases: Sequence[str]) -> None:
        """Take in what the log, its dead letters and the archive say. With *bases*, only these are to be found."""
        uids = log.made_between(0, 2**48)
        for first in range(0, len(uids), READ_AT_ONCE):
            some = uids[first : first + READ_AT_ONCE]
            begins = log.begins(some)
            for uid in some:
                if uid in begins and begins[uid].id == SEAL:
                    self._note_tombstone(uid, begins[uid])
                else:
                    self._note(uid, begins.get(uid))
                    self.frontends[uid] = begins[uid].fields.get("frontend", "") if uid in begins else ""
        for letter in letters_in(log):
            uid = letter.fields.get("uid", "")
            about = [uid] if uid else uids_in([letter.fields.get("entry", "")])
            self._letters[letter.id] = {*map(base_uid, about)}
            if uid:
                self._note(uid, _first_of(letter))
        oldest = bases if not self._unfinished else ()
        for recording in archive.copies(oldest) if archive is not None else ():
            self._note(recording.uid, recording.entries[0])
            self.archived.add(recording.uid)

    def has(self, base: str) -> bool:
        """Return whether something is kept of a request, or of one that computes it again."""
        return base in self._family or base in self._again

    def chosen(self, bases: Collection[str]) -> list[str]:
        """Return *bases*, those of the user and those of a run that died, with all that belongs to them."""
        todo, chosen = [*bases, *self._users, *self._unfinished], set[str]()
        while todo:
            base = todo.pop()
            if base not in chosen:
                chosen.add(base)
                todo += self._again.get(base, ())
        return sorted(uid for base in chosen for uid in self._family.get(base, ()))

    def unknown(self, uids: Collection[str]) -> str:
        """Say which dead letters may be of the user, besides those of *uids*; "" if there are none."""
        known = self._known | {*map(base_uid, uids)}
        letters = [letter for letter, bases in self._letters.items() if not bases or not bases <= known]
        if not letters or not self._user:
            return ""
        named = ", ".join(letters[:MOST_NAMED]) + (", .." if len(letters) > MOST_NAMED else "")
        return (
            f"without a known user: {counted(len(letters), 'dead letter')}: {named}. minisgl dead show says what each "
            "is, and minisgl dead drop removes it."
        )

    def _note_tombstone(self, uid: str, entry: Entry) -> None:
        if entry.fields.get("by") != FORGOTTEN:
            self._unfinished.add(base_uid(uid))
            self._family[base_uid(uid)].add(uid)

    def _note(self, uid: str, first: Entry | None) -> None:
        """Take in a request, and the first entry of its history, if that can be read."""
        base, fields = base_uid(uid), first.fields if first is not None else {}
        self._family[base].add(uid)
        if first is not None:
            self._known.add(base)
        labels = _object(fields, "labels")
        for before in (labels.get(REQUEUED_FROM), labels.get(COPY_OF), _object(fields, "replay").get("of")):
            if isinstance(before, str):
                self._again[base_uid(before)].add(base)
        user = labels.get("user")
        if self._user and self._user == (user if isinstance(user, str) else orjson.dumps(user).decode()):
            self._users.add(base)


def _first_of(letter: Entry) -> Entry | None:
    """Return the first entry of the history in a dead letter, or what the letter keeps of it; None without either."""
    history = copied_history(letter) if "history" in letter.fields else []
    if history and history[0].id == SUBMITTED_ID:
        return history[0]
    return Entry(SUBMITTED_ID, {"labels": letter.fields["labels"]}) if "labels" in letter.fields else None


def _object(fields: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return a field that holds an object in JSON; nothing if it does not."""
    try:
        found = orjson.loads(fields.get(name, "{}"))
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def forget(
    log: RedisLog, archive: Archive | None, requests: Requests, uids: Sequence[str], folder: Path | None
) -> Tally:
    """Forget *uids*. *folder* is that of the embedded Redis. Raises LogUnavailable."""
    tally = Tally(list(uids))
    if not uids:
        return tally
    if unknown := requests.unknown(uids):
        tally.notes.append(unknown)
    event = Cancelled(by=FORGOTTEN)
    tally.cancelled = sum(log.end(uid, event, frontend=frontend) for uid, frontend in _of(uids, requests.frontends))
    failpoint("forget.after_end")
    asked = set(uids)
    if not _until(lambda: log.at_work(asked) == [], PATIENCE_S):
        where = ", ".join(log.at_work(asked))
        tally.left.append(f"{where}: workers still have it; start those that are missing, or wait")
    _flush(log, tally)
    living = {base_uid(uid) for uid in log.alive(uids)}
    for uid in uids:
        if base_uid(uid) not in living and log.erase(uid):
            tally.histories += uid in requests.frontends
        else:
            tally.left.append(f"{uid}: this request or a sibling has not ended; the next run ends it")
        failpoint("forget.after_erase")
    # After the flush and before the purge: then journals get no more steps of it, and no snapshots with hashes of its
    # prompt.
    _drain(log, tally)
    tally.purged = log.purge(asked)
    failpoint("forget.after_purge")
    there = _forget_archived(log, archive, asked, tally)
    tally.archived = len((asked & requests.archived) - there)
    if folder is None:
        tally.notes.append(
            "Have Redis write its files anew with BGREWRITEAOF, and remove its snapshots and backups: until then they "
            "have what was removed."
        )
    elif not (_until(log.rewrite_files, FILES_PATIENCE_S) and _until(log.are_rewritten, FILES_PATIENCE_S)):
        tally.left.append(
            f"{folder}: Redis has not written its files anew within {FILES_PATIENCE_S:g} s; look at its log"
        )
    for copies in sorted(folder.glob("damaged-*")) if folder is not None else ():
        tally.notes.append(f"{copies} has copies of files that were damaged; remove it if you do not need it.")
    failpoint("forget.before_mark")
    for uid in uids if not tally.left else ():
        log.erase(uid, finished=True)
    return tally


def _of(uids: Sequence[str], frontends: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((uid, frontends[uid]) for uid in uids if uid in frontends)


def _until(condition: Callable[[], bool], patience_s: float) -> bool:
    """Wait for *condition*; say whether it came in time."""
    deadline_s = time.monotonic() + patience_s
    while not _polled(condition):
        if time.monotonic() > deadline_s:
            return False
    return True


def _polled(condition: Callable[[], bool]) -> bool:
    """Ask *condition*; if it is false, sleep. Redis spends little of its time on this, however long it takes to ask."""
    began_s = time.monotonic()
    if condition():
        return True
    time.sleep(max(POLL_S, 10 * (time.monotonic() - began_s)))
    return False


def _flush(log: RedisLog, tally: Tally) -> None:
    """Have the engines forget the pages of all prompts that no request uses."""
    flush_id = parse_id(log.flush("forget"))

    def waiting() -> list[str]:
        ready = [status for status in read_statuses(log, GENERATE) if status.phase == "ready"]
        return [each.slot for each in ready if not each.flushed or parse_id(each.flushed) < flush_id]

    if not _until(lambda: waiting() == [], PATIENCE_S):
        tally.left.append(f"{', '.join(waiting())}: the prefix cache is not flushed; wait, or end the engine")


def _drain(log: RedisLog, tally: Tally) -> None:
    """Wait until detokenizers have consumed all steps that engines have written up to now."""
    newest = {engine: parse_id(last) for engine, (_, last) in log.unread_steps().items()}

    def waiting() -> list[str]:
        unread = log.unread_steps()
        return [engine for engine in newest if engine in unread and parse_id(unread[engine][0]) <= newest[engine]]

    if not _until(lambda: waiting() == [], PATIENCE_S):
        where = ", ".join(f"steps:{engine}" for engine in waiting())
        tally.left.append(f"{where}: no detokenizer has read them; start minisgl stage detokenize, or wait")


def _forget_archived(log: RedisLog, archive: Archive | None, uids: Collection[str], tally: Tally) -> set[str]:
    """Wait until archivers have written their files anew, as long as they get on; only they do that.

    Return which requests the archive still has.
    """
    told, is_there = Unconsumed("", 0), True

    def is_done() -> bool:
        """Return whether nothing waits, or something has happened since it was asked, or nobody is there."""
        nonlocal told, is_there
        before, told = told, log.told(uids)
        is_there = bool(read_statuses(log, ARCHIVE))
        return told.num_entries == 0 or told != before or not is_there

    while _until(is_done, ARCHIVE_PATIENCE_S) and told.num_entries and is_there:
        time.sleep(POLL_S)
    there = set(archive.find(sorted(uids))) if archive is not None else set[str]()
    if told.num_entries and is_there:
        tally.left.append(f"ended: {counted(told.num_entries, 'request')}, on which archivers still work; wait")
    elif told.num_entries and archive is None:
        waiting = counted(told.num_entries, "request")
        tally.left.append(f"ended: an archiver has to remove {waiting}; start minisgl stage archive")
    elif archive is not None and (there or told.num_entries):
        tally.left.append(
            f"{archive.folder}: {counted(max(len(there), told.num_entries), 'request')}, which only archivers remove; "
            f"start minisgl stage archive --to {archive.folder}"
        )
    return there


def _say(tally: Tally, *, as_plain: bool) -> None:
    purged = tally.purged
    counts = {
        "cancelled": tally.cancelled,
        "histories": tally.histories,
        "dead_letters": purged.letters,
        "replies": purged.replies,
        "steps": purged.steps,
        "archived": tally.archived,
    }
    if as_plain:
        told = {"requests": tally.uids, "removed": counts, "left": tally.left, "notes": tally.notes}
        sys.stdout.write(as_json(told))
        return
    lines = [*tally.uids, f"{counted(len(tally.uids), 'request')} {'forgotten in part' if tally.left else 'forgotten'}"]
    removed = [counted(count, SAID[name]) for name, count in counts.items() if count]
    lines += [f"removed: {', '.join(removed)}"] if removed else []
    lines += tally.notes
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    for line in tally.left:
        sys.stderr.write(f"minisgl: left: {line}\n")
    if tally.left:
        sys.stderr.write("minisgl: then run this again\n")
