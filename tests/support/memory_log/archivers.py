"""MemoryLog's methods for archivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from support.memory_log.leases import Leases
from support.memory_log.streams import Streams

from pipeline.log.forgetting import ended_inbox
from pipeline.log.protocol import Entry, Owner, RequestLimits
from pipeline.names import Names


class MemoryArchivers:
    """RedisLog's methods beside RedisLog, on the streams, the leases and the lock of a MemoryLog."""

    names: Names
    limits: RequestLimits
    _changed: threading.Condition
    _streams: Streams
    _leases: Leases
    _now_ms: Callable[[], int]
    _archive_id = ""
    _num_unarchived = 0

    def open_archive(self, archive_id: str) -> str:
        with self._changed:
            self._archive_id = self._archive_id or archive_id
            self._streams.prepare(ended_inbox(self.names))
            return self._archive_id

    def close_archive(self) -> bool:
        with self._changed:
            was_open = bool(self._archive_id) or self._streams.get(self.names.ended) is not None
            self._streams.drop(self.names.ended)
            self._archive_id, self._num_unarchived = "", 0
            return was_open

    def archived(self, owner: Owner, entries: Sequence[Entry], lost: Sequence[Entry] = ()) -> None:
        with self._changed:
            self._leases.fence(owner)
            inbox = ended_inbox(self.names)
            self._num_unarchived += sum(self._streams.consume(inbox, entry.id) for entry in lost)
            for entry in entries:
                self._streams.consume(inbox, entry.id)

    def num_unarchived(self) -> int:
        with self._changed:
            return self._num_unarchived

    def begins(self, uids: Sequence[str]) -> dict[str, Entry]:
        with self._changed:
            streams = {uid: self._streams.get(self.names.request(uid)) for uid in uids}
            there = {uid: stream.read(stream.entries)[:1] for uid, stream in streams.items() if stream is not None}
            return {uid: first[0] for uid, first in there.items() if first}

    def _tell_archivers(self, uid: str) -> None:
        """Append an ended request to `ended`; drop and count entries that are too old. The caller holds the lock."""
        stream = self._streams.append(self.names.ended, None, {"uid": uid})
        if stream is not None and self.limits.ended_ms:
            oldest = (self._now_ms() - self.limits.ended_ms, 0)
            expired = [entry_id for entry_id in stream.entries if entry_id < oldest]
            for entry_id in expired:
                del stream.entries[entry_id]
            self._num_unarchived += len(expired)
