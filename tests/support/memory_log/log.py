"""RedisLog in this process: the commits, under one lock. `support.memory_log.streams` has the streams.

The clock is an argument. It is the reference for commits: the contract suite compares Redis with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import orjson
from support.memory_log.forgetting import MemoryForgetting
from support.memory_log.groups import MemoryGroups
from support.memory_log.leases import Leases
from support.memory_log.past import MemoryPast
from support.memory_log.quotas import Quotas
from support.memory_log.ranks import MemoryRanks
from support.memory_log.streams import Stream, Streams, id_text, steady_clock_ms

from pipeline.events import End, Failed, StepCompleted, Submitted, Tokenized, encode
from pipeline.log.entries import (
    CONTROL_CAP,
    DEAD_CAP,
    DEAD_HISTORY_BYTES,
    READER_TTL_MS,
    REPLIES_TTL_MS,
    REPLY_CAP,
    OneToken,
    Skipped,
    brief_ms,
    burial_fields,
    is_tombstone,
    letter_fields,
    made_ms_of,
    produced_words,
    refused_ms,
    replies_of,
    say_skipped,
    words_of,
)
from pipeline.log.protocol import (
    DEFAULT_LIMITS,
    NO_TURN,
    DeadLetter,
    Entry,
    Inbox,
    Journalled,
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
    Turn,
)
from pipeline.log.redis import RedisLog
from pipeline.log.shared import submitted_bytes, submitted_fields, submitted_words
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
from pipeline.serving import Served, Serving

LETTER_LABELS_BYTES: Final = 4096
"""Largest size of the labels in a letter without the first entry. They tell who sent the
request. end.lua has the same number."""


if TYPE_CHECKING:
    _Like = RedisLog
else:
    _Like = object


class MemoryLog(MemoryGroups, MemoryPast, MemoryForgetting, MemoryRanks, _Like):
    """RedisLog, with all its parts, and RedisLog under one condition: every append wakes all that wait.

    Many threads may share it.
    """

    def __init__(
        self, names: Names, limits: RequestLimits = DEFAULT_LIMITS, clock_ms: Callable[[], int] | None = None
    ) -> None:
        self.names = names
        self.limits = limits
        self._now_ms = clock_ms or steady_clock_ms()
        self._changed = threading.Condition()
        self._streams = Streams(self._now_ms, self._changed.notify_all)
        self._live: dict[str, int] = {}
        self.num_sealed = 0
        """Number of ends that were written. Each is in the usage of its owner."""
        self._leases = Leases(self._now_ms)
        self._once: dict[str, tuple[str, str, int]] = {}
        self._left: set[str] = set()
        self._readers: dict[str, dict[str, int]] = {}
        self._quotas = Quotas(self._now_ms, lambda: self.limits.retention_ms)

    # requests

    def submit(
        self,
        uid: str,
        events: Sequence[Submitted],
        once: Once | None = None,
        *,
        quota: Quota | None = None,
        letter: str = "",
        has_room: Callable[[int], bool] = lambda _: True,
        left_ms: int | None = None,
    ) -> SubmitResult:
        uids = sibling_uids(uid, len(events))
        with self._changed:
            if any(self._streams.get(self.names.request(sibling)) is not None for sibling in uids):
                return SubmitResult(Submission.DUPLICATE, uid)
            if letter and not self._streams.has(self.names.dead, letter):
                return SubmitResult(Submission.GONE, uid)
            behind = self._quotas.behind(events[0].owner, self._live) if events[0].background else set()
            refused = (once and self._held(once)) or (quota and self._quotas.used_up(quota, uid, self._live))
            if not refused and len(behind) >= self.limits.max_background:
                refused = SubmitResult(Submission.TOO_MANY_IN_BACKGROUND, uid)
            if left_ms is not None:
                if once and (held := self._held(once)) and held.uid != uid:
                    once = None
            elif refused:
                return refused
            if not has_room(submitted_bytes(*submitted_words(events))):
                return SubmitResult(Submission.FULL, uid)
            if left_ms is None and self._more_wait_than(self.limits.max_queued - len(events)):
                return SubmitResult(Submission.BUSY, uid)
            self._streams.sweep()
            now_ms, limits = self._now_ms(), self.limits
            timeout_ms = limits.background_timeout_ms if events[0].background else limits.timeout_ms
            timeout_ms = timeout_ms if left_ms is None else left_ms
            kept_ms = limits.response_retention_ms if events[0].stored else limits.retention_ms
            gone_ms = self._in_ms(timeout_ms + kept_ms)
            behind.update(uids)
            moments = {"ms": str(now_ms), "deadline_ms": str(now_ms + timeout_ms)}
            for sibling, event, fields in zip(uids, events, submitted_fields(events), strict=True):
                history = self._streams.append(self.names.request(sibling), SUBMITTED_ID, moments | fields, make=True)
                assert history is not None
                history.expires_ms = gone_ms
                self._live[sibling] = now_ms + timeout_ms
                told = {"uid": sibling, "frontend": event.frontend}
                self._streams.append(self.names.submitted, None, told, make=True)
            if letter:
                self.drop_dead(letter)
            if once is not None:
                self._once = {key: held for key, held in self._once.items() if not self._is_over(held[2])}
                self._once[once.key] = (uid, once.digest, gone_ms)
                self._left &= {held[0] for held in self._once.values()}
            if quota is not None:
                self._quotas.count(quota, uids, submitted_bytes(*submitted_words(events)))
            return SubmitResult(Submission.ACCEPTED, uid)

    def _held(self, once: Once) -> SubmitResult | None:
        """Return the result for another request that has the idempotency key; None: no other one has it."""
        other, digest, expires_ms = self._once.get(once.key, ("", "", 0))
        if self._is_over(expires_ms):
            return None
        if digest != once.digest:
            return SubmitResult(Submission.MISMATCH, other)
        return SubmitResult(Submission.ATTACH, other) if other != once.instead_of else None

    def retire(self, most_bytes: int) -> int:
        """Do nothing: stored responses go when their time is over, and share nothing."""
        return 0

    def _more_wait_than(self, most: int) -> bool:
        """Return whether more than *most* requests wait: they live, and no engine has taken them.

        Entries of both streams stay for a while after their requests have ended, so the smaller of two numbers counts.
        """
        if len(self._live) <= most:
            return False
        taken = self._streams.pending(Inbox.tokenized(self.names))
        queued = self._streams.length(self.names.submitted) + self._streams.length(self.names.tokenized) - len(taken)
        return min(queued, len(self._live) - len(self.alive([entry.fields.get("uid", "") for entry in taken]))) > most

    def tokenized(self, entry: Entry, event: Tokenized, *, stored: bool = False, turn: Turn = NO_TURN) -> bool:
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
            if consume is not None and not self._streams.consume(Inbox.submitted(self.names), consume.id):
                return False
            history = self._sealed(uid, event, frontend)
            if history is not None and dead is not None:
                letter = letter_fields(dead) | copied_fields(history.read(history.entries))
                said = {"uid": uid, "ms": history.entries[parse_id(SEAL)]["ms"], **letter}
                self._streams.append(self.names.dead, None, said, make=True, cap=DEAD_CAP)
            return history is not None

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
                history.expires_ms = self._in_ms(refused_ms(self.limits.retention_ms))
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
            found = [stream.read(stream.after(first)) if stream is not None else [] for stream in streams]
            return [[] if not after and is_tombstone(entries) else entries for entries in found]

    def alive(self, uids: Sequence[str]) -> set[str]:
        with self._changed:
            return {uid for uid in uids if uid in self._live}

    def forget(self, uids: Sequence[str]) -> None:
        """Delete histories now: in the memory of one process no other client opens them within the retention."""
        with self._changed:
            for uid in uids:
                self._streams.drop(self.names.request(uid))

    def close_replies(self, frontend: str) -> None:
        """Delete the replies to a frontend that has stopped listening."""
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

    # after the log could not be reached

    def incarnation(self) -> str:
        """Return always the same: this log ends with its process."""
        return "memory"

    # engines

    def take(
        self,
        owner: Owner,
        max_entries: int,
        *,
        control_cursor: str,
        but: Sequence[str] = (),
        spare: int | None = None,
        steal_after_s: float = 0.0,
    ) -> Taken:
        with self._changed:
            self._leases.fence(owner)
            stream = self._streams.get(self.names.tokenized)
            entries = self._streams.deliver(Inbox.tokenized(self.names), owner.slot, max_entries) if max_entries else []
            group = stream.groups.get(GENERATE) if stream is not None else None
            cursor = group.delivered if group is not None else (0, 0)
            return Taken(tuple(entries), id_text(cursor), 0, *self._control_after(control_cursor))

    def wait(self, cursor: str, control_cursor: str, *, block_ms: int) -> None:
        cursors = {self.names.tokenized: parse_id(cursor), self.names.control: parse_id(control_cursor)}

        def something_later() -> bool:
            streams = {key: self._streams.get(key) for key in cursors}
            return any(stream is not None and stream.after(cursors[key]) for key, stream in streams.items())

        self._wait_for(something_later, block_ms)

    def step(
        self,
        owner: Owner,
        steps: Mapping[int, StepCompleted],
        *,
        ended: Sequence[str],
        control_cursor: str,
        lease_ms: int,
    ) -> StepCommitted:
        key = self.names.steps(owner.slot)
        with self._changed:
            self._leases.fence(owner)
            if self._leases.holder(owner.slot) is not None:
                self._leases.hold(owner, lease_ms)
            said = {f"{owner.epoch}-{number}": self._stamped(encode(event)) for number, event in steps.items()}
            self._streams.append_steps(key, said)
            for entry_id in ended:
                self._streams.consume(Inbox.tokenized(self.names), entry_id)
            waiting = self._streams.get(self.names.tokenized)
            newest = id_text(next(reversed(waiting.entries), (0, 0))) if waiting is not None else "0-0"
            length = self._streams.length(key)
            return StepCommitted(length, newest, *self._control_after(control_cursor), self._now_ms())

    def flush(self, by: str) -> str:
        with self._changed:
            control = self._streams.append(self.names.control, None, {"flush": by}, make=True, cap=CONTROL_CAP)
            assert control is not None
            return id_text(control.last)

    # detokenizers

    def produced(
        self,
        owner: Owner,
        entries: Sequence[Entry],
        engine: str,
        events: Sequence[Produced],
        journal: Journalled = (),
        *,
        tries: int = 0,
    ) -> bool:
        with self._changed:
            self._leases.fence(owner)
            inbox = Inbox.steps(self.names, engine)
            if len(entries) > 1 and not self._streams.are_pending(inbox, entries):
                return False
            if journal and self.limits.journal_bytes:
                key, limits = self.names.journal(engine), self.limits
                for entry, kept in zip(entries, journal, strict=True):
                    self._streams.keep(key, entry.id, kept, limits.journal_bytes, limits.retention_ms)
            if not all(self._consume_or_try(inbox, entry.id, tries) for entry in entries):
                return False
            histories, replies = produced_words(events)
            for item, said in zip(events, histories, strict=True):
                ends, fields = item.entry_id == SEAL, history_fields(said, self._now_ms(), entries)
                if ends:
                    self._live.pop(item.uid, None)
                history = self._streams.append(self.names.request(item.uid), item.entry_id, fields)
                if history is not None and ends:
                    self.num_sealed += 1
                    brief = brief_ms(item.event, item.n, fields, self.limits.retention_ms)
                    history.expires_ms = self._in_ms(self._kept_ms(history) if brief is None else brief)
                    if item.tell_engine:
                        self._tell_engines(item.uid)
                    self._tell_archivers(item.uid)
            for frontend, payload in replies.items():
                self._streams.append(self.names.replies(frontend), None, {"events": payload}, cap=REPLY_CAP)
            return True

    # entries that cannot be read

    def bury(
        self,
        inbox: Inbox,
        entry: Entry,
        reason: str,
        event: Failed,
        requests: Mapping[str, str],
        owner: Owner | None = None,
    ) -> tuple[str, ...] | None:
        with self._changed:
            if owner is not None:
                self._leases.fence(owner)
            kept = self._streams.consumed(inbox, entry.id)
            if kept is None:
                return None
            raw = orjson.dumps([entry.id, *itertools.chain(*kept.items())]).decode()
            letter = self._stamped({"entry": raw} | burial_fields(inbox, reason, list(requests)))
            self._streams.append(self.names.dead, None, letter, make=True, cap=DEAD_CAP)
            return tuple(uid for uid, frontend in requests.items() if self._sealed(uid, event, frontend) is not None)

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int, serving: Serving | None = None) -> Owner | None:
        with self._changed:
            return self._leases.acquire(slot, nonce, lease_ms, serving)

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

    def renew(self, owner: Owner, lease_ms: int, status: str, serving: Serving | None = None) -> bool:
        with self._changed:
            return self._leases.renew(owner, lease_ms, status, serving)

    def release(self, owner: Owner) -> bool:
        with self._changed:
            return self._leases.release(owner)

    def lease(self, slot: str) -> Lease:
        with self._changed:
            return self._leases.lease(slot)

    def statuses(self, stage: str) -> dict[str, str]:
        with self._changed:
            return self._leases.statuses(stage)

    def serving(self) -> dict[str, Served]:
        with self._changed:
            return self._leases.serving()

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

    def read_replies(
        self, frontend: str, after: str, *, block_ms: int, skipped: Skipped = say_skipped
    ) -> tuple[str, list[Reply]]:
        entries: list[Entry] = []

        def something_later() -> bool:
            stream = self._streams.get(self.names.replies(frontend))
            if stream is not None:
                entries.extend(stream.read(stream.after(parse_id(after), 100)))
            return bool(entries)

        self._wait_for(something_later, block_ms)
        return (entries[-1].id if entries else after), replies_of(entries, skipped)

    # parts of the commits; the caller holds the lock

    def _sealed(self, uid: str, event: End, frontend: str) -> Stream | None:
        """Seal a history and return it; None if it was sealed before or is gone."""
        self._live.pop(uid, None)
        history = self._streams.get(self.names.request(uid))
        if history is None:
            return None
        n, said = history.last[0], encode(event)
        fields = self._stamped(said | {"n": str(n)})
        if not self._streams.append(self.names.request(uid), SEAL, fields):
            return None
        self.num_sealed += 1
        brief = brief_ms(event, n, said, self.limits.retention_ms)
        history.expires_ms = self._in_ms(self._kept_ms(history) if brief is None else brief)
        self._streams.append(self.names.replies(frontend), None, {"uid": uid, **fields}, cap=REPLY_CAP)
        self._tell_engines(uid)
        self._tell_archivers(uid)
        return history

    def _kept_ms(self, history: Stream) -> int:
        """Return for how long a history is kept after its end."""
        is_stored = history.entries.get(parse_id(SUBMITTED_ID), {}).get("stored") == "true"
        return self.limits.response_retention_ms if is_stored else self.limits.retention_ms

    def _in_ms(self, after_ms: int) -> int:
        """Return the time *after_ms* from now."""
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


def history_fields(said: Mapping[str, bytes] | OneToken, ms: int, steps: Sequence[Entry]) -> dict[str, str]:
    """Return the fields of an event that is committed with *steps* at *ms*. In Redis, produced.lua adds the times."""
    words = words_of(said) if isinstance(said, tuple) else said
    fields = {"ms": str(ms)} | {name: text.decode() for name, text in words.items()}
    for step in steps:
        if fields["kind"] == "tokens" and fields["step"] == step.id and (made_ms := made_ms_of(step)):
            fields["age_ms"] = str(max(ms - made_ms, 0))
    return fields


def copied_fields(history: Sequence[Entry]) -> dict[str, str]:
    """Return the copy of a history for a dead letter: the first entry, then as many of the last ones as fit.

    In Redis, end.lua makes it.
    """
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
    labels = history[0].fields.get("labels", "")
    if labels and not first and len(labels.encode()) <= LETTER_LABELS_BYTES:
        copy["labels"] = labels
    return copy | ({"history_cut": str(len(texts) - len(kept))} if len(kept) < len(texts) else {})
