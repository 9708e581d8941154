"""What the commits of the log must do, said again in plain Python: streams, groups, histories, leases and owners.

No clock: nothing expires unless it is told to, and an id that a clock makes is learnt from the log. Beside it, tokens
that say what they were computed from: so a history alone shows whether somebody wrote into it who should not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import orjson

from pipeline.errors import Fenced, GroupLost
from pipeline.events import (
    Cancelled,
    End,
    Failed,
    Finished,
    StepCompleted,
    Submitted,
    Tokenized,
    TokensProduced,
    as_plain,
    decode,
    encode,
)
from pipeline.log.protocol import (
    DeadLetter,
    Entry,
    Inbox,
    Once,
    Owner,
    Produced,
    Quota,
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
    tokens_id,
)

BEGINNING: Final = "0-0"
OF_THE_CLOCK: Final = ("ms", "deadline_ms")
"""Fields that a commit adds by Redis' clock."""
OF_THE_COPY: Final = ("history", "history_cut")
"""Fields of a dead letter that are compared with the history itself."""


# Tokens that say what they were computed from


def certified_token(nonce: int, prompt: Sequence[int], before: Sequence[int]) -> int:
    """Return a token that no other call returns and that says which tokens it was computed from."""
    computed_from = repr((nonce, tuple(prompt), tuple(before))).encode()
    return nonce << 32 | int.from_bytes(blake2b(computed_from, digest_size=4).digest(), "big")


def is_computed_from(token: int, prompt: Sequence[int], before: Sequence[int]) -> bool:
    return token == certified_token(token >> 32, prompt, before)


def history_problems(history: Sequence[Entry]) -> list[str]:
    """Return what a history breaks of the promises: one end at most and nothing after it, tokens 1 to n without a hole,
    each computed from exactly those before it.
    """
    problems: list[str] = []
    prompt: tuple[int, ...] = ()
    tokens: list[int] = []
    for place, entry in enumerate(history):
        event = decode(entry.fields)
        n = parse_id(entry.id)[0]
        match event:
            case Submitted():
                expected = SUBMITTED_ID if place == 0 else "one at the start"
            case Tokenized():
                expected = TOKENIZED_ID if place == 1 else "one after the start"
                prompt = event.token_ids
            case TokensProduced():
                expected = tokens_id(len(tokens) + event.count)
                for token in event.tokens:
                    if not is_computed_from(token, prompt, tokens):
                        problems.append(f"token {len(tokens) + 1} was computed from others than those before it")
                    tokens.append(token)
            case Finished() | Failed() | Cancelled():
                expected = SEAL
                if event.n != len(tokens):
                    problems.append(f"the end says {event.n} tokens after {len(tokens)}")
                if place != len(history) - 1:
                    problems.append(f"there is {history[place + 1].id} after the end")
            case _:
                expected = f"{len(tokens)}-{parse_id(entry.id)[1]}"
        if entry.id != expected:
            problems.append(f"a {event.kind} has the id {entry.id}, expected {expected}, with {len(tokens)} tokens")
            del tokens[n:]
    return problems


# What a log holds


@dataclass(frozen=True, slots=True)
class State:
    """All that a log holds, by key. Times to live are no part of it."""

    streams: Mapping[str, Sequence[Entry]]
    """A stream that has not changed may be the same object as before."""
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


# The model


@dataclass(eq=False, slots=True)
class _Item:
    """An entry of a stream; its id is empty until the log has told it."""

    id: str
    fields: dict[str, str]


@dataclass(slots=True)
class _Group:
    unread: list[_Item]
    delivered: str = BEGINNING
    pending: dict[_Item, tuple[str, int]] = field(default_factory=dict)
    """Who has read an item, and how often it was worked on."""


@dataclass(slots=True)
class _Stream:
    items: list[_Item] = field(default_factory=list)
    last: str = BEGINNING
    """The largest explicit id."""
    groups: dict[str, _Group] = field(default_factory=dict)

    def append(self, entry_id: str, fields: Mapping[str, str]) -> bool:
        """Append under *entry_id*, or, when that is empty, under one that the log will tell; False: it is too small."""
        if entry_id:
            if parse_id(entry_id) <= parse_id(self.last):
                return False
            self.last = entry_id
        item = _Item(entry_id, dict(fields))
        self.items.append(item)
        for group in self.groups.values():
            group.unread.append(item)
        return True

    def drop(self, item: _Item) -> None:
        self.items.remove(item)
        for group in self.groups.values():
            if item in group.unread:
                group.unread.remove(item)

    def after(self, entry_id: str) -> list[_Item]:
        return [item for item in self.items if parse_id(item.id) > parse_id(entry_id)]


class CommitModel:
    """The commits, with the arguments that StreamLog gives them, and their answers."""

    def __init__(self, names: Names, limits: RequestLimits) -> None:
        self.names = names
        self.limits = limits
        self._streams: dict[str, _Stream] = {}
        self._sets: dict[str, set[str]] = {}
        self._strings: dict[str, str] = {}

    # what it holds

    def learn_ids(self, streams: Mapping[str, Sequence[Entry]]) -> None:
        """Take over the ids that the log's clock made since the last time."""
        for key, stream in self._streams.items():
            told = streams.get(key, ())
            if len(told) == len(stream.items):
                for item, entry in zip(reversed(stream.items), reversed(told), strict=True):
                    if item.id:
                        break
                    item.id = entry.id

    def state(self) -> State:
        return State(
            {key: _entries(stream.items) for key, stream in self._streams.items()},
            {
                key: [(item.id, *group.pending[item]) for item in _in_order(group.pending)]
                for key, stream in self._streams.items()
                for group in stream.groups.values()
            },
            who_lives({key: frozenset(members) for key, members in self._sets.items() if members}, self.names),
            dict(self._strings),
        )

    def has_history(self, uid: str) -> bool:
        return self.names.request(uid) in self._streams

    def live(self) -> set[str]:
        return self._sets.setdefault(self.names.live, set())

    def holder_of(self, key: str) -> str:
        """Return the uid of the request, or of the siblings, with an idempotency key; empty where none has it."""
        return self._strings.get(self.names.idempotency(key), "").partition(":")[0]

    def owns(self, owner: Owner) -> bool:
        """Say whether *owner* may write for its slot."""
        return self._strings.get(self.names.owner(owner.slot)) == str(owner)

    def held(self, slot: str) -> bool:
        return self.names.lease(slot) in self._strings

    # what happens to a log without a commit

    def expire(self, key: str) -> None:
        """Lose a key, as when its time is over."""
        self._streams.pop(key, None)
        self._sets.pop(key, None)
        self._strings.pop(key, None)

    def trim(self, key: str, keep: int) -> None:
        """Lose all but the last *keep* entries of a stream."""
        stream = self._streams.get(key)
        while stream is not None and len(stream.items) > keep:
            stream.drop(stream.items[0])

    # requests

    def submit(
        self, uid: str, events: Sequence[Submitted], once: Once | None = None, *, quota: Quota | None = None
    ) -> SubmitResult:
        """As StreamLog.submit; of a quota it knows how many may run at once."""
        key = self.names.idempotency(once.key) if once is not None else ""
        running = self._sets.setdefault(self.names.running(quota.key), set()) if quota is not None else set()
        uids = sibling_uids(uid, len(events))
        if any(map(self.has_history, uids)):
            return SubmitResult(Submission.DUPLICATE, uid)
        if once is not None and key in self._strings:
            holder, digest, *_ = self._strings[key].split(":")
            if digest != once.digest:
                return SubmitResult(Submission.MISMATCH, holder)
            if holder != once.instead_of:
                return SubmitResult(Submission.ATTACH, holder)
        if quota is not None and len(running & self.live()) >= quota.concurrent_requests:
            return SubmitResult(Submission.TOO_MANY, uid)
        if (
            self._length(self.names.submitted) + self._length(self.names.tokenized) + len(events)
            > self.limits.max_queued
        ):
            return SubmitResult(Submission.BUSY, uid)
        for sibling, event in zip(uids, events, strict=True):
            fields = encode(event.model_copy(update={"siblings": len(events)}))
            self._append(self.names.request(sibling), SUBMITTED_ID, fields, make=True)
            self.live().add(sibling)
            self._append(self.names.submitted, "", {"uid": sibling, "frontend": event.frontend}, make=True)
        running.update(uids)
        if once is not None:
            self._strings[key] = f"{uid}:{once.digest}"
        return SubmitResult(Submission.ACCEPTED, uid)

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        uid = entry.fields["uid"]
        if not self._acknowledge(Inbox.submitted(self.names), entry.id):
            return False
        self._delete(self.names.submitted, entry.id)
        if not self._append(self.names.request(uid), TOKENIZED_ID, encode(event)):
            return False
        self._append(self.names.tokenized, "", {"uid": uid, "frontend": entry.fields["frontend"]}, make=True)
        return True

    def end(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        consume: Entry | None = None,
        dead: DeadLetter | None = None,
    ) -> bool:
        self.live().discard(uid)
        if consume is not None:
            self._acknowledge(Inbox.submitted(self.names), consume.id)
            self._delete(self.names.submitted, consume.id)
        history = self._streams.get(self.names.request(uid))
        if history is None:
            return False
        fields = encode(event) | {"n": str(parse_id(history.last)[0])}
        if not history.append(SEAL, fields):
            return False
        self._append(self.names.replies(frontend), "", {"uid": uid, **fields})
        self._tell_engines(uid)
        if dead is not None:
            letter = {"stage": dead.stage, "deaths": str(dead.deaths), "error": dead.error}
            letter["entry"] = orjson.dumps(dict(dead.entry)).decode()
            self._append(self.names.dead, "", {"uid": uid, **letter}, make=True)
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
        key = self.names.idempotency(once.key) if once is not None else ""
        holder, _, rest = self._strings.get(key, "").partition(":")
        owns = holder == base_uid(uid)
        if attached and not (owns and rest.endswith(":left")):
            return False
        if self._sets.get(self.names.reader(uid)):
            if owns and not rest.endswith(":left"):
                self._strings[key] += ":left"
            return False
        return self.end(uid, event, frontend=frontend)

    def reading(self, uids: Sequence[str], who: str) -> None:
        for uid in uids:
            history = self._streams.get(self.names.request(uid))
            if history is not None and history.last != SEAL:
                self._sets.setdefault(self.names.reader(uid), set()).add(who)

    def stop_reading(self, uid: str, who: str) -> None:
        self._sets.get(self.names.reader(uid), set()).discard(who)

    def alive(self, uids: Sequence[str]) -> set[str]:
        return self.live() & set(uids)

    # engines

    def take(self, owner: Owner, max_entries: int, *, control_cursor: str) -> Taken:
        self._fence(owner)
        inbox = Inbox.tokenized(self.names)
        entries = self._deliver(inbox, owner.slot, max_entries) if max_entries else []
        stream = self._streams.get(inbox.stream)
        group = stream.groups.get(inbox.group) if stream is not None else None
        cursor = group.delivered if group is not None else BEGINNING
        return Taken(tuple(entries), cursor, *self._control_after(control_cursor))

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
        self._fence(owner)
        steps = self.names.steps(owner.slot)
        self._append(steps, f"{owner.epoch}-{number}", encode(event), make=True)
        for entry_id in ended:
            self._acknowledge(Inbox.tokenized(self.names), entry_id)
            self._delete(self.names.tokenized, entry_id)
        waiting = self._streams.get(self.names.tokenized)
        newest = waiting.items[-1].id if waiting is not None and waiting.items else BEGINNING
        return StepCommitted(self._length(steps), newest, *self._control_after(control_cursor))

    def flush(self, by: str) -> str:
        """As StreamLog.flush, but that the id is not known yet."""
        self._append(self.names.control, "", {"flush": by}, make=True)
        return ""

    # detokenizers

    def produced(self, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced]) -> bool:
        self._fence(owner)
        if not self._acknowledge(Inbox.steps(self.names, engine), entry.id):
            return False
        self._delete(self.names.steps(engine), entry.id)
        replies: dict[str, list[dict[str, Any]]] = {}
        for item in events:
            ends = item.entry_id == SEAL
            if ends:
                self.live().discard(item.uid)
            written = self._append(self.names.request(item.uid), item.entry_id, encode(item.event))
            if written and ends and item.tell_engine:
                self._tell_engines(item.uid)
            if isinstance(item.event, TokensProduced | End):
                said = {"uid": item.uid, "id": item.entry_id, "n": item.n, "event": as_plain(item.event)}
                replies.setdefault(item.frontend, []).append(said)
        for frontend, items in replies.items():
            self._append(self.names.replies(frontend), "", {"events": orjson.dumps(items).decode()})
        return True

    # consumer groups

    def backlog(self, inbox: Inbox) -> int:
        return self._length(inbox.stream)

    def prepare(self, inbox: Inbox) -> None:
        stream = self._streams.setdefault(inbox.stream, _Stream())
        stream.groups.setdefault(inbox.group, _Group(unread=list(stream.items)))

    def read(self, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        return self._deliver(inbox, consumer, max_entries)

    def pending(self, inbox: Inbox, consumer: str) -> list[Entry]:
        return _entries(self._pending_of(inbox, consumer))

    def claim(self, inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        self._fence(owner)
        holders = {holder for holder, _ in self._group(inbox).pending.values()}
        forsaken = sorted(slot for slot in holders if slot != owner.slot and not self.held(slot))
        items = [item for slot in forsaken for item in self._pending_of(inbox, slot)]
        return self._give(inbox, items[:max_entries], owner)

    def claim_from(self, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
        self._fence(owner)
        if not self.owns(guest):
            return []
        return self._give(inbox, self._pending_of(inbox, guest.slot)[:max_entries], owner)

    def retry(self, inbox: Inbox, owner: Owner, entry: Entry) -> int:
        self._fence(owner)
        pending = self._group(inbox).pending
        for item in self._pending_of(inbox, owner.slot):
            if item.id == entry.id:
                pending[item] = (owner.slot, pending[item][1] + 1)
                return pending[item][1]
        return 0

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        return len(self._pending_of(inbox, consumer))

    def forsaken(self, inbox: Inbox) -> list[str]:
        holders = {holder for holder, _ in self._group(inbox).pending.values()}
        return sorted(slot for slot in holders if self._is_free(slot))

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int) -> Owner | None:
        holder = self._owner_in(slot, self.names.lease(slot))
        if holder is not None and holder.nonce == nonce:
            return holder
        owner = Owner(slot, 1, nonce)
        if holder is not None and (owner.is_guest or not holder.is_guest):
            return None
        before = self._owner_in(slot, self.names.owner(slot))
        if before is not None:
            owner = Owner(slot, before.epoch + 1, nonce)
        self._strings[self.names.owner(slot)] = self._strings[self.names.lease(slot)] = str(owner)
        return owner

    def announce(self, slot: str, status: str) -> bool:
        if self.held(slot):
            return False
        self._strings[self.names.status(slot)] = status
        return True

    def unattended(self) -> list[str]:
        engines = {slot_name(GENERATE, index) for index in range(16)}
        here = {slot for slot in engines if self.held(slot) or self._length(self.names.steps(slot))}
        return sorted(slot for slot in here if self._is_free(slot_name(DETOKENIZE, slot_index(slot))))

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        if not self.owns(owner):
            return False
        self._strings[self.names.lease(owner.slot)] = str(owner)
        if status:
            self._strings[self.names.status(owner.slot)] = status
        return True

    def release(self, owner: Owner) -> bool:
        if self._strings.get(self.names.lease(owner.slot)) != str(owner):
            return False
        self.expire(self.names.lease(owner.slot))
        self.expire(self.names.status(owner.slot))
        return True

    # frontends

    def open_replies(self, frontend: str) -> str:
        """As StreamLog.open_replies; the id is empty where the stream is new."""
        key = self.names.replies(frontend)
        if not self._length(key):
            self._append(key, "", {"events": "[]"}, make=True)
        return self._streams[key].items[-1].id

    # what the commits are made of

    def _append(self, key: str, entry_id: str, fields: Mapping[str, str], *, make: bool = False) -> bool:
        stream = self._streams.setdefault(key, _Stream()) if make else self._streams.get(key)
        return stream is not None and stream.append(entry_id, fields)

    def _length(self, key: str) -> int:
        return len(self._streams[key].items) if key in self._streams else 0

    def _group(self, inbox: Inbox) -> _Group:
        stream = self._streams.get(inbox.stream)
        if stream is None or inbox.group not in stream.groups:
            raise GroupLost(inbox.stream)
        return stream.groups[inbox.group]

    def _deliver(self, inbox: Inbox, consumer: str, max_entries: int) -> list[Entry]:
        group = self._group(inbox)
        items, group.unread = group.unread[:max_entries], group.unread[max_entries:]
        for item in items:
            group.pending[item] = (consumer, 1)
            group.delivered = item.id
        return _entries(items)

    def _pending_of(self, inbox: Inbox, consumer: str) -> list[_Item]:
        pending = self._group(inbox).pending
        return [item for item in _in_order(pending) if pending[item][0] == consumer]

    def _give(self, inbox: Inbox, items: Sequence[_Item], owner: Owner) -> list[Entry]:
        pending = self._group(inbox).pending
        for item in items:
            pending[item] = (owner.slot, pending[item][1])
        return _entries(items)

    def _acknowledge(self, inbox: Inbox, entry_id: str) -> bool:
        stream = self._streams.get(inbox.stream)
        group = stream.groups.get(inbox.group) if stream is not None else None
        found = [item for item in group.pending if item.id == entry_id] if group is not None else []
        for item in found:
            assert group is not None
            del group.pending[item]
        return bool(found)

    def _delete(self, key: str, entry_id: str) -> None:
        stream = self._streams.get(key)
        for item in [item for item in stream.items if item.id == entry_id] if stream is not None else ():
            assert stream is not None
            stream.drop(item)

    def _tell_engines(self, uid: str) -> None:
        self._append(self.names.control, "", {"uid": uid}, make=True)

    def _control_after(self, cursor: str) -> tuple[tuple[str, ...], str, str]:
        items = self._streams[self.names.control].after(cursor) if self.names.control in self._streams else []
        uids = tuple(item.fields["uid"] for item in items if "uid" in item.fields)
        flushes = [item.id for item in items if "flush" in item.fields]
        return uids, items[-1].id if items else cursor, flushes[-1] if flushes else ""

    def _fence(self, owner: Owner) -> None:
        if not self.owns(owner):
            raise Fenced(str(owner))

    def _is_free(self, slot: str) -> bool:
        holder = self._owner_in(slot, self.names.lease(slot))
        return holder is None or holder.is_guest

    def _owner_in(self, slot: str, key: str) -> Owner | None:
        epoch, _, nonce = self._strings.get(key, "").partition(":")
        return Owner(slot, int(epoch), nonce) if epoch else None


def _entries(items: Sequence[_Item]) -> list[Entry]:
    return [Entry(item.id, item.fields) for item in items]


def _in_order(items: Mapping[_Item, object]) -> list[_Item]:
    return sorted(items, key=lambda item: parse_id(item.id))
