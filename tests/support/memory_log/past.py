"""MemoryLog's methods for tools, about past requests and steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from support.memory_log.streams import Stream, Streams

from pipeline.log.entries import is_tombstone
from pipeline.log.protocol import Entry, Forgotten, RequestLimits, check_whole, is_between
from pipeline.names import Names


class MemoryPast:
    """RedisLog's methods for past requests and steps, on the streams and the lock of a MemoryLog."""

    names: Names
    limits: RequestLimits
    _changed: threading.Condition
    _streams: Streams
    _now_ms: Callable[[], int]

    def made_between(self, since_ms: int, until_ms: int) -> list[str]:
        prefix = self.names.request("")
        with self._changed:
            uids = [key.removeprefix(prefix) for key in list(self._streams.by_key) if key.startswith(prefix)]
            there = [uid for uid in uids if self._streams.get(self.names.request(uid)) is not None]
        return sorted(uid for uid in there if is_between(uid, since_ms, until_ms))

    def journal(
        self, engine: str, *, first: str = "-", last: str = "+", max_entries: int = 0, newest: bool = False
    ) -> list[Entry]:
        with self._changed:
            stream = self._streams.get(self.names.journal(engine)) or Stream()
            ids = stream.between(first, last)
            return stream.read(ids[-max_entries:] if newest else ids[: max_entries or None])

    def import_history(self, uid: str, entries: Sequence[Entry], *, again: bool = False) -> bool:
        check_whole(uid, entries)
        key = self.names.request(uid)
        with self._changed:
            if (there := self._streams.get(key)) is not None:
                if not is_tombstone(there.read(there.between("-", "+")[:2])):
                    return False
                if not again:
                    raise Forgotten(int(there.expires_ms - self._now_ms()))
                self._streams.drop(key)
            self._streams.sweep()
            for entry in entries:
                self._streams.append(key, entry.id, entry.fields, make=True)
            self._streams.by_key[key].expires_ms = self._now_ms() + self.limits.retention_ms
            return True
