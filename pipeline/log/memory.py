"""StreamLog in this process: what the commits do, under one lock.

Not an emulation of Redis. What is read back equals what Redis gives; whether something expired is looked at when it is
asked for.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import orjson

from pipeline.errors import Fenced, GroupLost
from pipeline.events import End, StepCompleted, Submitted, Tokenized, encode
from pipeline.log.entries import (
    CONTROL_CAP,
    DEAD_CAP,
    DEAD_HISTORY_BYTES,
    MINUTE_MS,
    READER_TTL_MS,
    REPLIES_TTL_MS,
    REPLY_CAP,
    STATUS_TTL_MS,
    letter_fields,
    produced_fields,
    replies_of,
    submitted_fields,
)
from pipeline.log.protocol import (
    DEFAULT_LIMITS,
    GUEST,
    DeadLetter,
    Entry,
    Inbox,
    Lease,
    Once,
    Owner,
    Produced,
    Quota,
    Reply,
    RequestLimits,
    StepCommitted,
    Submission,
    SubmitResult,
    Taken,
)
from pipeline.names import (
    DETOKENIZE,
    GENERATE,
    SEAL,
    SUBMITTED_ID,
    TOKENIZED_ID,
    Names,
    base_uid,
    parse_id,
    sibling_uids,
    slot_index,
    slot_name,
)

Id: TypeAlias = tuple[int, int]


def _text(entry_id: Id) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"


def _in_s(after_ms: float) -> float:
    """Return the moment *after_ms* from now, on the clock that expiry uses."""
    return time.monotonic() + after_ms / 1000


def _over(moment_s: float) -> bool:
    return time.monotonic() >= moment_s


@dataclass(slots=True)
class _Group:
    delivered: Id = (0, 0)
    pending: dict[Id, str] = field(default_factory=dict)
    """Who has read an entry and not consumed it."""
    retries: dict[Id, int] = field(default_factory=dict)
    """How often an entry was worked on, where that is more than once."""


@dataclass(slots=True)
class _Stream:
    entries: dict[Id, dict[str, str]] = field(default_factory=dict)
    """In the order of their ids, because no id is accepted that is not larger than the last."""
    last: Id = (0, 0)
    groups: dict[str, _Group] = field(default_factory=dict)
    expires_s: float = math.inf

    def after(self, entry_id: Id, limit: int | None = None) -> list[Id]:
        found: list[Id] = []
        for other in reversed(self.entries):  # from the end, because it is tails that are read
            if other <= entry_id:
                break
            found.append(other)
        return found[::-1][:limit]

    def read(self, ids: Iterable[Id]) -> list[Entry]:
        return [Entry(_text(entry_id), dict(self.entries[entry_id])) for entry_id in ids if entry_id in self.entries]


class MemoryLog:
    """StreamLog under one condition: every append wakes whoever waits. Any number of threads may share it."""

    def __init__(self, names: Names, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.names = names
        self.limits = limits
        self._changed = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        self._sweep_at = 1000  # number of streams at which the expired ones are dropped
        self._live: dict[str, int] = {}
        self._owners: dict[str, Owner] = {}
        self._leases: dict[str, tuple[Owner, float]] = {}
        self._statuses: dict[str, tuple[str, float]] = {}
        self._once: dict[str, tuple[str, str, float]] = {}
        self._left: set[str] = set()
        self._readers: dict[str, dict[str, float]] = {}
        self._minute = 0
        self._accepted: dict[str, int] = {}  # of each API key, in that minute
        self._running: dict[str, set[str]] = {}

    # requests

    def submit(
        self, uid: str, events: Sequence[Submitted], once: Once | None = None, *, quota: Quota | None = None
    ) -> SubmitResult:
        uids = sibling_uids(uid, len(events))
        with self._changed:
            if any(self._stream(self.names.request(sibling)) is not None for sibling in uids):
                return SubmitResult(Submission.DUPLICATE, uid)
            refused = (once and self._held(once)) or (quota and self._used_up(quota, uid))
            if refused:
                return refused
            backlog = self._length(self.names.submitted) + self._length(self.names.tokenized)
            if backlog + len(events) > self.limits.max_queued:
                return SubmitResult(Submission.BUSY, uid)
            self._sweep()
            now_ms, timeout_ms = _now_ms(), self.limits.timeout_ms
            gone_s = _in_s(timeout_ms + self.limits.retention_ms)
            for sibling, event in zip(uids, events, strict=True):
                history = self.names.request(sibling)
                moments = {"ms": str(now_ms), "deadline_ms": str(now_ms + timeout_ms)}
                self._append(history, SUBMITTED_ID, moments | submitted_fields(event, len(events)), make=True)
                self._streams[history].expires_s = gone_s
                self._live[sibling] = now_ms + timeout_ms
                self._append(self.names.submitted, None, {"uid": sibling, "frontend": event.frontend}, make=True)
            if once is not None:
                self._once = {key: held for key, held in self._once.items() if not _over(held[2])}
                self._once[once.key] = (uid, once.digest, gone_s)
                self._left &= {held[0] for held in self._once.values()}
            if quota is not None:
                self._accepted[quota.key] = self._accepted.get(quota.key, 0) + 1
                self._running.setdefault(quota.key, set()).update(uids)
            return SubmitResult(Submission.ACCEPTED, uid)

    def _held(self, once: Once) -> SubmitResult | None:
        """Say which other request has the idempotency key."""
        other, digest, expires_s = self._once.get(once.key, ("", "", 0.0))
        if _over(expires_s):
            return None
        if digest != once.digest:
            return SubmitResult(Submission.MISMATCH, other)
        return SubmitResult(Submission.ATTACH, other) if other != once.instead_of else None

    def _used_up(self, quota: Quota, uid: str) -> SubmitResult | None:
        """Say what of the quota is used up for now."""
        minute, ms = divmod(_now_ms(), MINUTE_MS)
        if minute != self._minute:
            self._minute = minute
            self._accepted.clear()
        if 0 < quota.requests_per_minute <= self._accepted.get(quota.key, 0):
            return SubmitResult(Submission.TOO_FAST, uid, MINUTE_MS - ms)
        running = self._running.setdefault(quota.key, set())
        running &= self._live.keys()
        if 0 < quota.concurrent_requests <= len(running):
            return SubmitResult(Submission.TOO_MANY, uid)
        return None

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        uid = entry.fields["uid"]
        with self._changed:
            if not self._consume(Inbox.submitted(self.names), entry.id):
                return False
            if not self._append(self.names.request(uid), TOKENIZED_ID, _stamped(encode(event))):
                return False
            fields = {"uid": uid, "frontend": entry.fields["frontend"]}
            return self._append(self.names.tokenized, None, fields, make=True)

    def end(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        consume: Entry | None = None,
        dead: DeadLetter | None = None,
    ) -> bool:
        with self._changed:
            self._live.pop(uid, None)
            if consume is not None:
                self._consume(Inbox.submitted(self.names), consume.id)
            history = self._stream(self.names.request(uid))
            if history is None:
                return False
            fields = _stamped(encode(event) | {"n": str(history.last[0])})
            if not self._append(self.names.request(uid), SEAL, fields):
                return False
            history.expires_s = _in_s(self.limits.retention_ms)
            self._append(self.names.replies(frontend), None, {"uid": uid, **fields}, cap=REPLY_CAP)
            self._tell_engines(uid)
            if dead is not None:
                letter = letter_fields(dead) | _copied(history.read(history.entries))
                said = {"uid": uid, "ms": fields["ms"], **letter}
                self._append(self.names.dead, None, said, make=True, cap=DEAD_CAP)
            return True

    def abandon(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        once: Once | None = None,
        attached: bool = False,
    ) -> bool:
        with self._changed:
            base = base_uid(uid)
            if attached and base not in self._left:
                return False
            if self.read_by_others([uid]):
                if once is not None and self._once.get(once.key, ("",))[0] == base:
                    self._left.add(base)
                return False
            return self.end(uid, event, frontend=frontend)

    def reading(self, uids: Sequence[str], who: str) -> None:
        with self._changed:
            for uid in uids:
                history = self._stream(self.names.request(uid))
                if history is not None and history.last != parse_id(SEAL):
                    self._readers.setdefault(uid, {})[who] = _in_s(READER_TTL_MS)

    def stop_reading(self, uid: str, who: str) -> None:
        with self._changed:
            readers = self._readers.get(uid, {})
            readers.pop(who, None)
            if not readers:
                self._readers.pop(uid, None)

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        with self._changed:
            streams = [self._stream(self.names.request(uid)) for uid in uids]
            first = parse_id(after) if after else (0, 0)
            return [stream.read(stream.after(first)) if stream is not None else [] for stream in streams]

    def alive(self, uids: Sequence[str]) -> set[str]:
        with self._changed:
            return {uid for uid in uids if uid in self._live}

    def forget(self, uids: Sequence[str]) -> None:
        """Delete histories now: in the memory of one process nobody else will open them within the retention."""
        with self._changed:
            for uid in uids:
                self._streams.pop(self.names.request(uid), None)

    def close_replies(self, frontend: str) -> None:
        """Delete what was said to a frontend that listens no more."""
        with self._changed:
            self._streams.pop(self.names.replies(frontend), None)

    # the janitor

    def overdue(self, max_uids: int) -> list[str]:
        with self._changed:
            now_ms = _now_ms()
            due = sorted((deadline_ms, uid) for uid, deadline_ms in self._live.items() if deadline_ms <= now_ms)
            return [uid for _, uid in due[:max_uids]]

    def living(self) -> list[str]:
        with self._changed:
            return sorted(self._live, key=lambda uid: (self._live[uid], uid))

    def frontends_of(self, uids: Sequence[str]) -> dict[str, str]:
        firsts = ((uid, history[:1]) for uid, history in zip(uids, self.histories(uids), strict=True))
        return {uid: first[0].fields.get("frontend", "") if first else "" for uid, first in firsts}

    def read_by_others(self, uids: Sequence[str]) -> set[str]:
        with self._changed:
            return {uid for uid in uids if any(not _over(until_s) for until_s in self._readers.get(uid, {}).values())}

    # dead letters

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        with self._changed:
            stream = self._stream(self.names.dead)
            if stream is None:
                return []
            older = [entry_id for entry_id in stream.entries if not before or entry_id < parse_id(before)]
            return stream.read(older[::-1][:max_entries])

    def drop_dead(self, entry_id: str) -> bool:
        with self._changed:
            stream = self._stream(self.names.dead)
            return stream is not None and stream.entries.pop(parse_id(entry_id), None) is not None

    # after a time in which the log could not be reached

    def incarnation(self) -> str:
        """Return always the same: this log ends with its process."""
        return "memory"

    # engines

    def take(self, owner: Owner, max_entries: int, *, control_cursor: str) -> Taken:
        with self._changed:
            self._fence(owner)
            stream = self._stream(self.names.tokenized)
            entries = self._deliver(Inbox.tokenized(self.names), owner.slot, max_entries) if max_entries else []
            group = stream.groups.get(GENERATE) if stream is not None else None
            cursor = group.delivered if group is not None else (0, 0)
            return Taken(tuple(entries), _text(cursor), *self._control_after(control_cursor))

    def wait(self, cursor: str, control_cursor: str, *, block_ms: int) -> None:
        cursors = {self.names.tokenized: parse_id(cursor), self.names.control: parse_id(control_cursor)}

        def something_later() -> bool:
            streams = {key: self._stream(key) for key in cursors}
            return any(stream is not None and stream.after(cursors[key]) for key, stream in streams.items())

        self._wait_for(something_later, block_ms)

    def step(
        self,
        owner: Owner,
        number: int,
        event: StepCompleted,
        *,
        ended: Sequence[str],
        control_cursor: str,
        lease_ms: int,
    ) -> StepCommitted:
        steps = self.names.steps(owner.slot)
        with self._changed:
            self._fence(owner)
            if self._holder(owner.slot) is not None:
                self._leases[owner.slot] = (owner, _in_s(lease_ms))
            self._append(steps, f"{owner.epoch}-{number}", _stamped(encode(event)), make=True)
            for entry_id in ended:
                self._consume(Inbox.tokenized(self.names), entry_id)
            waiting = self._stream(self.names.tokenized)
            newest = _text(next(reversed(waiting.entries), (0, 0))) if waiting is not None else "0-0"
            return StepCommitted(self._length(steps), newest, *self._control_after(control_cursor))

    def flush(self, by: str) -> str:
        with self._changed:
            self._append(self.names.control, None, {"flush": by}, make=True, cap=CONTROL_CAP)
            return _text(self._streams[self.names.control].last)

    # detokenizers

    def produced(self, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced]) -> bool:
        with self._changed:
            self._fence(owner)
            if not self._consume(Inbox.steps(self.names, engine), entry.id):
                return False
            histories, replies = produced_fields(events)
            for item, fields in zip(events, histories, strict=True):
                ends = item.entry_id == SEAL
                if ends:
                    self._live.pop(item.uid, None)
                history = self.names.request(item.uid)
                if self._append(history, item.entry_id, _stamped(fields)) and ends:
                    self._streams[history].expires_s = _in_s(self.limits.retention_ms)
                    if item.tell_engine:
                        self._tell_engines(item.uid)
            for frontend, payload in replies.items():
                self._append(self.names.replies(frontend), None, {"events": payload}, cap=REPLY_CAP)
            return True

    # consumer groups

    def backlog(self, inbox: Inbox) -> int:
        with self._changed:
            return self._length(inbox.stream)

    def prepare(self, inbox: Inbox) -> None:
        with self._changed:
            self._streams.setdefault(inbox.stream, _Stream()).groups.setdefault(inbox.group, _Group())

    def read(self, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        entries: list[Entry] = []

        def something_new() -> bool:
            entries.extend(self._deliver(inbox, consumer, max_entries))
            return bool(entries)

        self._wait_for(something_new, block_ms)
        return entries

    def pending(self, inbox: Inbox, consumer: str) -> list[Entry]:
        with self._changed:
            stream, group = self._group(inbox)
            own = sorted(entry_id for entry_id, holder in group.pending.items() if holder == consumer)
            for entry_id in own:
                if entry_id not in stream.entries:
                    del group.pending[entry_id]
            return stream.read(own)

    def claim(self, inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        with self._changed:
            self._fence(owner)
            stream, group = self._group(inbox)
            left = [(holder, entry_id) for entry_id, holder in group.pending.items() if self._holder(holder) is None]
            claimed = [entry_id for holder, entry_id in sorted(left) if holder != owner.slot][:max_entries]
            group.pending |= dict.fromkeys(claimed, owner.slot)
            return stream.read(claimed)

    def claim_from(self, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
        with self._changed:
            self._fence(owner)
            if self._owners.get(guest.slot) != guest:
                return []
            stream, group = self._group(inbox)
            claimed = sorted(entry_id for entry_id, holder in group.pending.items() if holder == guest.slot)
            group.pending |= dict.fromkeys(claimed[:max_entries], owner.slot)
            return stream.read(claimed[:max_entries])

    def retry(self, inbox: Inbox, owner: Owner, entry: Entry) -> int:
        with self._changed:
            self._fence(owner)
            _, group = self._group(inbox)
            entry_id = parse_id(entry.id)
            if group.pending.get(entry_id) != owner.slot:
                return 0
            group.retries[entry_id] = group.retries.get(entry_id, 1) + 1
            return group.retries[entry_id]

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        with self._changed:
            return list(self._group(inbox)[1].pending.values()).count(consumer)

    def forsaken(self, inbox: Inbox) -> list[str]:
        with self._changed:
            _, group = self._group(inbox)
            return [slot for slot in sorted(set(group.pending.values())) if self.lease(slot).is_free]

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int) -> Owner | None:
        with self._changed:
            holder, before = self._holder(slot), self._owners.get(slot)
            if holder is not None and holder.nonce == nonce:
                return holder
            if holder is not None and (nonce.startswith(GUEST) or not holder.nonce.startswith(GUEST)):
                return None
            owner = Owner(slot, before.epoch + 1 if before is not None else 1, nonce)
            self._owners[slot] = owner
            self._leases[slot] = (owner, _in_s(lease_ms))
            return owner

    def announce(self, slot: str, status: str) -> bool:
        with self._changed:
            if self._holder(slot) is not None:
                return False
            self._statuses[slot] = (status, _in_s(STATUS_TTL_MS))
            return True

    def unattended(self) -> list[str]:
        with self._changed:
            engines = {slot for slot in self._owners if self._length(self.names.steps(slot)) or self._holder(slot)}
            waiting = (slot for slot in engines if slot.startswith(f"{GENERATE}-"))
            detokenizers = {slot: slot_name(DETOKENIZE, slot_index(slot)) for slot in waiting}
            return sorted(slot for slot, other in detokenizers.items() if self.lease(other).is_free)

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        with self._changed:
            if self._owners.get(owner.slot) != owner:
                return False
            self._leases[owner.slot] = (owner, _in_s(lease_ms))
            if status:
                self._statuses[owner.slot] = (status, _in_s(STATUS_TTL_MS))
            return True

    def release(self, owner: Owner) -> bool:
        with self._changed:
            if self._holder(owner.slot) != owner:
                return False
            del self._leases[owner.slot]
            self._statuses.pop(owner.slot, None)
            return True

    def lease(self, slot: str) -> Lease:
        with self._changed:
            if self._holder(slot) is None:
                return Lease("", 0)
            holder, expires_s = self._leases[slot]
            return Lease(str(holder), max(0, int((expires_s - time.monotonic()) * 1000)))

    def statuses(self, stage: str) -> dict[str, str]:
        with self._changed:
            found = {slot: text for slot, (text, expires_s) in self._statuses.items() if not _over(expires_s)}
            indices = sorted(int(slot.rpartition("-")[2]) for slot in found if slot.rpartition("-")[0] == stage)
            return {slot_name(stage, index): found[slot_name(stage, index)] for index in indices}

    # frontends

    def open_replies(self, frontend: str) -> str:
        key = self.names.replies(frontend)
        with self._changed:
            if self._stream(key) is None:
                self._append(key, None, {"events": "[]"}, make=True)
            stream = self._streams[key]
            stream.expires_s = _in_s(REPLIES_TTL_MS)
            return _text(stream.last)

    def read_replies(self, frontend: str, after: str, *, block_ms: int) -> tuple[str, list[Reply]]:
        entries: list[Entry] = []

        def something_later() -> bool:
            stream = self._stream(self.names.replies(frontend))
            if stream is not None:
                entries.extend(stream.read(stream.after(parse_id(after), 100)))
            return bool(entries)

        self._wait_for(something_later, block_ms)
        return (entries[-1].id if entries else after), replies_of(entries)

    # what the commits are made of; the caller holds the lock

    def _wait_for(self, predicate: Callable[[], bool], block_ms: int) -> None:
        with self._changed:
            self._changed.wait_for(predicate, block_ms / 1000)

    def _stream(self, key: str) -> _Stream | None:
        stream = self._streams.get(key)
        if stream is not None and _over(stream.expires_s):
            del self._streams[key]
            return None
        return stream

    def _length(self, key: str) -> int:
        stream = self._stream(key)
        return len(stream.entries) if stream is not None else 0

    def _sweep(self) -> None:
        """Drop the histories that expired unseen, each time that the number of streams has doubled."""
        if len(self._streams) >= self._sweep_at:
            self._streams = {key: stream for key, stream in self._streams.items() if not _over(stream.expires_s)}
            self._sweep_at = max(1000, 2 * len(self._streams))

    def _append(
        self,
        key: str,
        entry_id: str | None,
        fields: Mapping[str, str],
        *,
        make: bool = False,
        cap: int | None = None,
    ) -> bool:
        """Append under *entry_id*, or the next one by the clock; False when it is not larger than the last, or (unless
        *make*) when there is no such stream.
        """
        stream = self._stream(key)
        if stream is None:
            if not make:
                return False
            stream = self._streams[key] = _Stream()
        next_id = max((_now_ms(), 0), (stream.last[0], stream.last[1] + 1))
        new = parse_id(entry_id) if entry_id is not None else next_id
        if new <= stream.last:
            return False
        stream.entries[new] = dict(fields)
        stream.last = new
        while cap is not None and len(stream.entries) > cap:
            del stream.entries[next(iter(stream.entries))]
        self._changed.notify_all()
        return True

    def _group(self, inbox: Inbox) -> tuple[_Stream, _Group]:
        stream = self._stream(inbox.stream)
        if stream is None or inbox.group not in stream.groups:
            raise GroupLost(f"no group {inbox.group} on {inbox.stream}; prepare makes it")
        return stream, stream.groups[inbox.group]

    def _deliver(self, inbox: Inbox, consumer: str, max_entries: int) -> list[Entry]:
        stream, group = self._group(inbox)
        new = stream.after(group.delivered, max_entries)
        group.pending |= dict.fromkeys(new, consumer)
        group.delivered = new[-1] if new else group.delivered
        return stream.read(new)

    def _consume(self, inbox: Inbox, entry_id: str) -> bool:
        """Acknowledge and delete an entry; False, and it stays, when it was not pending."""
        stream = self._stream(inbox.stream)
        group = stream.groups.get(inbox.group) if stream is not None else None
        if stream is None or group is None or group.pending.pop(parse_id(entry_id), None) is None:
            return False
        group.retries.pop(parse_id(entry_id), None)
        stream.entries.pop(parse_id(entry_id), None)
        return True

    def _tell_engines(self, uid: str) -> None:
        self._append(self.names.control, None, {"uid": uid}, make=True, cap=CONTROL_CAP)

    def _control_after(self, cursor: str) -> tuple[tuple[str, ...], str, str]:
        """Return the uids in `control` after a cursor, the cursor to go on from, and the id of the last flush or ""."""
        control = self._stream(self.names.control)
        entries = control.read(control.after(parse_id(cursor), CONTROL_CAP)) if control is not None else []
        uids = tuple(entry.fields["uid"] for entry in entries if "uid" in entry.fields)
        flushes = [entry.id for entry in entries if "flush" in entry.fields]
        return uids, entries[-1].id if entries else cursor, flushes[-1] if flushes else ""

    def _fence(self, owner: Owner) -> None:
        if self._owners.get(owner.slot) != owner:
            raise Fenced(f"{owner.slot} has another owner than {owner}")

    def _holder(self, slot: str) -> Owner | None:
        """Return who holds the lease of *slot*."""
        lease = self._leases.get(slot)
        return lease[0] if lease is not None and not _over(lease[1]) else None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _copied(history: Sequence[Entry]) -> dict[str, str]:
    """Return the copy of a history that a dead letter holds: the first entry, then as many of the last as fit."""
    texts = [orjson.dumps([entry.id, *itertools.chain(*entry.fields.items())]) for entry in history]
    room = DEAD_HISTORY_BYTES - 2
    first = texts[:1] if len(texts[0]) + 1 <= room else []
    room -= sum(len(text) + 1 for text in first)
    last: list[bytes] = []
    for text in reversed(texts[1:]):
        room -= len(text) + 1
        if room < 0:
            break
        last.append(text)
    kept = first + last[::-1]
    copy = {"history": (b"[" + b",".join(kept) + b"]").decode()}
    return copy | ({"history_cut": str(len(texts) - len(kept))} if len(kept) < len(texts) else {})


def _stamped(fields: Mapping[str, str]) -> dict[str, str]:
    return {"ms": str(_now_ms()), **fields}
