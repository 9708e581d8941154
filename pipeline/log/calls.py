"""What each commit sends to Redis and how its answer reads; no connection here, so that the synchronous and the
asynchronous client share it. The scripts themselves, with their contracts, are in commits/*.lua.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Generic, TypeVar

import orjson
import redis.exceptions as errors

from pipeline.errors import Fenced, GroupLost, LogError, LogFull, LogReadOnly, LogUnavailable
from pipeline.events import (
    Answered,
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
    Depth,
    Entry,
    Inbox,
    Lease,
    Once,
    Owner,
    Produced,
    Quota,
    Reply,
    StepCommitted,
    Submission,
    SubmittedOnce,
    Taken,
)
from pipeline.log.snapshot import HistoryEnds, HistoryQuery, RedisFacts, SlotState
from pipeline.names import (
    JANITOR,
    SEAL,
    STAGES,
    TOKENIZED_ID,
    Names,
    base_uid,
    sibling_uids,
    slot_name,
)

T = TypeVar("T")

REPLY_CAP = 200
"""MAXLEN ~ of a replies stream: an entry holds a whole step, and whoever is so far behind reads the histories."""
REPLIES_TTL_MS = 60_000
READER_TTL_MS = 60_000
DEAD_CAP = 10_000
"""MAXLEN ~ of the dead letters."""
DEAD_HISTORY_BYTES = 64 * 1024
"""What the copy of a history in a dead letter takes at most."""
STATUS_TTL_MS = 10_000
LONGEST_BLOCK_MS = 2000
"""No read waits longer, so that a stop, a lost group or a deleted stream is noticed soon."""
HISTORY_ENTRIES = 100
"""What a read that waits for histories brings of one of them at most."""
SLOTS_PER_LOOK = 16
"""How many status keys of a stage are read at once; the next ones too when one of these was there."""
MINUTE_MS = 60_000
LIVING_PER_LOOK = 1024
HELD_PER_LOOK = 128
"""Of how many of the newest entries of a stream a look says who has them."""
HEAD_ENTRIES = 8
"""What a peek brings at most of what happened to a request before its first token."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A script with its arguments, and what its reply means."""

    script: str
    keys: Sequence[str]
    args: Sequence[str | int]
    parse: Callable[[Any], T]


@functools.cache
def script_text(name: str) -> str:
    """Return the Lua text of a commit, with what the commits share before it."""
    folder = resources.files("pipeline.log") / "commits"
    return (folder / "lib.lua").read_text() + (folder / f"{name}.lua").read_text()


@functools.cache
def script_sha(name: str) -> str:
    """Return the hash by which EVALSHA knows the script."""
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


_IN_SCRIPT = re.compile(r"Error running script \(call to \w+\): @user_script: ?\d+: (@user_script: ?\d+: -)?")
"""What Redis 6.2 puts before an error inside a script, which makes each a plain ResponseError; 7 leaves it as it is."""


_FORBIDDEN = "The user executing the script can't"
"""What Redis says when a script may not do what it does; at the call itself it is NOPERM."""


def translate(error: errors.RedisError) -> LogError:
    """Return our exception for one of redis-py's."""
    text = _IN_SCRIPT.sub("", str(error))
    code = text.partition(" ")[0]
    if isinstance(error, errors.OutOfMemoryError) or code == "OOM":
        return LogFull(f"Redis is at its maxmemory and takes no new work: {text}")
    if isinstance(error, errors.ReadOnlyError) or code == "READONLY":
        return LogReadOnly(text)
    if isinstance(error, errors.ConnectionError | errors.TimeoutError):
        return LogUnavailable(text)
    if code in ("MISCONF", "BUSY"):
        return LogUnavailable(text)
    if isinstance(error, errors.NoPermissionError) or _FORBIDDEN in text:
        return LogUnavailable(f"{text}; give the user the rights that ops/redis/users.acl has for its role")
    if code in ("NOGROUP", "UNBLOCKED", "WRONGTYPE"):
        return GroupLost(text)
    return LogError(text)


def as_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def entries_of(raw: Sequence[Any]) -> list[Entry]:
    """Return the entries of a raw reply: [id, [name, value, ...]]. One deleted meanwhile has no fields: left out."""
    entries = []
    for entry_id, fields in raw:
        if fields:
            texts = [as_text(item) for item in fields]
            entries.append(Entry(as_text(entry_id), dict(zip(texts[::2], texts[1::2], strict=True))))
    return entries


def streams_of(raw: Any) -> dict[str, list[Entry]]:
    """Return key -> entries of a raw reply of XREAD or XREADGROUP: pairs in RESP2, a map in RESP3, none for none."""
    pairs = raw.items() if isinstance(raw, dict) else raw or ()
    return {as_text(key): entries_of(entries) for key, entries in pairs}


def first_stream(raw: Any) -> list[Entry]:
    """Return the entries of the only stream in such a reply."""
    return next(iter(streams_of(raw).values()), [])


def _flat(fields: Mapping[str, str]) -> list[str]:
    return [item for pair in fields.items() for item in pair]


def _unless_fenced(owner: Owner, reply: Any) -> Any:
    if reply == b"FENCED":
        raise Fenced(f"{owner.slot} has another owner than {owner}")
    return reply


def _texts(raw: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(as_text(item) for item in raw)


# Requests


class OtherMinute(LogUnavailable):
    """By Redis' clock it is another minute than those that a call could count in: to be sent again with that one."""

    def __init__(self, minute: int) -> None:
        super().__init__(f"the clocks of Redis and of this machine are minutes apart: Redis has minute {minute}")
        self.minute = minute


def this_minute() -> int:
    """Return the number of the minute by the clock of this machine."""
    return int(time.time() * 1000) // MINUTE_MS


def submitted_fields(event: Submitted, count: int) -> dict[str, str]:
    """Return the fields of a request of *count* that are submitted together; the commit adds the deadline."""
    fields = encode(event)
    for name in ("deadline_ms", "siblings"):
        fields.pop(name, None)
    return fields if count == 1 else fields | {"siblings": str(count)}


def submit(
    names: Names,
    uid: str,
    events: Sequence[Submitted],
    *,
    timeout_ms: int,
    retention_ms: int,
    max_queued: int,
    once: Once | None = None,
    quota: Quota | None = None,
    minute: int = 0,
) -> Call[SubmittedOnce]:
    """*minute* is about the one that Redis has, whose clock decides in which one a quota counts. Raises OtherMinute."""
    uids = sibling_uids(uid, len(events))
    digest, instead_of = (once.digest, once.instead_of) if once else ("", "")
    key = [names.idempotency(once.key)] if once else []
    counted: list[str] = []
    limits: list[str | int] = ["", "", ""]
    if quota is not None and (quota.requests_per_minute or quota.concurrent_requests):
        first = minute - 1
        counted = [names.running(quota.key), *(names.limit(quota.key, first + i) for i in range(3))]
        limits = [quota.requests_per_minute, quota.concurrent_requests, first]
    args = [uid, len(events), timeout_ms, retention_ms, max_queued, digest, instead_of, *limits]
    for sibling, event in zip(uids, events, strict=True):
        fields = submitted_fields(event, len(events))
        args += [sibling, event.frontend, 2 * len(fields), *_flat(fields)]

    def parse(reply: Any) -> SubmittedOnce:
        outcome, whose, number = reply
        if outcome == b"MINUTE":
            raise OtherMinute(number)
        return SubmittedOnce(Submission(as_text(outcome)), as_text(whose), number)

    return Call(
        "submit",
        [names.live, names.submitted, names.tokenized, *map(names.request, uids), *counted, *key],
        args,
        parse,
    )


def tokenized(names: Names, entry: Entry, event: Tokenized) -> Call[bool]:
    uid = entry.fields["uid"]
    return Call(
        "tokenized",
        [names.submitted, names.request(uid), names.tokenized],
        [entry.id, uid, entry.fields["frontend"], *_flat(encode(event))],
        lambda reply: as_text(reply) == "OK",
    )


def end(
    names: Names,
    uid: str,
    event: End,
    *,
    frontend: str,
    retention_ms: int,
    consume: Entry | None,
    dead: DeadLetter | None,
) -> Call[bool]:
    fields = {name: value for name, value in encode(event).items() if name != "n"}
    letter = _flat(letter_fields(dead)) if dead else []
    return Call(
        "end",
        [names.live, names.request(uid), names.replies(frontend), names.control, names.submitted, names.dead],
        [
            uid,
            retention_ms,
            REPLY_CAP,
            consume.id if consume else "",
            DEAD_CAP,
            DEAD_HISTORY_BYTES,
            len(letter),
            *letter,
            *_flat(fields),
        ],
        lambda reply: as_text(reply) == "OK",
    )


def abandon(
    names: Names,
    uid: str,
    event: End,
    *,
    frontend: str,
    retention_ms: int,
    once: Once | None,
    attached: bool,
) -> Call[bool]:
    fields = {name: value for name, value in encode(event).items() if name != "n"}
    key = [names.idempotency(once.key)] if once else []
    return Call(
        "abandon",
        [names.live, names.request(uid), names.replies(frontend), names.control, names.reader(uid), *key],
        [uid, base_uid(uid), retention_ms, REPLY_CAP, int(attached), *_flat(fields)],
        lambda reply: as_text(reply) == "OK",
    )


def reading(names: Names, uids: Sequence[str], who: str) -> Call[None]:
    keys = [key for uid in uids for key in (names.reader(uid), names.request(uid))]
    return Call("reading", keys, [who, READER_TTL_MS], lambda _: None)


def stop_reading(names: Names, uid: str, who: str) -> list[str]:
    """Return the command that takes back what `reading` said."""
    return ["SREM", names.reader(uid), who]


def letter_fields(dead: DeadLetter) -> dict[str, str]:
    """Return what a dead letter says; uid, moment and history are added where it is committed."""
    entry = orjson.dumps(dict(dead.entry)).decode()
    return {"stage": dead.stage, "deaths": str(dead.deaths), "error": dead.error, "entry": entry}


def dead_letters(names: Names, max_entries: int, before: str) -> list[str | int]:
    """Return the command that reads dead letters, the newest first."""
    return ["XREVRANGE", names.dead, f"({before}" if before else "+", "-", "COUNT", max_entries]


def history(names: Names, uid: str, after: str, max_entries: int = 0) -> list[str | int]:
    """Return the command that reads a history from its start, or after the id *after*; 0 entries are all."""
    count: list[str | int] = ["COUNT", max_entries] if max_entries else []
    if after == SEAL:  # Redis refuses an interval that begins after the largest id; this one is empty
        return ["XRANGE", names.request(uid), "+", "-"]
    return ["XRANGE", names.request(uid), f"({after}" if after else "-", "+", *count]


def read_histories(names: Names, cursors: Mapping[str, str], block_ms: int) -> list[str | int]:
    """Return the command that waits for what comes after the ids in any of the histories uid -> id."""
    keys = [names.request(uid) for uid in cursors]
    return ["XREAD", "COUNT", HISTORY_ENTRIES, *blocking(block_ms), "STREAMS", *keys, *cursors.values()]


# Engines


def take(names: Names, owner: Owner, max_entries: int, control_cursor: str) -> Call[Taken]:
    def parse(reply: Any) -> Taken:
        entries, cursor, ended, control, flush = _unless_fenced(owner, reply)
        return Taken(tuple(entries_of(entries)), as_text(cursor), _texts(ended), as_text(control), as_text(flush))

    return Call(
        "take",
        [names.owner(owner.slot), names.tokenized, names.control],
        [str(owner), owner.slot, max_entries, control_cursor],
        parse,
    )


def step(
    names: Names,
    owner: Owner,
    number: int,
    event: StepCompleted,
    *,
    ended: Sequence[str],
    control_cursor: str,
    lease_ms: int,
) -> Call[StepCommitted]:
    def parse(reply: Any) -> StepCommitted:
        length, newest, uids, cursor, flush = _unless_fenced(owner, reply)
        return StepCommitted(length, as_text(newest), _texts(uids), as_text(cursor), as_text(flush))

    slot = owner.slot
    return Call(
        "step",
        [names.owner(slot), names.lease(slot), names.steps(slot), names.tokenized, names.control],
        [
            str(owner),
            lease_ms,
            f"{owner.epoch}-{number}",
            control_cursor,
            len(ended),
            *ended,
            *_flat(encode(event)),
        ],
        parse,
    )


def flush(names: Names, by: str) -> Call[str]:
    return Call("flush", [names.control], [by], as_text)


# Detokenizers


def produced(
    names: Names, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced], *, retention_ms: int
) -> Call[bool]:
    keys = [names.owner(owner.slot), names.steps(engine), names.live, names.control]
    index: dict[str, int] = {}

    def key_index(key: str) -> int:
        if key not in index:
            keys.append(key)
            index[key] = len(keys)
        return index[key]

    writes: list[str | int] = []
    for item in events:
        fields = _flat(encode(item.event))
        history = key_index(names.request(item.uid))
        writes += [history, item.entry_id, item.uid, int(item.tell_engine), len(fields), *fields]
    payloads: list[str | int] = []
    for frontend, payload in reply_payloads(events).items():
        payloads += [key_index(names.replies(frontend)), payload]

    def parse(reply: Any) -> bool:
        return bool(_unless_fenced(owner, reply) == b"OK")

    return Call(
        "produced",
        keys,
        [str(owner), entry.id, retention_ms, REPLY_CAP, len(payloads) // 2, *payloads, *writes],
        parse,
    )


def reply_payloads(events: Sequence[Produced]) -> dict[str, str]:
    """Return frontend -> what it hears of *events*, in JSON; marks are not for clients."""
    replies: dict[str, list[dict[str, Any]]] = {}
    for item in events:
        if isinstance(item.event, TokensProduced | End):
            said = {"uid": item.uid, "id": item.entry_id, "n": item.n, "event": as_plain(item.event)}
            replies.setdefault(item.frontend, []).append(said)
    return {frontend: orjson.dumps(items).decode() for frontend, items in replies.items()}


_REPLY_EVENTS: Mapping[str, type[TokensProduced | End]] = {
    "tokens": TokensProduced,
    "finished": Finished,
    "failed": Failed,
    "cancelled": Cancelled,
    "answered": Answered,
}


def replies_of(entries: Sequence[Entry]) -> list[Reply]:
    """Return what entries of a replies stream say: a list in JSON from `produced`, plain fields from `end`."""
    replies = []
    for entry in entries:
        if "events" in entry.fields:
            for item in orjson.loads(entry.fields["events"]):
                event = _REPLY_EVENTS[item["event"]["kind"]].model_validate(item["event"])
                replies.append(Reply(item["uid"], item["id"], item["n"], event))
        else:
            fields = dict(entry.fields)
            uid = fields.pop("uid")
            ended = decode(fields)
            assert isinstance(ended, End)
            replies.append(Reply(uid, SEAL, ended.n, ended))
    return replies


def open_replies(names: Names, frontend: str) -> Call[str]:
    return Call("open_replies", [names.replies(frontend)], [REPLIES_TTL_MS], as_text)


def read_replies(names: Names, frontend: str, after: str, block_ms: int) -> list[str | int]:
    """Return the command that waits for what comes after the id *after*."""
    return ["XREAD", "COUNT", 100, *blocking(block_ms), "STREAMS", names.replies(frontend), after]


def blocking(block_ms: int) -> list[str | int]:
    """Return the words that make a read wait; none for 0, which Redis takes as forever."""
    return ["BLOCK", min(block_ms, LONGEST_BLOCK_MS)] if block_ms > 0 else []


# Consumer groups


def prepare(inbox: Inbox) -> Call[None]:
    return Call("prepare", [inbox.stream], [inbox.group], lambda _: None)


def depth(inbox: Inbox) -> list[list[str]]:
    """Return the two commands that say how much a stream holds for its group."""
    return [["XLEN", inbox.stream], ["XPENDING", inbox.stream, inbox.group]]


def depths_of(replies: Sequence[Any]) -> list[Depth | None]:
    """Return what such commands were answered, one stream after the other; None where there is no such group."""
    pairs = zip(replies[::2], replies[1::2], strict=True)
    return [None if pending is None else Depth(length, pending[0]) for length, pending in pairs]


# Slots


def acquire(names: Names, slot: str, nonce: str, lease_ms: int) -> Call[Owner | None]:
    return Call(
        "acquire",
        [names.lease(slot), names.owner(slot)],
        [nonce, lease_ms],
        lambda epoch: Owner(slot, epoch, nonce) if epoch else None,
    )


def announce(names: Names, slot: str, status: str) -> Call[bool]:
    return Call("announce", [names.lease(slot), names.status(slot)], [status, STATUS_TTL_MS], bool)


def renew(names: Names, owner: Owner, lease_ms: int, status: str) -> Call[bool]:
    slot = owner.slot
    return Call(
        "renew",
        [names.lease(slot), names.owner(slot), names.status(slot)],
        [str(owner), lease_ms, status, STATUS_TTL_MS],
        bool,
    )


def release(names: Names, owner: Owner) -> Call[bool]:
    return Call("release", [names.lease(owner.slot), names.status(owner.slot)], [str(owner)], bool)


def claim(
    names: Names, inbox: Inbox, owner: Owner, other: str, max_entries: int, guest: Owner | None = None
) -> Call[list[Entry]]:
    return Call(
        "claim",
        [names.owner(owner.slot), names.lease(other), names.owner(other), inbox.stream],
        [str(owner), inbox.group, owner.slot, other, max_entries, str(guest or "")],
        lambda reply: entries_of(_unless_fenced(owner, reply)),
    )


def retry(names: Names, inbox: Inbox, owner: Owner, entry: Entry) -> Call[int]:
    return Call(
        "retry",
        [names.owner(owner.slot), inbox.stream],
        [str(owner), inbox.group, owner.slot, entry.id],
        lambda reply: int(_unless_fenced(owner, reply)),
    )


def lease_of(holder: bytes | None, ttl_ms: int) -> Lease:
    """Return the lease that GET and PTTL of its key say."""
    return Lease(as_text(holder), max(ttl_ms, 0)) if holder is not None else Lease("", 0)


def status_keys(names: Names, stage: str, first: int) -> dict[str, str]:
    """Return slot -> key for the next slots of *stage* to look at."""
    slots = [slot_name(stage, index) for index in range(first, first + SLOTS_PER_LOOK)]
    return {slot: names.status(slot) for slot in slots}


def texts_there(keys: Mapping[str, str], values: Sequence[bytes | None]) -> dict[str, str]:
    """Return slot -> text of the keys that exist."""
    return {slot: as_text(value) for slot, value in zip(keys, values, strict=True) if value is not None}


# A look at the whole log


def snapshot(names: Names) -> list[list[str | int]]:
    """Return the commands that say how the log stands, but for its slots."""
    shared = (Inbox.submitted(names), Inbox.tokenized(names))
    newest: list[list[str | int]] = [["XREVRANGE", each.stream, "+", "-", "COUNT", HELD_PER_LOOK] for each in shared]
    depths: list[list[str | int]] = [[*words] for each in shared for words in depth(each)]
    return [
        ["TIME"],
        ["INFO", "server"],
        ["INFO", "memory"],
        ["XLEN", names.dead],
        ["ZCARD", names.live],
        ["ZREVRANGE", names.live, 0, LIVING_PER_LOOK - 1],
        *newest,
        *depths,
    ]


def holders(inbox: Inbox, entries: Sequence[Entry]) -> list[str | int]:
    """Return the command that says who has which of *entries*, the newest ones of a stream, newest first."""
    return ["XPENDING", inbox.stream, inbox.group, entries[-1].id, "+", HELD_PER_LOOK]


def held_of(entries: Sequence[Entry], reply: Sequence[Any] | None) -> dict[str, str]:
    """Return uid -> consumer, as it was answered; nothing where there is no such group."""
    uids = {entry.id: entry.fields.get("uid", "") for entry in entries}
    held = {as_text(entry_id): as_text(consumer) for entry_id, consumer, *_ in reply or ()}
    return {uids[entry_id]: consumer for entry_id, consumer in held.items() if entry_id in uids}


def pending_of(reply: Sequence[Any] | None) -> dict[str, int]:
    """Return consumer -> how many entries it has pending, from what XPENDING of a group says."""
    return {as_text(name): int(count) for name, count in (reply[3] if reply else None) or ()}


def redis_facts(server: bytes, memory: bytes) -> RedisFacts:
    """Return what two sections of INFO say."""
    lines = (as_text(server) + as_text(memory)).splitlines()
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    return RedisFacts(
        told.get("redis_version", "?"),
        int(told.get("uptime_in_seconds", 0)),
        int(told.get("used_memory", 0)),
        int(told.get("maxmemory", 0)),
    )


def clock_ms(reply: Sequence[Any]) -> int:
    """Return the moment that TIME says."""
    seconds, microseconds = reply
    return int(seconds) * 1000 + int(microseconds) // 1000


def slots_looked_at(first: int) -> list[str]:
    """Return the slots of one piece of a look: some of each stage."""
    return [slot_name(stage, first + index) for stage in (*STAGES, JANITOR) for index in range(SLOTS_PER_LOOK)]


def slot_looks(names: Names, slots: Sequence[str]) -> list[list[str]]:
    """Return the commands that say how *slots* stand."""
    return [
        ["TIME"],
        ["MGET", *map(names.owner, slots)],
        ["MGET", *map(names.lease, slots)],
        ["MGET", *map(names.status, slots)],
        *(["PTTL", names.lease(slot)] for slot in slots),
        *(["PTTL", names.status(slot)] for slot in slots),
    ]


def slots_seen(slots: Sequence[str], replies: Sequence[Any]) -> dict[str, SlotState]:
    """Return what such commands were answered, of the slots that somebody held or speaks for."""
    time_said, owners, leases, statuses, *ttls = replies
    now_ms, seen = clock_ms(time_said), {}
    for slot, owner, holder, status, lease_ms, status_ms in zip(
        slots, owners, leases, statuses, ttls[: len(slots)], ttls[len(slots) :], strict=True
    ):
        if owner is not None or status is not None:
            seen[slot] = SlotState(
                as_text(owner or b""),
                lease_of(holder, lease_ms),
                as_text(status or b""),
                now_ms - (STATUS_TTL_MS - status_ms) if status is not None else 0,
            )
    return seen


def peek(names: Names, uid: str, ask: HistoryQuery) -> list[list[str | int]]:
    """Return the three commands that look at the ends of a history."""
    key = names.request(uid)
    nothing: list[str | int] = ["XRANGE", key, "+", "-"]  # Redis answers an interval that is none with no entries
    after = f"({ask.after}" if ask.after else "-"
    # The interval ends with the last id of no tokens, `0-*`.
    return [
        ["EXISTS", key],
        nothing if ask.after == SEAL else ["XRANGE", key, after, "0", "COUNT", HEAD_ENTRIES],
        ["XREVRANGE", key, "+", f"({TOKENIZED_ID}", "COUNT", 1] if ask.last else nothing,
    ]


def peek_of(exists: int, head: Sequence[Any], last: Sequence[Any]) -> HistoryEnds:
    """Return what they were answered. A history that is not text is one of an entry of no kind."""
    try:
        lasts = entries_of(last)
        return HistoryEnds(bool(exists), tuple(entries_of(head)), lasts[0] if lasts else None)
    except UnicodeDecodeError:
        return HistoryEnds(bool(exists), (Entry("0-0", {}),))


def scan_requests(names: Names, cursor: str, max_keys: int) -> list[str | int]:
    """Return the command that looks for histories among the next *max_keys* keys."""
    literal = re.sub(r"([*?\[\]\\^-])", r"\\\1", names.request(""))
    return ["SCAN", cursor, "MATCH", f"{literal}*", "COUNT", max_keys]


def uids_scanned(names: Names, keys: Sequence[bytes]) -> list[str]:
    """Return whose histories have such keys."""
    return [key.decode(errors="backslashreplace").removeprefix(names.request("")) for key in keys]
