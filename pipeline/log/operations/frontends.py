"""Operations for frontends, and reads of the whole log for `top`, `trace` and the metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

from pipeline.log.entries import REPLIES_TTL_MS, STATUS_TTL_MS, Skipped, say_skipped, told_of
from pipeline.log.operation import Batch, Command, LogContext, Script, Steps, Words, blocking, commit
from pipeline.log.operations.requests import wholes
from pipeline.log.operations.slots import SLOTS_PER_LOOK, slots_of
from pipeline.log.protocol import Depth, Entry, Inbox, Occupancy, Reply
from pipeline.log.replies import (
    as_text,
    clock_ms,
    depths_of,
    entries_of,
    first_pairs,
    history_of,
    info_of,
    lease_of,
    pending_of,
    server_of,
    texts,
)
from pipeline.log.snapshot import HistoryEnds, HistoryQuery, LogSnapshot, RedisFacts, SlotState
from pipeline.names import (
    ARCHIVE,
    DETOKENIZE,
    GENERATE,
    JANITOR,
    SEAL,
    STAGES,
    TOKENIZED_ID,
    WAITING,
    Names,
    rank_stage,
)

LIVING_PER_LOOK = 1024
HELD_PER_LOOK = 128
"""Number of the newest entries of a stream whose consumers a snapshot has."""
HEAD_ENTRIES = 8
"""Largest number of entries that a peek returns from before a request's first token."""

_Found: TypeAlias = Mapping[str, tuple[bytes | None, bytes | None, bytes | None]]
"""Slot -> its owner, lease and status, as Redis has them."""


def open_replies(log: LogContext, frontend: str, *, read: str = "") -> Script[str]:
    """Create the replies stream, or keep it for 60 s more; return its last id.

    Drop the replies before the id *read*. Large ones would stay in a stream to which little is added.
    """
    keys = {"replies": log.names.replies(frontend)}
    return commit("open_replies", as_text, keys, ttl_ms=REPLIES_TTL_MS, read=read or None)


def read_replies(
    log: LogContext, frontend: str, after: str, *, block_ms: int, skipped: Skipped = say_skipped
) -> Command[tuple[str, list[Reply]]]:
    """Wait up to *block_ms* for replies after the id *after*; return them and the id for the next call.

    *skipped* is called with the id of an entry that cannot be read, and the reason; the default writes a log line.
    """

    def parse(raw: Any) -> tuple[str, list[Reply]]:
        pairs = first_pairs(raw)
        return (as_text(pairs[-1][0]) if pairs else after), told_of(pairs, skipped)

    words = ["XREAD", "COUNT", 100, *blocking(block_ms), "STREAMS", log.names.replies(frontend), after]
    return Command(words, parse, once=True)


# The whole log


def _depth(inbox: Inbox) -> list[Words]:
    """Return the two commands whose replies `depths_of` reads."""
    return [["XLEN", inbox.stream], ["XPENDING", inbox.stream, inbox.group]]


def _shared(names: Names) -> tuple[Inbox, Inbox]:
    return Inbox.submitted(names), Inbox.tokenized(names)


def _steps_depths(names: Names, engines: Sequence[str]) -> list[Words]:
    return [words for engine in engines for words in _depth(Inbox.steps(names, engine))]


def _depths_there(engines: Sequence[str], replies: Sequence[Any]) -> dict[str, Depth]:
    """Return how many steps wait, for each engine that has or had a detokenizer."""
    depths = zip(engines, depths_of(replies), strict=True)
    return {engine: depth for engine, depth in depths if depth is not None}


def occupancy(log: LogContext) -> Steps[Occupancy]:
    """Return the amount of work and data in the log."""
    depths = [words for inbox in _shared(log.names) for words in _depth(inbox)]
    num_dead, num_live, *replies = yield from Batch(
        [["XLEN", log.names.dead], ["ZCARD", log.names.live], *depths], list
    )
    submitted, tokenized = (depth or Depth(0, 0) for depth in depths_of(replies))
    steps: dict[str, Depth] = {}
    for first in count(0, SLOTS_PER_LOOK):
        engines = slots_of(GENERATE, first)
        found = _depths_there(engines, (yield from Batch(_steps_depths(log.names, engines), list)))
        steps |= found
        if not found:
            break
    return Occupancy(submitted, tokenized, steps, num_dead, num_live)


def server(_: LogContext) -> Command[tuple[str, str]]:
    """Return the name and version of the server."""
    return Command(["INFO", "server"], lambda reply: server_of(info_of(reply)))


def used_bytes(log: LogContext) -> Command[int]:
    """Return how much memory the server uses, including data of others."""
    asked = memory(log)
    return Command(asked.words, lambda reply: asked.parse(reply)[0])


def memory(_: LogContext) -> Command[tuple[int, int]]:
    """Return how much memory the server uses, and its limit; 0: none."""

    def parse(reply: Any) -> tuple[int, int]:
        info = info_of(reply)
        return int(info["used_memory"]), int(info["maxmemory"])

    return Command(["INFO", "memory"], parse)


def snapshot(log: LogContext) -> Steps[LogSnapshot]:
    """Return the state of the whole log. The work grows with the number of workers, not with the size of the log."""
    shared = _shared(log.names)
    newest: list[Words] = [["XREVRANGE", inbox.stream, "+", "-", "COUNT", HELD_PER_LOOK] for inbox in shared]
    commands: list[Words] = [
        ["TIME"],
        ["INFO", "server"],
        ["INFO", "memory"],
        ["XLEN", log.names.dead],
        ["ZCARD", log.names.live],
        ["ZREVRANGE", log.names.live, 0, LIVING_PER_LOOK - 1],
        *newest,
        *(words for inbox in shared for words in _depth(inbox)),
    ]
    now, server, memory, num_dead, num_live, living, *more = yield from Batch(commands, list)
    entries, depths = [entries_of(raw) for raw in more[:2]], more[2:]
    submitted, tokenized = (depth or Depth(0, 0) for depth in depths_of(depths))
    slots, steps, pending = yield from _slots(log.names)
    for reply in depths[1::2]:
        pending |= pending_of(reply)
    asked = [(inbox, some) for inbox, some in zip(shared, entries, strict=True) if some]
    replies = yield from Batch([_holders(*each) for each in asked], list)
    held: dict[str, str] = {}
    for (_, some), reply in zip(asked, replies, strict=True):
        held |= _held_of(some, reply)
    return LogSnapshot(
        clock_ms(now),
        _redis_facts(server, memory),
        Occupancy(submitted, tokenized, steps, num_dead, num_live),
        slots,
        pending,
        texts(living),
        held,
    )


def _holders(inbox: Inbox, entries: Sequence[Entry]) -> Words:
    """Return the command that reads the consumers of *entries*, the newest ones of a stream, newest first."""
    return ["XPENDING", inbox.stream, inbox.group, entries[-1].id, "+", HELD_PER_LOOK]


def _held_of(entries: Sequence[Entry], reply: Sequence[Any] | None) -> dict[str, str]:
    """Return uid -> consumer from that reply; {} if there is no such group."""
    uids = {entry.id: entry.fields.get("uid", "") for entry in entries}
    held = {as_text(entry_id): as_text(consumer) for entry_id, consumer, *_ in reply or ()}
    return {uids[entry_id]: who for entry_id, who in held.items() if entry_id in uids and who != WAITING}


def _redis_facts(server: bytes, memory: bytes) -> RedisFacts:
    """Return the facts in two sections of INFO."""
    told = info_of(server + memory)
    return RedisFacts(
        *server_of(told),
        int(told.get("uptime_in_seconds", 0)),
        int(told.get("used_memory", 0)),
        int(told.get("maxmemory", 0)),
    )


def _slots(names: Names) -> Steps[tuple[dict[str, SlotState], dict[str, Depth], dict[str, int]]]:
    """Read every slot, how many steps of each engine wait, and how many each detokenizer has pending."""
    slots: dict[str, SlotState] = {}
    steps: dict[str, Depth] = {}
    pending: dict[str, int] = {}
    for first in count(0, SLOTS_PER_LOOK):
        looked_at = [slot for stage in (*STAGES, ARCHIVE, JANITOR) for slot in slots_of(stage, first)]
        found = yield from _found(names, looked_at)
        if not found:
            break
        engines = slots_of(GENERATE, first)
        pairs = zip(engines, slots_of(DETOKENIZE, first), strict=True)
        engines = [engine for engine, detokenizer in pairs if engine in found or detokenizer in found]
        seen, of_steps = yield from _slots_seen(names, found, _steps_depths(names, engines))
        for reply in of_steps[1::2]:
            pending |= pending_of(reply)
        slots |= seen
        steps |= _depths_there(engines, of_steps)
    slots |= yield from _rank_slots(names)
    return slots, steps, pending


def _rank_slots(names: Names) -> Steps[dict[str, SlotState]]:
    """Read the slots of the ranks of all engines, up to the first rank that never had one."""
    slots: dict[str, SlotState] = {}
    for rank in count():
        for first in count(0, SLOTS_PER_LOOK):
            looked_at = slots_of(rank_stage(rank), first)
            found = yield from _found(names, looked_at)
            if not found:
                break
            seen, _ = yield from _slots_seen(names, found)
            slots |= seen
        if first == 0:
            return slots
    return slots


def _found(names: Names, slots: Sequence[str]) -> Steps[_Found]:
    """Return the owner, lease and status of those *slots* that were ever held or have a status."""
    keys = [["MGET", *map(kind, slots)] for kind in (names.owner, names.lease, names.status)]
    owners, leases, statuses = yield from Batch(keys, list)
    told = zip(slots, zip(owners, leases, statuses, strict=True), strict=True)
    return {slot: said for slot, said in told if said[0] is not None or said[2] is not None}


def _slots_seen(
    names: Names, found: _Found, more: Sequence[Words] = ()
) -> Steps[tuple[dict[str, SlotState], Sequence[Any]]]:
    """Return these slots, and the replies to *more* commands. The lifetimes of keys are read only for these slots,
    because most numbers of a stage are free."""
    ages: list[Words] = [["PTTL", key(slot)] for key in (names.lease, names.status) for slot in found]
    time_said, *replies = yield from Batch([["TIME"], *ages, *more], list)
    lease_ttls, status_ttls, others = replies[: len(found)], replies[len(found) : len(ages)], replies[len(ages) :]
    now_ms, seen = clock_ms(time_said), {}
    for (slot, (owner, holder, status)), lease_ms, status_ms in zip(
        found.items(), lease_ttls, status_ttls, strict=True
    ):
        seen[slot] = SlotState(
            as_text(owner or b""),
            lease_of(holder, lease_ms),
            as_text(status or b""),
            now_ms - (STATUS_TTL_MS - status_ms) if status is not None else 0,
        )
    return seen, others


def peek(log: LogContext, queries: Mapping[str, HistoryQuery]) -> Steps[dict[str, HistoryEnds]]:
    """Return the ends of the histories uid -> query."""
    commands = [words for uid, query in queries.items() for words in _peek(log.names.request(uid), query)]
    replies = iter((yield from Batch(commands, list, any_type=True)))
    ends = {uid: _ends_of(query, replies) for uid, query in queries.items()}
    heads = yield from wholes(log.names, [(uid, each.head) for uid, each in ends.items()])
    return {
        uid: HistoryEnds(each.exists, tuple(head), each.last) if head is not None else HistoryEnds(False)
        for (uid, each), head in zip(ends.items(), heads, strict=True)
    }


def _peek(key: str, query: HistoryQuery) -> list[Words]:
    """Return the commands that read the ends of a history: up to three, or one for a request that has ended."""
    after = f"({query.after}" if query.after else "-"
    # The interval ends with the last id before the first token, `0-*`.
    head: list[Words] = [["XRANGE", key, after, "0", "COUNT", HEAD_ENTRIES]] if query.after != SEAL else []
    last: list[Words] = [["XREVRANGE", key, "+", f"({TOKENIZED_ID}", "COUNT", 1]] if query.last else []
    return [["EXISTS", key], *head, *last]


def _ends_of(query: HistoryQuery, replies: Iterator[Any]) -> HistoryEnds:
    """Return the ends from the next replies, those to the commands of `_peek`."""
    exists = bool(next(replies))
    head = history_of(next(replies)) if query.after != SEAL else []
    last = history_of(next(replies)) if query.last else []
    return HistoryEnds(exists, tuple(head), last[0] if last else None)


def requests(log: LogContext, cursor: str, max_keys: int) -> Command[tuple[str, list[str]]]:
    """Return the next cursor, and the uids of the histories among the next *max_keys* or so keys of the server.

    To get all, begin with the cursor `0` and go on until `0` comes back.
    """
    prefix = log.names.request("")
    return scan(prefix, cursor, max_keys, lambda key: key.decode(errors="backslashreplace").removeprefix(prefix))


def scan(
    prefix: str, cursor: str, max_keys: int, named: Callable[[bytes], str] = as_text
) -> Command[tuple[str, list[str]]]:
    """Return the same as `requests` for the keys that begin with *prefix*, converted by *named*."""
    literal = re.sub(r"([*?\[\]\\^-])", r"\\\1", prefix)

    def parse(reply: Any) -> tuple[str, list[str]]:
        following, keys = reply
        return as_text(following), [*map(named, keys)]

    return Command(["SCAN", cursor, "MATCH", f"{literal}*", "COUNT", max_keys], parse)
