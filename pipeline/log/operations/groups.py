"""Operations of consumer groups: who has which entries, and what happens to those that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.events import Failed
from pipeline.log.entries import (
    DEAD_CAP,
    REPLY_CAP,
    burial_fields,
)
from pipeline.log.operation import Batch, Command, LogContext, Script, Steps, Words, blocking, commit
from pipeline.log.operations.requests import end_words, flat, sealing
from pipeline.log.protocol import Entry, Inbox, Owner
from pipeline.log.replies import (
    as_text,
    entries_of,
    first_stream,
    lease_of,
    nothing,
    pending_of,
    texts,
    unless_fenced,
)
from pipeline.names import (
    Names,
    base_uid,
    is_too_new,
    newer_consumer,
)

PENDING_PER_LOOK = 100


def prepare(_: LogContext, inbox: Inbox) -> Script[None]:
    """Create the stream and its group where they are missing. The group also reads entries appended before."""
    return commit("prepare", nothing, {"stream": inbox.stream}, group=inbox.group)


def backlog(_: LogContext, inbox: Inbox) -> Command[int]:
    """Return how many entries the stream holds: unread ones and those that are being worked on."""
    return Command(["XLEN", inbox.stream], int)


def read(_: LogContext, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> Command[list[Entry]]:
    """Read new entries for *consumer*, waiting up to *block_ms*."""
    group = ["XREADGROUP", "GROUP", inbox.group, consumer, "COUNT", max_entries, *blocking(block_ms)]
    return Command([*group, "STREAMS", inbox.stream, ">"], first_stream, once=True)


def pending(_: LogContext, inbox: Inbox, consumer: str) -> Steps[list[Entry]]:
    """Return the entries that *consumer* has read and not consumed, in order. This does not count as a try."""
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


def in_hand(_: LogContext, inbox: Inbox) -> Batch[dict[str, int]]:
    """Return how many entries each consumer has read and not consumed; none if there is no group."""
    words: Words = ["XPENDING", inbox.stream, inbox.group]
    return Batch([words], lambda replies: pending_of(replies[0]) if replies[0] is not None else {})


def num_pending(_: LogContext, inbox: Inbox, consumer: str) -> Steps[int]:
    """Return how many entries *consumer* has read and not consumed."""
    return (yield from _holdings(inbox)).get(consumer, 0)


def claim(log: LogContext, inbox: Inbox, owner: Owner, max_entries: int) -> Steps[list[Entry]]:
    """Take over pending entries of consumers whose slots are free. Raise Fenced if there is one to claim."""
    entries: list[Entry] = []
    for other in (yield from _holdings(inbox)):
        if other != owner.slot and not is_too_new(other) and len(entries) < max_entries:
            entries += yield from _claim(log.names, inbox, owner, other, max_entries - len(entries))
    return entries


def claim_from(log: LogContext, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> Script[list[Entry]]:
    """Take over pending entries of the slot that *guest* owns; none if it has another owner. Raise Fenced."""
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
    """Add one to the tries of a pending entry, before the work on it begins; return the number of tries.

    The read that delivered the entry is the first try. 0: the entry is not pending for this slot. Raise Fenced.
    """
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
    """Return the consumers that have entries pending and whose slots no worker holds; not the slot *but*."""
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
        stored_ms=log.limits.response_retention_ms,
        ended_ms=log.limits.ended_ms,
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
