"""MemoryLog's methods for the ranks of engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from support.memory_log.leases import Leases
from support.memory_log.streams import Stream, Streams, id_text

from pipeline.log.protocol import Entry, Owner
from pipeline.log.ranks import Formation, ranks_inbox
from pipeline.names import Names, parse_id, rank_stage, slot_stage


class MemoryRanks:
    """RedisLog's methods beside RedisLog, on the streams, the leases and the lock of a MemoryLog."""

    names: Names
    _changed: threading.Condition
    _streams: Streams
    _leases: Leases
    _now_ms: Callable[[], int]

    def form(self, group: str, formation: Formation, *, ttl_ms: int) -> str:
        with self._changed:
            self._leases.fence(formation.rank_0)
            key, now_ms = self.names.ranks(group), self._now_ms()
            stream = self._streams.get(key) or Stream()
            if not any(entry["nonce"] == formation.nonce for entry in stream.entries.values()):
                for rank in range(1, formation.size):
                    self._streams.prepare(ranks_inbox(self.names, group, rank_stage(rank)))
                fields = {"nonce": formation.nonce, "ms": str(now_ms)} | formation.fields()
                made = self._streams.append(key, None, fields, make=True, cap=1)
                assert made is not None
                stream = made
            stream.expires_ms = now_ms + ttl_ms
            return id_text(stream.last)

    def joined(self, owner: Owner, group: str, entries: Sequence[Entry]) -> None:
        with self._changed:
            self._leases.fence(owner)
            stream = self._streams.get(self.names.ranks(group)) or Stream()
            if slot_stage(owner.slot) in stream.groups:
                for entry in entries:
                    stream.groups[slot_stage(owner.slot)].pending.pop(parse_id(entry.id), None)
