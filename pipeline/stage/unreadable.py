"""Handles entries that a worker cannot read: buries them, or leaves them to a newer worker.

    the entry                                   outcome
    of a newer version, its request lives       left: a newer worker claims it, older ones do not
    of a newer version, its request has ended   buried
    of a newer version, without a request       left for LEFT_S, then buried
    any other                                   buried at once

A burial is one commit, one log line and one count. It ends the requests that the entry names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from pipeline.errors import NewerVersion, UndecodableEvent
from pipeline.events import Failed
from pipeline.log.entries import clipped
from pipeline.log.protocol import DEFAULT_LIMITS, Entry, Inbox, Owner, RequestLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import REFUSALS, REQUEST_SUCCESS, UNREADABLE_ENTRIES
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE

logger = structlog.get_logger()

LEFT_S: Final = DEFAULT_LIMITS.timeout_s
"""Time for which an entry of a newer version is left if it names no request, whose deadline would end the wait."""
MOST_LOOKED_AT: Final = 100
STREAMS: Final[Mapping[str, str]] = {TOKENIZE: "submitted", GENERATE: "tokenized", DETOKENIZE: "steps"}
"""Name in the metric of the stream that a group reads."""
DAMAGED: Final = "log_damaged"
"""Code of the error with which requests end."""


class UnreadableEntries:
    """Buries or leaves the entries of one inbox. After an error of the log, a method can be called again."""

    def __init__(
        self,
        log: RequestLog,
        inbox: Inbox,
        measures: Measures,
        owner: Owner | None = None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """*owner*: bury only for that owner of a slot."""
        self._owner = owner
        self._log = log
        self._inbox = inbox
        self._measures = measures
        self._clock_s = clock_s
        self._left_s: dict[str, float] = {}
        """Id of an entry that is left -> time when it was first seen."""

    def refuse(self, entry: Entry, error: UndecodableEvent, consumer: str, uids: Sequence[str]) -> bool:
        """Bury *entry*, which *consumer* has read, or leave it. Return whether it is buried.

        *uids*: the requests that it names. A step that is left stays with its consumer, because the owner of a slot
        reads the steps of its engine in order.
        """
        if not isinstance(error, NewerVersion) or self._is_over(entry, uids):
            self._bury(entry, error, uids)
            return True
        if entry.id not in self._left_s:
            self._left_s[entry.id] = self._clock_s()
            logger.warning("left_to_newer_worker", stream=self._inbox.stream, id=entry.id, reason=str(error))
        if self._inbox.group != DETOKENIZE:
            self._log.leave(self._inbox, consumer, entry, error.version)
        return False

    def look(self) -> None:
        """Bury the entries that this or another worker left, once they have waited long enough."""
        left = self._log.left(self._inbox, MOST_LOOKED_AT)
        self._left_s = {entry.id: self._left_s.get(entry.id, self._clock_s()) for entry in left}
        for entry in left:
            uids = uids_of(entry)
            if self._is_over(entry, uids):
                self._bury(entry, UndecodableEvent("it is of a newer version, and no newer worker has read it"), uids)

    def _is_over(self, entry: Entry, uids: Sequence[str]) -> bool:
        """Return whether no worker needs to read *entry* now."""
        if uids:
            return not self._log.alive(uids)
        return self._clock_s() - self._left_s.get(entry.id, self._clock_s()) >= LEFT_S

    def _bury(self, entry: Entry, error: UndecodableEvent, uids: Sequence[str]) -> None:
        reason = clipped(str(error))
        told = entry.fields.get("frontend", "")
        frontends = {uid: frontend or told for uid, frontend in self._log.frontends_of(uids).items()}
        message = f"The log's entry {entry.id} about this request cannot be read: {reason}"
        event = Failed(status=500, code=DAMAGED, message=message)
        ended = self._log.bury(self._inbox, entry, reason, event, frontends, self._owner)
        self._left_s.pop(entry.id, None)
        if ended is None:
            return
        logger.error("entry_buried", stream=self._inbox.stream, id=entry.id, reason=reason, ended=list(ended))
        self._measures.add(UNREADABLE_ENTRIES, STREAMS[self._inbox.group])
        for _ in ended:
            if self._inbox.group == TOKENIZE:
                self._measures.add(REFUSALS, DAMAGED)
            else:
                self._measures.add(REQUEST_SUCCESS, "error")


def uids_of(entry: Entry) -> tuple[str, ...]:
    """Return the request that an entry of `submitted` or `tokenized` names, whatever else is wrong with it."""
    uid = entry.fields.get("uid", "")
    return (uid,) if uid else ()
