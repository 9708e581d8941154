"""Operations of engines and detokenizers, reads of consumer groups, and slots."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from pipeline.errors import DoesNotFit, Fenced, LogUnavailable
from pipeline.events import Failed, StepCompleted, TokensProduced
from pipeline.log.entries import (
    DEAD_CAP,
    JOURNAL_CAP,
    REPLY_CAP,
    STATUS_TTL_MS,
    burial_fields,
    kept_ms,
    made_ms_of,
    produced_words,
    words_of,
)
from pipeline.log.operation import Batch, Command, LogContext, Script, Steps, Words, blocking, commit
from pipeline.log.operations.requests import end_words, flat, sealing, shared_by, written
from pipeline.log.protocol import Entry, Inbox, Journalled, Lease, Owner, Produced, StepCommitted, Taken
from pipeline.log.replies import (
    as_text,
    entries_of,
    first_stream,
    is_ok,
    lease_of,
    nothing,
    pending_of,
    texts,
    texts_there,
)
from pipeline.names import (
    DETOKENIZE,
    GENERATE,
    SEAL,
    SERVING_STAGES,
    Names,
    base_uid,
    is_too_new,
    newer_consumer,
    slot_index,
    slot_name,
    slot_stage,
)
from pipeline.serving import Served, Serving

SLOTS_PER_LOOK = 16
"""Number of slots of a stage that are read together. The next ones are read if one of these exists."""
PENDING_PER_LOOK = 100
EXPIRED = -2
"""PTTL of a key that is gone: it existed for the command before."""


def unless_fenced(owner: Owner, reply: Any) -> Any:
    """Return *reply*. Raise Fenced if it shows that *owner* has lost its slot."""
    if reply == b"FENCED":
        raise Fenced(f"{owner.slot} has another owner than {owner}")
    return reply


# Engines


def take(log: LogContext, owner: Owner, max_entries: int, *, control_cursor: str) -> Script[Taken]:
    def parse(reply: Any) -> Taken:
        entries, cursor, ended, control, flush = unless_fenced(owner, reply)
        return Taken(tuple(entries_of(entries)), as_text(cursor), texts(ended), as_text(control), as_text(flush))

    return commit(
        "take",
        parse,
        {"owner": log.names.owner(owner.slot), "tokenized": log.names.tokenized, "control": log.names.control},
        owner=str(owner),
        slot=owner.slot,
        max_entries=max_entries,
        control_cursor=control_cursor,
        once=True,
    )


def wait(log: LogContext, cursor: str, control_cursor: str, *, block_ms: int) -> Command[None]:
    streams = [log.names.tokenized, log.names.control, cursor, control_cursor]
    return Command(["XREAD", "COUNT", 1, *blocking(block_ms), "STREAMS", *streams], nothing, once=True)


@functools.cache
def _keys_of_step(names: Names, slot: str) -> tuple[str, ...]:
    """Return the keys of every commit of an engine. They are cached, as below."""
    return (names.owner(slot), names.lease(slot), names.steps(slot), names.tokenized, names.control)


def step(
    log: LogContext,
    owner: Owner,
    steps: Mapping[int, StepCompleted],
    *,
    ended: Sequence[str],
    control_cursor: str,
    lease_ms: int,
) -> Script[StepCommitted]:
    def parse(reply: Any) -> StepCommitted:
        if reply == b"BEHIND":
            first = f"{owner.epoch}-{min(steps)}"
            raise LogUnavailable(f"{names.steps(slot)} has an entry after {first} that no engine wrote; waiting for it")
        length, newest, ms, uids, cursor, flush = unless_fenced(owner, reply)
        return StepCommitted(length, as_text(newest), texts(uids), as_text(cursor), as_text(flush), int(ms))

    slot, names = owner.slot, log.names
    keys = _keys_of_step(names, slot)
    args: list[str | int | bytes] = [str(owner), lease_ms, control_cursor, len(ended), *ended]
    for number, event in steps.items():
        fields = written(event)
        args += [f"{owner.epoch}-{number}", len(fields), *fields]
    return Script("step", keys, args, parse, once=True)


def flush(log: LogContext, by: str) -> Script[str]:
    return commit("flush", as_text, {"control": log.names.control}, by=by)


# Detokenizers


@functools.cache
def _keys_of_produced(names: Names, slot: str, engine: str) -> tuple[str, ...]:
    """Return the keys of every commit of a detokenizer. There is a commit for each token, so they are cached."""
    keys = (names.owner(slot), names.steps(engine), names.live, names.control)
    return (*keys, names.ended, names.archive, names.journal(engine))


def produced(
    log: LogContext,
    owner: Owner,
    entries: Sequence[Entry],
    engine: str,
    events: Sequence[Produced],
    journal: Journalled = (),
    *,
    tries: int = 0,
) -> Script[bool]:
    names, limits = log.names, log.limits
    keys = [*_keys_of_produced(names, owner.slot, engine)]
    histories, replies = produced_words(events)
    made_ms = {entry.id: made_ms_of(entry) for entry in entries}
    tokens: dict[str, list[str | int]] = {entry.id: [] for entry in entries}
    histories_of: dict[str, list[str]] = {step: [] for step in tokens}
    others: list[tuple[Produced, dict[str, bytes]]] = []
    others_of = set[str]()
    request = names.request("")
    for item, fields in zip(events, histories, strict=True):
        if isinstance(fields, tuple):
            token, text, step = fields
            if step in tokens and item[0] not in others_of:  # produced.lua has the names of the fields
                histories_of[step].append(request + item[0])
                tokens[step] += (item[1], token, text)
                continue
            fields = words_of(fields)
        others.append((item, fields))
        others_of.add(item.uid)
    keys += chain.from_iterable(histories_of.values())
    index: dict[str, int] = {}

    def key_index(key: str) -> int:
        if key not in index:
            keys.append(key)
            index[key] = len(keys)
        return index[key]

    writes: list[str | int | bytes] = []
    for item, fields in others:
        history, kept, shared = key_index(names.request(item.uid)), limits.retention_ms, 0
        if item.entry_id == SEAL:
            kept = kept_ms(item.event, item.n, fields, kept)
            shared = key_index(texts_key) if (texts_key := shared_by(names, item.uid)) else 0
        made = made_ms.get(item.event.step, 0) if isinstance(item.event, TokensProduced) else 0
        writes += (history, item.entry_id, item.uid, int(item.tell_engine), kept, shared, made, 2 * len(fields))
        writes += chain.from_iterable(fields.items())
    payloads: list[str | int] = []
    for frontend, payload in replies.items():
        payloads += [key_index(names.replies(frontend)), payload]
    noted = [flat(fields) for fields in journal] if journal and limits.journal_bytes else [[] for _ in entries]
    steps: list[str | int | bytes] = []
    for entry, words, of_step in zip(entries, noted, tokens.values(), strict=True):
        steps += (entry.id, made_ms[entry.id], len(words), *words, len(of_step) // 3, *of_step)
    args: Words = [str(owner), REPLY_CAP, limits.retention_ms, limits.journal_bytes, JOURNAL_CAP, tries, len(entries)]
    args = [*args, *steps, len(replies), *payloads, *writes]
    return Script("produced", keys, args, lambda reply: is_ok(unless_fenced(owner, reply)), once=True)


def journal(
    log: LogContext, engine: str, *, first: str = "-", last: str = "+", max_entries: int = 0, newest: bool = False
) -> Command[list[Entry]]:
    limit: Words = ["COUNT", max_entries] if max_entries else []
    bounds = ["XREVRANGE", last, first] if newest else ["XRANGE", first, last]
    words: Words = [bounds[0], log.names.journal(engine), *bounds[1:], *limit]
    return Command(words, lambda reply: entries_of(reply[::-1] if newest else reply))


def drop_journals(log: LogContext) -> Steps[None]:
    """Delete the journals of all engines."""
    for first in count(0, SLOTS_PER_LOOK):
        gone = yield from Command(["DEL", *map(log.names.journal, slots_of(GENERATE, first))], int)
        if not gone:
            break


# Consumer groups


def prepare(_: LogContext, inbox: Inbox) -> Script[None]:
    return commit("prepare", nothing, {"stream": inbox.stream}, group=inbox.group)


def backlog(_: LogContext, inbox: Inbox) -> Command[int]:
    return Command(["XLEN", inbox.stream], int)


def read(_: LogContext, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> Command[list[Entry]]:
    group = ["XREADGROUP", "GROUP", inbox.group, consumer, "COUNT", max_entries, *blocking(block_ms)]
    return Command([*group, "STREAMS", inbox.stream, ">"], first_stream, once=True)


def pending(_: LogContext, inbox: Inbox, consumer: str) -> Steps[list[Entry]]:
    entries: list[Entry] = []
    first = "-"
    while True:
        ids = yield from _pending_ids(inbox, consumer, first)
        for entry_id in ids:
            found = yield from Command(["XRANGE", inbox.stream, entry_id, entry_id], entries_of)
            if not found:  # deleted while pending, so only the group must forget it
                yield from Command(["XACK", inbox.stream, inbox.group, entry_id], nothing)
            entries += found
        if len(ids) < PENDING_PER_LOOK:
            return entries
        first = f"({ids[-1]}"


def _pending_ids(inbox: Inbox, consumer: str, first: str) -> Command[list[str]]:
    words: Words = ["XPENDING", inbox.stream, inbox.group, first, "+", PENDING_PER_LOOK, consumer]
    return Command(words, lambda items: [as_text(item[0]) for item in items])


def _holdings(inbox: Inbox) -> Command[dict[str, int]]:
    """Read how many entries each consumer has pending."""
    return Command(["XPENDING", inbox.stream, inbox.group], pending_of)


def num_pending(_: LogContext, inbox: Inbox, consumer: str) -> Steps[int]:
    return (yield from _holdings(inbox)).get(consumer, 0)


def claim(log: LogContext, inbox: Inbox, owner: Owner, max_entries: int) -> Steps[list[Entry]]:
    entries: list[Entry] = []
    for other in (yield from _holdings(inbox)):
        if other != owner.slot and not is_too_new(other) and len(entries) < max_entries:
            entries += yield from _claim(log.names, inbox, owner, other, max_entries - len(entries))
    return entries


def claim_from(log: LogContext, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> Script[list[Entry]]:
    return _claim(log.names, inbox, owner, guest.slot, max_entries, guest)


def _claim(
    names: Names, inbox: Inbox, owner: Owner, other: str, max_entries: int, guest: Owner | None = None
) -> Script[list[Entry]]:
    """Claim from the slot *other*, which is free, or which *guest* looks after."""
    return commit(
        "claim",
        lambda reply: entries_of(unless_fenced(owner, reply)),
        {
            "owner": names.owner(owner.slot),
            "other_lease": names.lease(other),
            "other_owner": names.owner(other),
            "stream": inbox.stream,
        },
        owner=str(owner),
        group=inbox.group,
        slot=owner.slot,
        other=other,
        max_entries=max_entries,
        guest=str(guest) if guest else None,
        once=True,
    )


def retry(log: LogContext, inbox: Inbox, owner: Owner, entry: Entry) -> Script[int]:
    return commit(
        "retry",
        lambda reply: int(unless_fenced(owner, reply)),
        {"owner": log.names.owner(owner.slot), "stream": inbox.stream},
        owner=str(owner),
        group=inbox.group,
        slot=owner.slot,
        entry=entry.id,
        once=True,
    )


def forsaken(log: LogContext, inbox: Inbox, *, but: str = "") -> Steps[list[str]]:
    words: Words = ["XPENDING", inbox.stream, inbox.group]
    holdings = yield from Command(words, pending_of, once=True)  # engines ask several times a second
    slots = [slot for slot in holdings if slot != but and not is_too_new(slot)]
    if not slots:
        return []
    holders = yield from Command(["MGET", *map(log.names.lease, slots)], list, once=True)
    return [slot for slot, holder in zip(slots, holders, strict=True) if lease_of(holder, 0).is_free]


# Entries that cannot be read


def bury(
    log: LogContext,
    inbox: Inbox,
    entry: Entry,
    reason: str,
    event: Failed,
    requests: Mapping[str, str],
    owner: Owner | None = None,
) -> Script[tuple[str, ...] | None]:
    def parse(reply: Any) -> tuple[str, ...] | None:
        if owner is not None:
            unless_fenced(owner, reply)
        return None if reply == b"LOST" else texts(reply)

    names, letter = log.names, flat(burial_fields(inbox, reason, list(requests)))
    return commit(
        "bury",
        parse,
        {
            **sealing(names),
            "stream": inbox.stream,
            "dead": names.dead,
            "histories": [*map(names.request, requests)],
            "all_replies": [*map(names.replies, requests.values())],
            "all_shared": [names.shared(base_uid(uid)) for uid in requests],
            "owner": names.owner(owner.slot) if owner is not None else None,
        },
        *letter,
        *end_words(event),
        owner=str(owner) if owner is not None else None,
        group=inbox.group,
        entry=entry.id,
        uids=[*requests],
        num_parts=len(letter),
        dead_cap=DEAD_CAP,
        retention_ms=log.limits.retention_ms,
        reply_cap=REPLY_CAP,
    )


def leave(_: LogContext, inbox: Inbox, consumer: str, entry: Entry, version: int) -> Script[bool]:
    newer = newer_consumer(inbox.group, version)
    keys = {"stream": inbox.stream}
    return commit("leave", bool, keys, group=inbox.group, consumer=consumer, entry=entry.id, newer=newer)


def left(_: LogContext, inbox: Inbox, max_entries: int) -> Steps[list[Entry]]:
    entries: list[Entry] = []
    for consumer in (yield from _holdings(inbox)):
        if is_too_new(consumer):
            for entry_id in (yield from _pending_ids(inbox, consumer, "-"))[: max_entries - len(entries)]:
                entries += yield from Command(["XRANGE", inbox.stream, entry_id, entry_id], entries_of)
    return entries


# Slots


def acquire(
    log: LogContext, slot: str, nonce: str, lease_ms: int, serving: Serving | None = None
) -> Script[Owner | None]:
    def parse(epoch: int) -> Owner | None:
        if epoch < 0:
            raise DoesNotFit(f"{slot}: other workers serve something else")
        return Owner(slot, epoch, nonce) if epoch else None

    names = log.names
    keys = {"lease": names.lease(slot), "owner": names.owner(slot), "serving": _serving_keys(names, slot, serving)}
    return commit("acquire", parse, keys, nonce=nonce, lease_ms=lease_ms, serves=serving.text() if serving else None)


def _serving_keys(names: Names, slot: str, serving: Serving | None) -> list[str]:
    """Return the key of what the slot's stage serves, then those of the other stages; [] without *serving*."""
    own = slot_stage(slot)
    stages = [own, *(stage for stage in SERVING_STAGES if stage != own)] if serving else []
    return [names.serving(stage) for stage in stages]


def serving(log: LogContext) -> Batch[dict[str, Served]]:
    def parse(replies: list[Any]) -> dict[str, Served]:
        found = zip(SERVING_STAGES, replies[::2], replies[1::2], strict=True)
        there = ((stage, text, ttl_ms) for stage, text, ttl_ms in found if text is not None and ttl_ms != EXPIRED)
        return {stage: Served(Serving.parse(text), ttl_ms) for stage, text, ttl_ms in there}

    keys = [log.names.serving(stage) for stage in SERVING_STAGES]
    return Batch([[word, key] for key in keys for word in ("GET", "PTTL")], parse, any_type=True)


def announce(log: LogContext, slot: str, status: str) -> Script[bool]:
    keys = {"lease": log.names.lease(slot), "status": log.names.status(slot)}
    return commit("announce", bool, keys, status=status, status_ms=STATUS_TTL_MS)


def renew(log: LogContext, owner: Owner, lease_ms: int, status: str, serving: Serving | None = None) -> Script[bool]:
    slot, names = owner.slot, log.names
    return commit(
        "renew",
        bool,
        {
            "lease": names.lease(slot),
            "owner": names.owner(slot),
            "status": names.status(slot),
            "serving": _serving_keys(names, slot, serving),
        },
        owner=str(owner),
        lease_ms=lease_ms,
        status=status,
        status_ms=STATUS_TTL_MS,
        serves=serving.text() if serving else None,
    )


def release(log: LogContext, owner: Owner) -> Script[bool]:
    keys = {"lease": log.names.lease(owner.slot), "status": log.names.status(owner.slot)}
    return commit("release", bool, keys, owner=str(owner))


def lease(log: LogContext, slot: str) -> Batch[Lease]:
    key = log.names.lease(slot)
    return Batch([["GET", key], ["PTTL", key]], lambda replies: lease_of(*replies))


@functools.cache
def _looked_at(names: Names, first: int) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return the engines' slots from number *first* on, the keys of their leases and of those of their detokenizers,
    and the keys of their steps. Detokenizers read these several times a second, so they are cached."""
    engines = slots_of(GENERATE, first)
    detokenizers = [slot_name(DETOKENIZE, slot_index(engine)) for engine in engines]
    return engines, [names.lease(slot) for slot in (*engines, *detokenizers)], [names.steps(slot) for slot in engines]


def unattended(log: LogContext) -> Steps[list[str]]:
    found: list[str] = []
    for first in count(0, SLOTS_PER_LOOK):
        engines, leases, streams = _looked_at(log.names, first)
        holders = yield from Command(["MGET", *leases], list, once=True)
        living, attending = holders[: len(engines)], holders[len(engines) :]
        free = [at for at, holder in enumerate(attending) if holder is None or lease_of(holder, 0).is_free]
        steps = [streams[number] for number in free]
        num_streams = (yield from Command(["EXISTS", *steps], int, once=True)) if steps else 0
        lengths = (yield from Batch([["XLEN", key] for key in steps], list)) if num_streams else [0] * len(steps)
        found += [engines[number] for number, length in zip(free, lengths, strict=True) if length or living[number]]
        if not num_streams and not any(holders):
            break
    return found


def statuses(log: LogContext, stage: str) -> Steps[dict[str, str]]:
    found: dict[str, str] = {}
    for first in count(0, SLOTS_PER_LOOK):
        there = yield from _statuses(log.names, stage, first)
        found |= there
        if not there:
            break
    return found


def _statuses(names: Names, stage: str, first: int) -> Command[dict[str, str]]:
    keys = {slot: names.status(slot) for slot in slots_of(stage, first)}
    return Command(["MGET", *keys.values()], lambda values: texts_there(keys, values))


def slots_of(stage: str, first: int) -> list[str]:
    """Return the slots of *stage* that are read together, from number *first* on."""
    return [slot_name(stage, index) for index in range(first, first + SLOTS_PER_LOOK)]
