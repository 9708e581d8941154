"""Operations on requests, from submit to end, and for the janitor and `minisgl dead`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import orjson

from pipeline.events import End, Event, Submitted, Tokenized, as_plain, as_words
from pipeline.log.entries import (
    COPY_TTL_MS,
    DEAD_CAP,
    DEAD_HISTORY_BYTES,
    READER_TTL_MS,
    REPLY_CAP,
    brief_ms,
    is_tombstone,
    letter_fields,
    refused_ms,
)
from pipeline.log.operation import Batch, Command, Computation, LogContext, Script, Steps, Words, blocking, commit
from pipeline.log.operations.usage import counts_prompt, is_counted
from pipeline.log.protocol import (
    NO_TURN,
    DeadLetter,
    Entry,
    Once,
    Quota,
    RequestLimits,
    Submission,
    SubmitResult,
    Turn,
)
from pipeline.log.replies import (
    as_text,
    clock_ms,
    entries_of,
    history_of,
    info_of,
    is_ok,
    letters_of,
    nothing,
    streams_of,
    texts,
    texts_there,
)
from pipeline.log.shared import (
    chained,
    chains_in,
    digests_in,
    referring,
    submitted_bytes,
    submitted_words,
    whole_history,
)
from pipeline.names import PROBE, SEAL, Names, base_uid, sibling_uids

HISTORY_ENTRIES = 100
"""Largest number of entries of each history that a waiting read returns."""


ACK_MS = 1000
"""How long a submit waits for its replicas .."""
DISK_ACK_MS = 2500
""".. and for disks. Replicas tell of theirs once a second; with `appendfsync everysec`, a slow disk takes 2 s."""
MANY_EVENTS = 64
"""A submit of more requests is written in a thread."""


def flat(fields: Mapping[str, str | bytes]) -> list[str | bytes]:
    """Return fields as the words of an XADD."""
    return [item for pair in fields.items() for item in pair]


def written(event: Event) -> list[str | bytes]:
    """Return an event as the words of an XADD."""
    return flat(as_words(type(event), as_plain(event)))


def shared_by(names: Names, uid: str) -> str | None:
    """Return the key of the texts that *uid* shares with its siblings; None for a single request."""
    base = base_uid(uid)
    return None if uid == base else names.shared(base)


def submit(
    log: LogContext,
    uid: str,
    events: Sequence[Submitted],
    once: Once | None = None,
    *,
    quota: Quota | None = None,
    letter: str = "",
    has_room: Callable[[int], bool] = lambda _: True,
    left_ms: int | None = None,
) -> Steps[SubmitResult]:
    """Submit requests, all or none.

    *left_ms*: the log had accepted them and lost them, and so much of their time is left. No limit refuses them, they
    count for their quota, and they do without their idempotency key if another request has it now. This waits for no
    replica: their clients were answered long ago.

    *has_room*: returns whether so many bytes more may be written. If not, the requests are FULL, unless they exist
    already or something else is refused first.
    """
    if len(events) > MANY_EVENTS:
        histories, shared = yield from Computation(lambda: submitted_words(events))
    else:
        histories, shared = submitted_words(events)
    num_bytes = submitted_bytes(histories, shared)
    is_full = not has_room(num_bytes)
    pieces: Mapping[str, bytes] = {}
    if is_full:  # enough for the script to refuse them, or to find existing ones
        histories, shared = [{} for _ in events], {}
    elif events[0].stored and len(events) == 1 and not letter:  # operators may not write the pieces
        words, pieces = chained(histories[0])
        histories, num_bytes = [words], submitted_bytes([words], {})

    texts = (shared, pieces)
    submit = _submit(log, uid, events, histories, texts, num_bytes, once, quota, letter, left_ms, is_full=is_full)
    return (yield from submit)


def _submit(
    log: LogContext,
    uid: str,
    events: Sequence[Submitted],
    histories: Sequence[Mapping[str, bytes]],
    texts: tuple[Mapping[str, bytes], Mapping[str, bytes]],
    num_bytes: int,
    once: Once | None,
    quota: Quota | None,
    letter: str,
    left_ms: int | None,
    *,
    is_full: bool,
) -> Script[SubmitResult]:
    """*texts*: what siblings share, and the pieces of a stored response's texts."""
    shared, pieces = texts
    names, limits, uids = log.names, log.limits, sibling_uids(uid, len(events))
    timeout_ms = limits.background_timeout_ms if events[0].background else limits.timeout_ms
    keys: dict[str, str | Sequence[str] | None] = {
        "live": names.live,
        "accounts": [*map(names.account, uids)],
        "submitted": names.submitted,
        "tokenized": names.tokenized,
        "histories": [*map(names.request, uids)],
        "shared": shared_by(names, uids[0]),
        "pieces": [*map(names.text, pieces)],
        "idempotency": names.idempotency(once.key) if once else None,
        "dead": names.dead if letter else None,
        "versions": names.copies if letter else None,
        "stored": names.stored if events[0].stored else None,
        "stored_bytes": names.stored_bytes if events[0].stored else None,
        "background": names.running(f"background:{events[0].owner}") if events[0].background and not letter else None,
    }
    if quota is not None:
        keys |= {
            "running": names.running(quota.key),
            "balance": names.balance(quota.key),
            "queue": names.queue(quota.key),
            "spent": names.limit(quota.key),
        }

    def parse(reply: Any) -> SubmitResult:
        outcome, whose, number, *more = reply
        submission = Submission(as_text(outcome))
        full = is_full and submission is Submission.BUSY
        used_bytes = more[0] if submission is Submission.TOO_MUCH else 0
        limit = as_text(more[0]) if submission is Submission.TOO_FAST else ""
        return SubmitResult(Submission.FULL if full else submission, as_text(whose), number, used_bytes, limit)

    rates = rates_of(quota) if quota else {}
    # What brings a dead letter back brings its new request, too: they are one commit.
    then = () if letter or left_ms is not None else _acknowledgement(limits)

    def parse_both(replies: Any) -> SubmitResult:
        submitted, acks = parse(replies[0]), _missing_acks(limits, replies[1])
        is_taken = submitted.submission in (Submission.ACCEPTED, Submission.DUPLICATE, Submission.ATTACH)
        return SubmitResult(Submission.UNACKNOWLEDGED, submitted.uid, acks=acks) if is_taken and acks else submitted

    script = commit(
        "submit",
        parse_both if then else parse,
        keys,
        *flat(shared),
        *pieces.values(),
        *(word for fields in histories for word in flat(fields)),
        uid=uid,
        uids=uids,
        frontends=[event.frontend for event in events],
        num_fields=[2 * len(fields) for fields in histories],
        num_texts=len(shared),
        num_bytes=num_bytes,
        timeout_ms=timeout_ms if left_ms is None else left_ms,
        again=left_ms is not None,
        retention_ms=limits.retention_ms,
        stored_ms=limits.response_retention_ms,
        share_ms=limits.retention_ms,
        max_background=limits.max_background,
        max_queued=0 if is_full else limits.max_queued,
        digest=once.digest if once else None,
        instead_of=once.instead_of if once else None,
        letter=letter or None,
        version_ms=COPY_TTL_MS,
        accounts=["" if letter else _account(event, i, has_rates=bool(rates)) for i, event in enumerate(events)],
        rates=orjson.dumps(rates).decode() if rates else None,
        queued=quota.queued_requests or None if quota else None,
        owner=events[0].owner if quota and quota.queued_requests else None,
        at_once=quota.concurrent_requests if quota else 0,
        log_bytes=quota.log_bytes if quota else 0,
        acks=bool(then),
    )
    return dataclasses.replace(script, then=then)


def _acknowledgement(limits: RequestLimits) -> Words:
    """Return the command that waits until as many servers have a submit as must; none if the server alone is enough."""
    if limits.acks_disk:
        return ["WAITAOF", 1, limits.acks, DISK_ACK_MS]
    return ["WAIT", limits.acks, ACK_MS] if limits.acks else ()


def _missing_acks(limits: RequestLimits, reply: Any) -> str:
    """Return what *reply* to `_acknowledgement` lacks, for people; "" if it is enough."""
    if limits.acks_disk:
        count, most = sum(map(int, reply)), limits.acks + 1
        is_enough, flag = reply[0] >= 1 and reply[1] >= limits.acks, "--acks-disk" + f" --acks {limits.acks}"
        return "" if is_enough else f"{count} of {most} disks within {DISK_ACK_MS / 1000:g} s ({flag})"
    if reply >= limits.acks:
        return ""
    return f"{reply} of {limits.acks} replicas within {ACK_MS / 1000:g} s (--acks {limits.acks})"


def rates_of(quota: Quota) -> dict[str, int]:
    """Return how much fits into the token buckets of *quota*, by name."""
    names = ("requests_per_minute", "requests_per_day", "tokens_per_minute", "tokens_per_day")
    return {name: most for name in names if (most := getattr(quota, name))}


def _account(event: Submitted, index: int, *, has_rates: bool) -> str:
    """Return what `count_usage` in lib.lua reads when a request ends; "" if no engine computes it for its owner."""
    if event.endpoint == PROBE or event.task != "generate":
        return ""
    flags = counts_prompt(event, index), has_rates, is_counted(event)
    return f"{''.join(str(int(flag)) for flag in flags)}{event.owner}\n{event.model}"


def tokenized(
    log: LogContext, entry: Entry, event: Tokenized, *, stored: bool = False, turn: Turn = NO_TURN
) -> Script[bool]:
    names, uid = log.names, entry.fields["uid"]
    words, shared = as_words(Tokenized, as_plain(event)), shared_by(names, uid)
    words, texts = referring(words) if shared else (words, {})
    words, pieces = chained(words) if stored and not shared else (words, {})
    return commit(
        "tokenized",
        is_ok,
        {
            "submitted": names.submitted,
            "history": names.request(uid),
            "tokenized": names.tokenized,
            "waiting": names.waiting,
            "shared": shared,
            "pieces": [*map(names.text, pieces)],
            "stored_bytes": names.stored_bytes,
        },
        *flat(texts),
        *pieces.values(),
        *flat(words),
        entry=entry.id,
        uid=uid,
        frontend=entry.fields["frontend"],
        line=turn.line,
        turn=[word for pair in turn.fields().items() for word in pair],
        num_texts=len(texts),
    )


def end_words(event: End) -> list[str | bytes]:
    """Return the words of an end; the commit adds the number of tokens."""
    return flat(_end_fields(event))


def _end_fields(event: End) -> dict[str, bytes]:
    return as_words(type(event), as_plain(event, without=("n",)))


def sealing(names: Names) -> dict[str, str | Sequence[str] | None]:
    """Return the keys that `seal` in lib.lua needs whatever request ends."""
    keys = {"live": names.live, "control": names.control, "ended": names.ended, "archive": names.archive}
    return {**keys, "stored": names.stored, "stored_bytes": names.stored_bytes}


def _sealed(names: Names, uid: str, frontend: str) -> dict[str, str | Sequence[str] | None]:
    """Return the keys that `seal` needs for a request."""
    own = {"history": names.request(uid), "replies": names.replies(frontend), "shared": shared_by(names, uid)}
    return sealing(names) | own


def end(
    log: LogContext,
    uid: str,
    event: End,
    *,
    frontend: str,
    consume: Entry | None = None,
    dead: DeadLetter | None = None,
) -> Script[bool]:
    names, retention_ms = log.names, log.limits.retention_ms
    letter, said = flat(letter_fields(dead)) if dead else [], _end_fields(event)
    return commit(
        "end",
        is_ok,
        {**_sealed(names, uid, frontend), "submitted": names.submitted, "dead": names.dead},
        *letter,
        *flat(said),
        uid=uid,
        retention_ms=retention_ms,
        stored_ms=log.limits.response_retention_ms,
        brief_ms=brief_ms(event, 0, said, retention_ms),
        ended_ms=log.limits.ended_ms,
        reply_cap=REPLY_CAP,
        entry=consume.id if consume else None,
        dead_cap=DEAD_CAP,
        copy_bytes=DEAD_HISTORY_BYTES,
        num_parts=len(letter),
    )


def abandon(
    log: LogContext,
    uid: str,
    event: End,
    *,
    frontend: str,
    once: Once | None = None,
    attached: bool = False,
    refused: bool = False,
) -> Script[bool]:
    """End a request whose client left, as `end` does. Return False also if another client reads it.

    *once*: idempotency key of the client. *attached*: the client did not send the request; the key led it there.
    Such a client ends the request only after the sender has left. A sender that leaves one of several siblings to
    its readers has left them all; abandon each of them all the same. *refused*: the client left because a sibling
    was refused; without tokens the history is kept as briefly as that sibling's.
    """
    names, kept = log.names, log.limits.retention_ms
    return commit(
        "abandon",
        is_ok,
        {
            **_sealed(names, uid, frontend),
            "reader": names.reader(uid),
            "idempotency": names.idempotency(once.key) if once else None,
        },
        *end_words(event),
        uid=uid,
        base=base_uid(uid),
        retention_ms=kept,
        stored_ms=log.limits.response_retention_ms,
        brief_ms=refused_ms(kept) if refused else None,
        ended_ms=log.limits.ended_ms,
        reply_cap=REPLY_CAP,
        attached=attached,
    )


def reading(log: LogContext, uids: Sequence[str], who: str) -> Script[None]:
    """Record for 60 s that the process *who* reads requests of others: those of *uids* that have not ended."""
    keys = {"readers": [*map(log.names.reader, uids)], "histories": [*map(log.names.request, uids)]}
    return commit("reading", nothing, keys, who=who, ttl_ms=READER_TTL_MS)


def stop_reading(log: LogContext, uid: str, who: str) -> Command[None]:
    """Remove what `reading` recorded."""
    return Command(["SREM", log.names.reader(uid), who], nothing)


# Histories


def _history(names: Names, uid: str, after: str, max_entries: int = 0) -> Words:
    """Return the command that reads a history from its start, or after the id *after*; *max_entries* 0: all entries."""
    if after == SEAL:  # Redis refuses an interval that begins after the largest id; this one is empty
        return ["XRANGE", names.request(uid), "+", "-"]
    count: list[str | int] = ["COUNT", max_entries] if max_entries else []
    return ["XRANGE", names.request(uid), f"({after}" if after else "-", "+", *count]


def wholes(names: Names, histories: Sequence[tuple[str, Sequence[Entry]]]) -> Steps[list[list[Entry] | None]]:
    """Return the entries of histories, given as (uid, entries), with complete texts; None if they expired meanwhile.

    Shared texts take one more round trip, and one for those of stored responses. Each is one object, however many
    histories refer to it.
    """
    asked: dict[str, dict[str, None]] = {}
    for uid, entries in histories:
        for digest in digests_in(entries):
            asked.setdefault(base_uid(uid), {})[digest] = None
    texts: dict[str, dict[str, str]] = {}
    if asked:
        commands: list[Words] = [["HMGET", names.shared(base), *asked[base]] for base in asked]
        replies = yield from Batch(commands, list, any_type=True)
        found = zip(asked.items(), replies, strict=True)
        texts = {base: texts_there(digests, reply) for (base, digests), reply in found if reply is not None}
    if chains := list(dict.fromkeys(digest for _, entries in histories for digest in chains_in(entries))):
        keys = [*map(names.text, chains)]
        there = yield from Script("texts", keys, (), functools.partial(texts_there, chains))
        texts |= {base_uid(uid): texts.get(base_uid(uid), {}) | there for uid, _ in histories}
    return [whole_history(entries, texts.get(base_uid(uid), {})) for uid, entries in histories]


def histories(log: LogContext, uids: Sequence[str], *, after: str = "") -> Steps[list[list[Entry]]]:
    commands = [_history(log.names, uid, after) for uid in uids]
    raw = yield from Batch(commands, lambda replies: [*map(history_of, replies)], any_type=True)
    found = yield from wholes(log.names, list(zip(uids, raw, strict=True)))
    return [[] if not after and is_tombstone(entries or ()) else entries or [] for entries in found]


def histories_there(
    log: LogContext, cursors: Mapping[str, str], *, max_entries: int = 0
) -> Steps[dict[str, list[Entry] | None]]:
    """Return the entries of each history uid -> id after the id, the first *max_entries* unless that is 0; None if
    there is no history.
    """
    commands: list[Words] = []
    for uid, after in cursors.items():
        commands += [["EXISTS", log.names.request(uid)], _history(log.names, uid, after, max_entries)]

    replies = yield from Batch(commands, list, any_type=True)
    found = zip(cursors, replies[::2], replies[1::2], strict=True)
    there = {uid: history_of(raw) for uid, exists, raw in found if exists}
    read = dict(zip(there, (yield from wholes(log.names, list(there.items()))), strict=True))
    return {uid: read.get(uid) for uid in cursors}


def entries(log: LogContext, uid: str, ids: Sequence[str], *, whole: bool = True) -> Steps[dict[str, Entry]]:
    """Return those of the entries *ids* that the history of *uid* has.

    Unless *whole*, entries of siblings lack their shared texts.
    """
    commands = [["XRANGE", log.names.request(uid), entry_id, entry_id] for entry_id in ids]
    raw = yield from Batch(commands, list, any_type=True)
    found = [entry for reply in raw for entry in entries_of(reply or ())]
    read = (yield from wholes(log.names, [(uid, found)]))[0] if whole else found
    return {entry.id: entry for entry in read or ()}


def lengths(log: LogContext, uids: Sequence[str]) -> Batch[dict[str, int]]:
    """Return how many entries each history has; 0 if there is none. An erased request has only its end."""

    def parse(replies: list[Any]) -> dict[str, int]:
        return {uid: length or 0 for uid, length in zip(uids, replies, strict=True)}

    return Batch([["XLEN", log.names.request(uid)] for uid in uids], parse, any_type=True)


def expires_ms(log: LogContext, uid: str) -> Command[int]:
    """Return when a stored response will be removed at the latest, in ms of Redis' clock; 0: it is not there."""
    return Command(["ZSCORE", log.names.stored, uid], lambda due: int(due or 0))


def read_histories(log: LogContext, cursors: Mapping[str, str], *, block_ms: int) -> Steps[dict[str, list[Entry]]]:
    """Wait up to *block_ms* until one of the histories uid -> id has entries after the id; return these entries. A
    deleted history is waited for like a new one.
    """
    uids = {log.names.request(uid): uid for uid in cursors}
    words = ["XREAD", "COUNT", HISTORY_ENTRIES, *blocking(block_ms), "STREAMS", *uids, *cursors.values()]
    raw = yield from Command(words, streams_of, once=True)
    news = [(uids[key], found) for key, found in raw.items()]
    there = zip(news, (yield from wholes(log.names, news)), strict=True)
    return {uid: found for (uid, _), found in there if found is not None}


def frontends_of(log: LogContext, uids: Sequence[str]) -> Batch[dict[str, str]]:
    def parse(replies: list[Any]) -> dict[str, str]:
        firsts = ((uid, history_of(raw)) for uid, raw in zip(uids, replies, strict=True))
        return {uid: first[0].fields.get("frontend", "") if first else "" for uid, first in firsts}

    return Batch([["XRANGE", log.names.request(uid), "-", "+", "COUNT", 1] for uid in uids], parse, any_type=True)


# Which requests live, and who reads them


def alive(log: LogContext, uids: Sequence[str]) -> Batch[set[str]]:
    def parse(replies: list[Any]) -> set[str]:
        return {uid for scores in replies for uid, score in zip(uids, scores, strict=True) if score is not None}

    return Batch([["ZMSCORE", log.names.live, *uids]] if uids else [], parse)


def living(log: LogContext) -> Command[list[str]]:
    """Return all requests that have not ended."""
    return Command(["ZRANGE", log.names.live, 0, -1], lambda uids: list(texts(uids)))


def living_of(log: LogContext, owners: Collection[str]) -> Steps[list[str]]:
    """Return the requests of *owners* that have not ended."""
    uids = yield from living(log)
    if not uids:
        return []
    accounts = yield from Command(["MGET", *map(log.names.account, uids)], lambda reply: texts_there(uids, reply))
    return [uid for uid, account in accounts.items() if account[3:].partition("\n")[0] in owners]


def overdue(log: LogContext, max_uids: int) -> Steps[list[str]]:
    """Return requests that are past their deadline and have not ended, by Redis' clock."""
    now_ms = yield from Command(["TIME"], clock_ms)
    words: Words = ["ZRANGEBYSCORE", log.names.live, "-inf", now_ms, "LIMIT", 0, max_uids]
    return (yield from Command(words, lambda uids: list(texts(uids))))


def read_by_others(log: LogContext, uids: Sequence[str]) -> Batch[set[str]]:
    """Return which of *uids* are read by another client than their sender."""
    commands = [["EXISTS", log.names.reader(uid)] for uid in uids]
    return Batch(commands, lambda replies: {uid for uid, exists in zip(uids, replies, strict=True) if exists})


def retire(log: LogContext, most_bytes: int) -> Script[int]:
    """Remove stored responses that have expired. If the rest takes more than *most_bytes*, remove the oldest ones, too;
    0: there is no limit. Return how many were removed before they had expired."""
    names, limits = log.names, log.limits
    return commit(
        "retire",
        int,
        {"live": names.live, "stored": names.stored, "stored_bytes": names.stored_bytes},
        most_bytes=most_bytes or 2**62,
        retention_ms=limits.retention_ms,
    )


# Dead letters


def dead_letters(log: LogContext, max_entries: int, *, before: str = "") -> Command[list[Entry]]:
    return Command(
        ["XREVRANGE", log.names.dead, f"({before}" if before else "+", "-", "COUNT", max_entries], letters_of
    )


def dead_letter(log: LogContext, entry_id: str) -> Command[Entry | None]:
    """Return the letter with this id; None if there is none."""
    return Command(["XRANGE", log.names.dead, entry_id, entry_id], lambda reply: next(iter(letters_of(reply)), None))


def drop_dead(log: LogContext, entry_id: str) -> Script[bool]:
    """Remove a letter; return False if it does not exist."""
    keys = {"dead": log.names.dead, "versions": log.names.copies}
    return commit("drop_dead", bool, keys, letter=entry_id, version_ms=COPY_TTL_MS)


def incarnation(_: LogContext) -> Batch[str]:
    """Return a text that changes when another server process holds the log, or one became its master again.

    It may know less than the one before had confirmed: it lacks the last second before a crash, or what a replica had
    not received. A master that was a replica in between has another replication id.
    """

    def parse(replies: list[Any]) -> str:
        server, replication = map(info_of, replies)
        return f"{server['run_id']} {replication['master_replid']}"

    return Batch([["INFO", "server"], ["INFO", "replication"]], parse)  # one INFO with two sections needs Redis 7
