"""Where replays get recorded requests from: the log of a running server, an archive, and dead letters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ops.config import ConnectConfig
from ops.connection import learn_retention, log_and_archive, uid_in
from ops.dead import letters_in
from ops.trace import absent, removed_of
from pipeline.archive.reader import SKEW_S, Archive, Where
from pipeline.events import Submitted, decode
from pipeline.log.archivers import ArchiverLog
from pipeline.log.past import is_between
from pipeline.log.protocol import DEFAULT_LIMITS, Entry, RequestLimits
from pipeline.names import sibling_uids
from pipeline.recording import Recording
from pipeline.views.history import copied_history
from pipeline.walk import PROMPT

SIBLINGS_PER_LOOK: Final = 16


class Source:
    """Finds requests: first in a log, then in an archive, if there is one. What both lack may be in a dead letter."""

    def __init__(self, log: ArchiverLog, archive: Archive | None = None) -> None:
        self.log = log
        self._archive = archive
        self._archived: dict[str, Where] = {}
        """Where requests are that were listed, so that nobody has to search for them again."""
        self.removed: set[str] = set()
        """Requests that `histories` did not find because they were removed with `minisgl replay forget`."""

    def recordings(self, names: Sequence[str]) -> list[Recording]:
        """Return the requests that *names* mean, in this order: uids, or ids of answers. The uid of a body that made
        several requests means all of them.

        Raises:
            NotThere: One is not there; the message says why.
        """
        found: list[Recording] = []
        for name in names:
            uid = uid_in(name)
            here = self._family(uid)
            if not here:
                raise absent(uid, self.log, self._archive)
            found += here
        return found

    def histories(self, uids: Sequence[str]) -> list[Sequence[Entry]]:
        """Return the history of each of *uids*; an empty one where there is none."""
        found: dict[str, Sequence[Entry]] = dict(zip(uids, self.log.histories(uids), strict=True))
        if missing := [uid for uid in uids if not found[uid]]:
            self.removed |= removed_of(self.log, missing)
        for look in (self._in_archive, self._in_letters):
            if missing := [uid for uid in uids if not found[uid] and uid not in self.removed]:
                found |= look(missing)
        return [found[uid] for uid in uids]

    def made_between(self, since_ms: int, until_ms: int) -> list[str]:
        """Return the uids of the requests that were made from *since_ms* to before *until_ms*, the oldest first."""
        uids = set(self.log.made_between(since_ms, until_ms))
        if self._archive is not None:  # it goes by the clock of Redis, and uids by that of the process that drew them
            self._archived = self._archive.located(since_ms - SKEW_S * 1000, until_ms + SKEW_S * 1000)
        dead = (letter.fields.get("uid", "") for letter in self._letters())
        return sorted(uids.union(uid for uid in (*self._archived, *dead) if is_between(uid, since_ms, until_ms)))

    def dead_letter(self, uid: str) -> Entry | None:
        """Return the dead letter of a request that killed its workers; None if there is none."""
        letters = (letter for letter in letters_in(self.log) if letter.fields.get("uid") == uid)
        return next((letter for letter in letters if "stream" not in letter.fields), None)

    def _in_archive(self, uids: Sequence[str]) -> Mapping[str, Sequence[Entry]]:
        found = self._archive.read(uids, self._archived) if self._archive is not None else {}
        return {uid: recording.entries for uid, recording in found.items()}

    def _in_letters(self, uids: Sequence[str]) -> Mapping[str, Sequence[Entry]]:
        found: dict[str, Sequence[Entry]] = {}
        for letter in self._letters():
            uid = letter.fields.get("uid", "")
            if uid in uids and uid not in found:
                found[uid] = copied_history(letter)
        return found

    def _letters(self) -> Iterator[Entry]:
        """Give the dead letters that have the whole history of a request, the newest first."""
        return (letter for letter in letters_in(self.log) if not {"stream", "history_cut"} & letter.fields.keys())

    def _family(self, uid: str) -> list[Recording]:
        (entries,) = self.histories([uid])
        return [Recording(uid, tuple(entries))] if entries else self._siblings(uid)

    def _siblings(self, uid: str) -> list[Recording]:
        """Return the requests of the body *uid* that are still there."""
        uids = sibling_uids(uid, SIBLINGS_PER_LOOK)
        found = dict(zip(uids, self.histories(uids), strict=True))
        first = next((decode(entries[0].fields, without=PROMPT) for entries in found.values() if entries), None)
        if isinstance(first, Submitted):
            more = sibling_uids(uid, first.siblings)[SIBLINGS_PER_LOOK:]
            found |= zip(more, self.histories(more), strict=True)
        return [Recording(each, tuple(entries)) for each, entries in found.items() if entries]


@contextlib.contextmanager
def open_source(
    connect: ConnectConfig,
    archive: str,
    retention_s: float | None = None,
    limits: RequestLimits = DEFAULT_LIMITS,
) -> Iterator[Source]:
    """Give the requests of a server, and of the *archive* in a folder, if one is named.

    *retention_s* is that of the server; None: its workers tell it. Raises as `log_and_archive`.
    """
    with log_and_archive(connect, archive, limits) as (log, files):
        learn_retention(log, retention_s)
        yield Source(log, files)
