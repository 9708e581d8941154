"""Streams with consumer groups in this process, for the commits of MemoryLog.

Not an emulation of Redis, but reads return what Redis returns. An expired key is noticed when it is read. The caller
holds the lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeline.errors import GroupLost, LogUnavailable
from pipeline.log.entries import JOURNAL_CAP
from pipeline.log.protocol import Entry, Inbox
from pipeline.names import SEAL, parse_id

Id: TypeAlias = tuple[int, int]


def id_text(entry_id: Id) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"


def journal_size(fields: Mapping[str, str]) -> int:
    """Return the size of a journal's entry. In Redis, produced.lua counts the same."""
    return 32 + sum(len(part.encode()) for field in fields.items() for part in field)


def steady_clock_ms() -> Callable[[], int]:
    """Return a clock that begins at the time of day and never jumps."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset_ns) // 1_000_000


@dataclass(slots=True)
class Group:
    """A consumer group."""

    delivered: Id = (0, 0)
    pending: dict[Id, str] = field(default_factory=dict)
    """Entry -> consumer that has read and not consumed it."""
    retries: dict[Id, int] = field(default_factory=dict)
    """Entry -> number of tries, if it is more than one."""


@dataclass(slots=True)
class Stream:
    """Entries in the order of their ids. A new id must be larger than the last one."""

    entries: dict[Id, dict[str, str]] = field(default_factory=dict)
    last: Id = (0, 0)
    groups: dict[str, Group] = field(default_factory=dict)
    expires_ms: float = math.inf

    def after(self, entry_id: Id, limit: int | None = None) -> list[Id]:
        found: list[Id] = []
        for other in reversed(self.entries):  # from the end, because readers read tails
            if other <= entry_id:
                break
            found.append(other)
        return found[::-1][:limit]

    def between(self, first: str, last: str) -> list[Id]:
        """Return the ids from *first* to *last*. As in Redis, these are `-`, `+`, or an id, which `(` leaves out."""
        low = (0, 0) if first == "-" else parse_id(first.removeprefix("("))
        high = parse_id(SEAL) if last == "+" else parse_id(last.removeprefix("("))
        left_out = {bound for bound, text in ((low, first), (high, last)) if text.startswith("(")}
        return [each for each in self.entries if low <= each <= high and each not in left_out]

    def read(self, ids: Iterable[Id]) -> list[Entry]:
        return [Entry(id_text(entry_id), dict(self.entries[entry_id])) for entry_id in ids if entry_id in self.entries]


class Streams:
    """All streams of a log, by key."""

    def __init__(self, clock_ms: Callable[[], int], changed: Callable[[], None]) -> None:
        self.by_key: dict[str, Stream] = {}
        self._now_ms = clock_ms
        self._changed = changed
        """Called after every append."""
        self._sweep_at = 1000  # number of streams at which the expired ones are dropped

    def get(self, key: str) -> Stream | None:
        stream = self.by_key.get(key)
        if stream is not None and self._now_ms() >= stream.expires_ms:
            del self.by_key[key]
            return None
        return stream

    def drop(self, key: str) -> None:
        self.by_key.pop(key, None)

    def has(self, key: str, entry_id: str) -> bool:
        stream = self.get(key)
        return stream is not None and parse_id(entry_id) in stream.entries

    def length(self, key: str) -> int:
        stream = self.get(key)
        return len(stream.entries) if stream is not None else 0

    def sweep(self) -> None:
        """Drop expired streams that were not read, each time the number of streams has doubled."""
        if len(self.by_key) >= self._sweep_at:
            now_ms = self._now_ms()
            self.by_key = {key: stream for key, stream in self.by_key.items() if now_ms < stream.expires_ms}
            self._sweep_at = max(1000, 2 * len(self.by_key))

    def append(
        self, key: str, entry_id: str | None, fields: Mapping[str, str], *, make: bool = False, cap: int | None = None
    ) -> Stream | None:
        """Append under *entry_id*, or under the next id by the clock; return the stream.

        None: the id is not larger than the last one, or (unless *make*) there is no such stream.
        """
        stream = self.get(key)
        if stream is None:
            if not make:
                return None
            stream = self.by_key[key] = Stream()
        next_id = max((self._now_ms(), 0), (stream.last[0], stream.last[1] + 1))
        new = parse_id(entry_id) if entry_id is not None else next_id
        if new <= stream.last:
            return None
        stream.entries[new] = dict(fields)
        stream.last = new
        while cap is not None and len(stream.entries) > cap:
            del stream.entries[next(iter(stream.entries))]
        self._changed()
        return stream

    def append_steps(self, key: str, steps: Mapping[str, Mapping[str, str]]) -> None:
        """Append steps of an engine, by id, unless they exist or existed.

        Raise LogUnavailable while there is an entry of another writer that they cannot follow.
        """
        stream, ids = self.get(key), list(steps)
        if ids and stream is not None and stream.last >= parse_id(ids[0]):
            if stream.last == parse_id(ids[-1]):
                return
            if stream.entries:
                raise LogUnavailable(f"{key} has an entry after {ids[0]} that no engine wrote; waiting for it")
            stream.last = (0, 0)
            for group in stream.groups.values():
                group.delivered = (0, 0)
        for entry_id, fields in steps.items():
            self.append(key, entry_id, fields, make=True)

    def keep(self, key: str, entry_id: str, fields: Mapping[str, str], most_bytes: int, kept_ms: int) -> None:
        """Append a step to a journal and delete the oldest: those beyond *most_bytes*, or older than *kept_ms*."""
        stream = self.get(key)
        newest = stream.entries[next(reversed(stream.entries))] if stream is not None and stream.entries else {}
        total = int(newest.get("bytes", 0)) + journal_size(fields)
        stream = self.append(key, entry_id, {"bytes": str(total)} | dict(fields), make=True, cap=JOURNAL_CAP)
        if stream is None:
            return
        now_ms = self._now_ms()
        stream.expires_ms = now_ms + kept_ms
        for each, oldest in list(stream.entries.items()):
            rest = {name: text for name, text in oldest.items() if name != "bytes"}
            kept = total - int(oldest["bytes"]) + journal_size(rest)
            if kept <= most_bytes and int(oldest["ms"]) >= now_ms - kept_ms:
                break
            del stream.entries[each]

    def prepare(self, inbox: Inbox) -> None:
        self.by_key.setdefault(inbox.stream, Stream()).groups.setdefault(inbox.group, Group())

    def group(self, inbox: Inbox) -> tuple[Stream, Group]:
        stream = self.get(inbox.stream)
        if stream is None or inbox.group not in stream.groups:
            raise GroupLost(f"no group {inbox.group} on {inbox.stream}; prepare makes it")
        return stream, stream.groups[inbox.group]

    def pending(self, inbox: Inbox) -> list[Entry]:
        """Return the entries that were delivered and not consumed; [] if there is no such group."""
        stream = self.get(inbox.stream)
        group = stream.groups.get(inbox.group) if stream is not None else None
        return stream.read(group.pending) if stream is not None and group is not None else []

    def are_pending(self, inbox: Inbox, entries: Iterable[Entry]) -> bool:
        """Return whether all *entries* were delivered and not consumed."""
        stream = self.get(inbox.stream)
        group = stream.groups.get(inbox.group) if stream is not None else None
        return group is not None and all(parse_id(entry.id) in group.pending for entry in entries)

    def deliver(self, inbox: Inbox, consumer: str, max_entries: int) -> list[Entry]:
        stream, group = self.group(inbox)
        new = stream.after(group.delivered, max_entries)
        group.pending |= dict.fromkeys(new, consumer)
        group.delivered = new[-1] if new else group.delivered
        return stream.read(new)

    def consume(self, inbox: Inbox, entry_id: str) -> bool:
        """Acknowledge and delete an entry. Return False, and keep the entry, if it was not pending."""
        return self.consumed(inbox, entry_id) is not None

    def consumed(self, inbox: Inbox, entry_id: str) -> dict[str, str] | None:
        """Do the same; return the fields of the entry, or None."""
        stream = self.get(inbox.stream)
        group = stream.groups.get(inbox.group) if stream is not None else None
        if stream is None or group is None or group.pending.pop(parse_id(entry_id), None) is None:
            return None
        group.retries.pop(parse_id(entry_id), None)
        return stream.entries.pop(parse_id(entry_id), {})
