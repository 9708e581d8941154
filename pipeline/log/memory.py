"""StreamLog in this process: what the commits do, under one lock. `pipeline.log.memory_streams` has the streams.

Its clock can be given. `minisgl.LLM` runs on this log, and the tests take it as the measure of what a commit must do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from pipeline.events import End, StepCompleted, Submitted, Tokenized, encode
from pipeline.log.entries import (
    CONTROL_CAP,
    DEAD_CAP,
    READER_TTL_MS,
    REPLIES_TTL_MS,
    REPLY_CAP,
    brief_ms,
    copied_fields,
    kept_ms,
    letter_fields,
    produced_fields,
    replies_of,
    submitted_fields,
)
from pipeline.log.memory_leases import Leases
from pipeline.log.memory_quotas import Quotas
from pipeline.log.memory_streams import Streams, id_text, steady_clock_ms
from pipeline.log.protocol import (
    DEFAULT_LIMITS,
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


class MemoryLog:
    """StreamLog under one condition: every append wakes all that wait. Any number of threads may share it."""

    def __init__(
        self, names: Names, limits: RequestLimits = DEFAULT_LIMITS, clock_ms: Callable[[], int] | None = None
    ) -> None:
        self.names = names
        self.limits = limits
        self._now_ms = clock_ms or steady_clock_ms()
        self._changed = threading.Condition()
        self._streams = Streams(self._now_ms, self._changed.notify_all)
        self._live: dict[str, int] = {}
        self._leases = Leases(self._now_ms)
        self._once: dict[str, tuple[str, str, int]] = {}
        self._left: set[str] = set()
        self._readers: dict[str, dict[str, int]] = {}
        self._quotas = Quotas(self._now_ms)

    # requests

    def submit(
        self, uid: str, events: Sequence[Submitted], once: Once | None = None, *, quota: Quota | None = None
    ) -> SubmitResult:
        uids = sibling_uids(uid, len(events))
        with self._changed:
            if any(self._streams.get(self.names.request(sibling)) is not None for sibling in uids):
                return SubmitResult(Submission.DUPLICATE, uid)
            refused = (once and self._held(once)) or (quota and self._quotas.used_up(quota, uid, self._live))
            if refused:
                return refused
            if self._more_wait_than(self.limits.max_queued - len(events)):
                return SubmitResult(Submission.BUSY, uid)
            self._streams.sweep()
            now_ms, timeout_ms = self._now_ms(), self.limits.timeout_ms
            gone_ms = self._in_ms(timeout_ms + self.limits.retention_ms)
            for sibling, event in zip(uids, events, strict=True):
                moments = {"ms": str(now_ms), "deadline_ms": str(now_ms + timeout_ms)}
                fields = moments | submitted_fields(event, len(events))
                history = self._streams.append(self.names.request(sibling), SUBMITTED_ID, fields, make=True)
                assert history is not None
                history.expires_ms = gone_ms
                self._live[sibling] = now_ms + timeout_ms
                told = {"uid": sibling, "frontend": event.frontend}
                self._streams.append(self.names.submitted, None, told, make=True)
            if once is not None:
                self._once = {key: held for key, held in self._once.items() if not self._is_over(held[2])}
                self._once[once.key] = (uid, once.digest, gone_ms)
                self._left &= {held[0] for held in self._once.values()}
            if quota is not None:
                self._quotas.count(quota, uids)
            return SubmitResult(Submission.ACCEPTED, uid)

    def _held(self, once: Once) -> SubmitResult | None:
        """Say which other request has the idempotency key."""
        other, digest, expires_ms = self._once.get(once.key, ("", "", 0))
        if self._is_over(expires_ms):
            return None
        if digest != once.digest:
            return SubmitResult(Submission.MISMATCH, other)
        return SubmitResult(Submission.ATTACH, other) if other != once.instead_of else None

    def _more_wait_than(self, most: int) -> bool:
        """Say whether more than *most* requests wait: they live, and no engine has taken them.

        Entries of both streams stay for a while when their request has ended, so the smaller of two numbers counts.
        """
        if len(self._live) <= most:
            return False
        taken = self._streams.pending(Inbox.tokenized(self.names))
        queued = self._streams.length(self.names.submitted) + self._streams.length(self.names.tokenized) - len(taken)
        return min(queued, len(self._live) - len(self.alive([entry.fields.get("uid", "") for entry in taken]))) > most

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        uid = entry.fields["uid"]
        with self._changed:
            if not self._streams.consume(Inbox.submitted(self.names), entry.id):
                return False
            if not self._streams.append(self.names.request(uid), TOKENIZED_ID, self._stamped(encode(event))):
                return False
            fields = {"uid": uid, "frontend": entry.fields["frontend"]}
            return self._streams.append(self.names.tokenized, None, fields, make=True) is not None

    def end(
        self, uid: str, event: End, *, frontend: str, consume: Entry | None = None, dead: DeadLetter | None = None
    ) -> bool:
        with self._changed:
            self._live.pop(uid, None)
            if consume is not None:
                self._streams.consume(Inbox.submitted(self.names), consume.id)
            history = self._streams.get(self.names.request(uid))
            if history is None:
                return False
            n, said = history.last[0], encode(event)
            fields = self._stamped(said | {"n": str(n)})
            if not self._streams.append(self.names.request(uid), SEAL, fields):
                return False
            history.expires_ms = self._in_ms(kept_ms(event, n, said, self.limits.retention_ms))
            self._streams.append(self.names.replies(frontend), None, {"uid": uid, **fields}, cap=REPLY_CAP)
            self._tell_engines(uid)
            if dead is not None:
                letter = letter_fields(dead) | copied_fields(history.read(history.entries))
                said = {"uid": uid, "ms": fields["ms"], **letter}
                self._streams.append(self.names.dead, None, said, make=True, cap=DEAD_CAP)
            return True

    def abandon(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        once: Once | None = None,
        attached: bool = False,
        refused: bool = False,
    ) -> bool:
        with self._changed:
            base = base_uid(uid)
            if attached and base not in self._left:
                return False
            if self.read_by_others([uid]):
                if once is not None and self._once.get(once.key, ("",))[0] == base:
                    self._left.add(base)
                return False
            history = self._streams.get(self.names.request(uid))
            is_tokenless = history is not None and not history.last[0]
            ended = self.end(uid, event, frontend=frontend)
            if history is not None and ended and refused and is_tokenless:
                history.expires_ms = self._in_ms(brief_ms(self.limits.retention_ms))
            return ended

    def reading(self, uids: Sequence[str], who: str) -> None:
        with self._changed:
            for uid in uids:
                history = self._streams.get(self.names.request(uid))
                if history is not None and history.last != parse_id(SEAL):
                    self._readers.setdefault(uid, {})[who] = self._in_ms(READER_TTL_MS)

    def stop_reading(self, uid: str, who: str) -> None:
        with self._changed:
            readers = self._readers.get(uid, {})
            readers.pop(who, None)
            if not readers:
                self._readers.pop(uid, None)

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        with self._changed:
            streams = [self._streams.get(self.names.request(uid)) for uid in uids]
            first = parse_id(after) if after else (0, 0)
            return [stream.read(stream.after(first)) if stream is not None else [] for stream in streams]

    def alive(self, uids: Sequence[str]) -> set[str]:
        with self._changed:
            return {uid for uid in uids if uid in self._live}

    def forget(self, uids: Sequence[str]) -> None:
        """Delete histories now: in the memory of one process nobody else will open them within the retention."""
        with self._changed:
            for uid in uids:
                self._streams.drop(self.names.request(uid))

    def close_replies(self, frontend: str) -> None:
        """Delete what was said to a frontend that listens no more."""
        with self._changed:
            self._streams.drop(self.names.replies(frontend))

    # the janitor

    def overdue(self, max_uids: int) -> list[str]:
        with self._changed:
            now_ms = self._now_ms()
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
            until_ms = {uid: max(self._readers.get(uid, {}).values(), default=0) for uid in uids}
            return {uid for uid in uids if not self._is_over(until_ms[uid])}

    # dead letters

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        with self._changed:
            stream = self._streams.get(self.names.dead)
            if stream is None:
                return []
            older = [entry_id for entry_id in stream.entries if not before or entry_id < parse_id(before)]
            return stream.read(older[::-1][:max_entries])

    def drop_dead(self, entry_id: str) -> bool:
        with self._changed:
            stream = self._streams.get(self.names.dead)
            return stream is not None and stream.entries.pop(parse_id(entry_id), None) is not None

    # after a time in which the log could not be reached

    def incarnation(self) -> str:
        """Return always the same: this log ends with its process."""
        return "memory"

    # engines

    def take(self, owner: Owner, max_entries: int, *, control_cursor: str) -> Taken:
        with self._changed:
            self._leases.fence(owner)
            stream = self._streams.get(self.names.tokenized)
            entries = self._streams.deliver(Inbox.tokenized(self.names), owner.slot, max_entries) if max_entries else []
            group = stream.groups.get(GENERATE) if stream is not None else None
            cursor = group.delivered if group is not None else (0, 0)
            return Taken(tuple(entries), id_text(cursor), *self._control_after(control_cursor))

    def wait(self, cursor: str, control_cursor: str, *, block_ms: int) -> None:
        cursors = {self.names.tokenized: parse_id(cursor), self.names.control: parse_id(control_cursor)}

        def something_later() -> bool:
            streams = {key: self._streams.get(key) for key in cursors}
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
            self._leases.fence(owner)
            if self._leases.holder(owner.slot) is not None:
                self._leases.hold(owner, lease_ms)
            self._streams.append(steps, f"{owner.epoch}-{number}", self._stamped(encode(event)), make=True)
            for entry_id in ended:
                self._streams.consume(Inbox.tokenized(self.names), entry_id)
            waiting = self._streams.get(self.names.tokenized)
            newest = id_text(next(reversed(waiting.entries), (0, 0))) if waiting is not None else "0-0"
            return StepCommitted(self._streams.length(steps), newest, *self._control_after(control_cursor))

    def flush(self, by: str) -> str:
        with self._changed:
            control = self._streams.append(self.names.control, None, {"flush": by}, make=True, cap=CONTROL_CAP)
            assert control is not None
            return id_text(control.last)

    # detokenizers

    def produced(self, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced]) -> bool:
        with self._changed:
            self._leases.fence(owner)
            if not self._streams.consume(Inbox.steps(self.names, engine), entry.id):
                return False
            histories, replies = produced_fields(events)
            for item, fields in zip(events, histories, strict=True):
                ends = item.entry_id == SEAL
                if ends:
                    self._live.pop(item.uid, None)
                history = self._streams.append(self.names.request(item.uid), item.entry_id, self._stamped(fields))
                if history is not None and ends:
                    history.expires_ms = self._in_ms(kept_ms(item.event, item.n, fields, self.limits.retention_ms))
                    if item.tell_engine:
                        self._tell_engines(item.uid)
            for frontend, payload in replies.items():
                self._streams.append(self.names.replies(frontend), None, {"events": payload}, cap=REPLY_CAP)
            return True

    # consumer groups

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
                (holder, entry_id) for entry_id, holder in group.pending.items() if self._leases.holder(holder) is None
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

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        with self._changed:
            return list(self._streams.group(inbox)[1].pending.values()).count(consumer)

    def forsaken(self, inbox: Inbox) -> list[str]:
        with self._changed:
            _, group = self._streams.group(inbox)
            return [slot for slot in sorted(set(group.pending.values())) if self.lease(slot).is_free]

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int) -> Owner | None:
        with self._changed:
            return self._leases.acquire(slot, nonce, lease_ms)

    def announce(self, slot: str, status: str) -> bool:
        with self._changed:
            if self._leases.holder(slot) is not None:
                return False
            self._leases.say(slot, status)
            return True

    def unattended(self) -> list[str]:
        with self._changed:
            engines = (slot for slot in self._leases.owners if slot.startswith(f"{GENERATE}-"))
            here = (
                slot for slot in engines if self._streams.length(self.names.steps(slot)) or self._leases.holder(slot)
            )
            return sorted(slot for slot in here if self.lease(slot_name(DETOKENIZE, slot_index(slot))).is_free)

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        with self._changed:
            return self._leases.renew(owner, lease_ms, status)

    def release(self, owner: Owner) -> bool:
        with self._changed:
            return self._leases.release(owner)

    def lease(self, slot: str) -> Lease:
        with self._changed:
            return self._leases.lease(slot)

    def statuses(self, stage: str) -> dict[str, str]:
        with self._changed:
            return self._leases.statuses(stage)

    # frontends

    def open_replies(self, frontend: str, *, read: str = "") -> str:
        key = self.names.replies(frontend)
        with self._changed:
            stream = self._streams.get(key) or self._streams.append(key, None, {"events": "[]"}, make=True)
            assert stream is not None
            stream.expires_ms = self._in_ms(REPLIES_TTL_MS)
            for entry_id in [each for each in stream.entries if read and each < parse_id(read)]:
                del stream.entries[entry_id]
            return id_text(stream.last)

    def read_replies(self, frontend: str, after: str, *, block_ms: int) -> tuple[str, list[Reply]]:
        entries: list[Entry] = []

        def something_later() -> bool:
            stream = self._streams.get(self.names.replies(frontend))
            if stream is not None:
                entries.extend(stream.read(stream.after(parse_id(after), 100)))
            return bool(entries)

        self._wait_for(something_later, block_ms)
        return (entries[-1].id if entries else after), replies_of(entries)

    # what the commits are made of; the caller holds the lock

    def _wait_for(self, predicate: Callable[[], bool], block_ms: int) -> None:
        with self._changed:
            self._changed.wait_for(predicate, block_ms / 1000)

    def _in_ms(self, after_ms: int) -> int:
        """Return the moment *after_ms* from now."""
        return self._now_ms() + after_ms

    def _is_over(self, moment_ms: int) -> bool:
        return self._now_ms() >= moment_ms

    def _stamped(self, fields: Mapping[str, str]) -> dict[str, str]:
        return {"ms": str(self._now_ms()), **fields}

    def _tell_engines(self, uid: str) -> None:
        self._streams.append(self.names.control, None, {"uid": uid}, make=True, cap=CONTROL_CAP)

    def _control_after(self, cursor: str) -> tuple[tuple[str, ...], str, str]:
        """Return the uids in `control` after a cursor, the cursor to go on from, and the id of the last flush or ""."""
        control = self._streams.get(self.names.control)
        entries = control.read(control.after(parse_id(cursor), CONTROL_CAP)) if control is not None else []
        uids = tuple(entry.fields["uid"] for entry in entries if "uid" in entry.fields)
        flushes = [entry.id for entry in entries if "flush" in entry.fields]
        return uids, entries[-1].id if entries else cursor, flushes[-1] if flushes else ""
