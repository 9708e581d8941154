"""The consumer groups of MemoryLog: which consumer has read which entry and not consumed it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from support.memory_log.leases import Leases
from support.memory_log.streams import Streams

from pipeline.log.protocol import Entry, Inbox, Owner
from pipeline.names import is_too_new, newer_consumer, parse_id


class MemoryGroups:
    """RedisLog's methods for consumer groups, on the streams, the leases and the lock of a MemoryLog."""

    _changed: threading.Condition
    _streams: Streams
    _leases: Leases

    def backlog(self, inbox: Inbox) -> int:
        with self._changed:
            return self._streams.length(inbox.stream)

    def prepare(self, inbox: Inbox) -> None:
        with self._changed:
            self._streams.prepare(inbox)

    def read(self, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        entries: list[Entry] = []

        def something_new() -> bool:
            entries.extend(self._streams.deliver(inbox, consumer, max_entries))
            return bool(entries)

        self._wait_for(something_new, block_ms)
        return entries

    def pending(self, inbox: Inbox, consumer: str) -> list[Entry]:
        with self._changed:
            stream, group = self._streams.group(inbox)
            own = sorted(entry_id for entry_id, holder in group.pending.items() if holder == consumer)
            for entry_id in own:
                if entry_id not in stream.entries:
                    del group.pending[entry_id]
            return stream.read(own)

    def claim(self, inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        with self._changed:
            self._leases.fence(owner)
            stream, group = self._streams.group(inbox)
            left = [
                (holder, entry_id)
                for entry_id, holder in group.pending.items()
                if self._leases.holder(holder) is None and not is_too_new(holder)
            ]
            claimed = [entry_id for holder, entry_id in sorted(left) if holder != owner.slot][:max_entries]
            group.pending |= dict.fromkeys(claimed, owner.slot)
            return stream.read(claimed)

    def claim_from(self, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
        with self._changed:
            self._leases.fence(owner)
            if self._leases.owners.get(guest.slot) != guest:
                return []
            stream, group = self._streams.group(inbox)
            claimed = sorted(entry_id for entry_id, holder in group.pending.items() if holder == guest.slot)
            group.pending |= dict.fromkeys(claimed[:max_entries], owner.slot)
            return stream.read(claimed[:max_entries])

    def retry(self, inbox: Inbox, owner: Owner, entry: Entry) -> int:
        with self._changed:
            self._leases.fence(owner)
            _, group = self._streams.group(inbox)
            entry_id = parse_id(entry.id)
            if group.pending.get(entry_id) != owner.slot:
                return 0
            group.retries[entry_id] = group.retries.get(entry_id, 1) + 1
            return group.retries[entry_id]

    def _consume_or_try(self, inbox: Inbox, entry_id: str, tries: int) -> bool:
        """Consume an entry, or set its number of tries. Return False if it was consumed, or tried as often, before."""
        if not tries:
            return self._streams.consume(inbox, entry_id)
        _, group = self._streams.group(inbox)
        key = parse_id(entry_id)
        if key not in group.pending or group.retries.get(key, 1) >= tries:
            return False
        group.retries[key] = tries
        return True

    def in_hand(self, inbox: Inbox) -> dict[str, int]:
        with self._changed:
            return dict(Counter(self._streams.group(inbox)[1].pending.values()))

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        with self._changed:
            return list(self._streams.group(inbox)[1].pending.values()).count(consumer)

    def forsaken(self, inbox: Inbox, *, but: str = "") -> list[str]:
        with self._changed:
            _, group = self._streams.group(inbox)
            slots = sorted(slot for slot in {*group.pending.values()} - {but} if not is_too_new(slot))
            return [slot for slot in slots if self._leases.lease(slot).is_free]

    def leave(self, inbox: Inbox, consumer: str, entry: Entry, version: int) -> bool:
        with self._changed:
            _, group = self._streams.group(inbox)
            if group.pending.get(parse_id(entry.id)) != consumer:
                return False
            group.pending[parse_id(entry.id)] = newer_consumer(inbox.group, version)
            return True

    def left(self, inbox: Inbox, max_entries: int) -> list[Entry]:
        with self._changed:
            stream, group = self._streams.group(inbox)
            ids = sorted(entry_id for entry_id, holder in group.pending.items() if is_too_new(holder))
            return stream.read(ids[:max_entries])

    def _wait_for(self, predicate: Callable[[], bool], block_ms: int) -> None:
        with self._changed:
            self._changed.wait_for(predicate, block_ms / 1000)
