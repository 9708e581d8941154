"""What a commit must do, as MemoryLog does it, and how all that a log holds is compared with it.

The clock of the oracle stands still: nothing expires unless it is told to. An id that a clock makes is learnt from the
log beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from support.memory_log.log import MemoryLog
from support.memory_log.streams import Id, id_text

from pipeline.log.protocol import Entry, Owner, RequestLimits
from pipeline.names import Names, parse_id

OF_THE_CLOCK: Final = ("ms", "age_ms", "deadline_ms")
"""Fields that a commit adds by Redis' clock."""
OF_THE_COPY: Final = ("history", "history_cut")
"""Fields of a dead letter that are compared with the history itself."""


@dataclass(frozen=True, slots=True)
class State:
    """All that a log holds, by key. Times to live are no part of it."""

    streams: Mapping[str, Sequence[Entry]]
    """With what siblings share. A stream that has not changed may be the same object as before."""
    pending: Mapping[str, Sequence[tuple[str, str, int]]]
    """Of each group, by stream: id, consumer, how often it was worked on."""
    sets: Mapping[str, frozenset[str]]
    """Of `live` the members alone: the deadlines are of the clock."""
    strings: Mapping[str, str]


def who_lives(sets: Mapping[str, frozenset[str]], names: Names) -> dict[str, frozenset[str]]:
    """Leave out of the sets of what runs under a quota who has ended: when that one is removed is not said."""
    live = sets.get(names.live, frozenset())
    found = {key: members & live if key.startswith(names.running("")) else members for key, members in sets.items()}
    return {key: members for key, members in found.items() if members}


def without_clock(entry: Entry) -> Entry:
    fields = {name: text for name, text in entry.fields.items() if name not in (*OF_THE_CLOCK, *OF_THE_COPY)}
    return Entry(entry.id, fields)


class CommitOracle:
    """A MemoryLog that stands beside another log, and what happens to it without a commit."""

    def __init__(self, names: Names, limits: RequestLimits) -> None:
        self.names = names
        self.log = MemoryLog(names, limits, clock_ms=lambda: 0)

    def learn_ids(self, streams: Mapping[str, Sequence[Entry]]) -> None:
        """Take over the ids that the clock of the other log has made since the last time."""
        for key, stream in self.log._streams.by_key.items():
            told = streams.get(key, ())
            if len(told) != len(stream.entries):
                continue  # the comparison of what both hold will say so
            learnt: dict[Id, Id] = {}
            for own, entry in zip(reversed(stream.entries), reversed(told), strict=True):
                if own == parse_id(entry.id):
                    break
                learnt[own] = parse_id(entry.id)
            if learnt:
                stream.entries = {learnt.get(own, own): fields for own, fields in stream.entries.items()}
                stream.last = next(reversed(stream.entries))

    def state(self) -> State:
        """Return all that the log holds, without what a clock makes."""
        log, names = self.log, self.names
        pending = {
            key: [(id_text(item), group.pending[item], group.retries.get(item, 1)) for item in sorted(group.pending)]
            for key, stream in log._streams.by_key.items()
            for group in stream.groups.values()
        }
        sets = {names.reader(uid): frozenset(readers) for uid, readers in log._readers.items()}
        sets |= {names.running(key): frozenset(uids) for key, uids in log._quotas.running.items()}
        sets |= {names.live: frozenset(log._live)}
        strings = {names.owner(slot): str(owner) for slot, owner in log._leases.owners.items()}
        strings |= {names.lease(slot): str(owner) for slot, (owner, _) in log._leases.held.items()}
        strings |= {names.status(slot): text for slot, (text, _) in log._leases.said.items()}
        strings |= {
            names.idempotency(key): f"{uid}:{digest}" + (":left" if uid in log._left else "")
            for key, (uid, digest, _) in log._once.items()
        }
        streams = {
            key: [without_clock(entry) for entry in stream.read(stream.entries)]
            for key, stream in log._streams.by_key.items()
        }
        return State(streams, pending, who_lives(sets, names), strings)

    def has_history(self, uid: str) -> bool:
        return self.names.request(uid) in self.log._streams.by_key

    def holder_of(self, key: str) -> str:
        """Return the uid of the request, or of the siblings, with an idempotency key; empty where none has it."""
        return self.log._once.get(key, ("",))[0]

    def owns(self, owner: Owner) -> bool:
        """Return whether *owner* may write for its slot."""
        return self.log._leases.owners.get(owner.slot) == owner

    def expire(self, key: str) -> None:
        """Lose a key, as when its time is over."""
        self.log._streams.drop(key)
        for slot in [slot for slot in self.log._leases.held if self.names.lease(slot) == key]:
            del self.log._leases.held[slot]

    def trim(self, key: str, keep: int) -> None:
        """Lose all but the last *keep* entries of a stream."""
        stream = self.log._streams.by_key.get(key)
        while stream is not None and len(stream.entries) > keep:
            del stream.entries[next(iter(stream.entries))]
