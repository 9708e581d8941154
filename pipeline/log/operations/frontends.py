"""What a frontend hears, and what `top`, `trace` and the metrics see of the whole log."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from pipeline.log.entries import REPLIES_TTL_MS, STATUS_TTL_MS, Skipped, replies_of, say_skipped
from pipeline.log.operation import Batch, Command, LogContext, Script, Steps, Words, blocking
from pipeline.log.operations.requests import wholes
from pipeline.log.operations.workers import SLOTS_PER_LOOK, slots_of
from pipeline.log.protocol import Depth, Entry, Inbox, Occupancy, Reply
from pipeline.log.replies import (
    as_text,
    clock_ms,
    depths_of,
    entries_of,
    first_stream,
    history_of,
    info_of,
    lease_of,
    pending_of,
    server_of,
    texts,
)
from pipeline.log.snapshot import HistoryEnds, HistoryQuery, LogSnapshot, RedisFacts, SlotState
from pipeline.names import ARCHIVE, GENERATE, JANITOR, SEAL, STAGES, TOKENIZED_ID, Names, rank_stage

LIVING_PER_LOOK = 1024
HELD_PER_LOOK = 128
"""A snapshot says who has the newest entries of a stream, so many of them."""
HEAD_ENTRIES = 8
"""A peek brings no more of what happened to a request before its first token."""


def open_replies(log: LogContext, frontend: str, *, read: str = "") -> Script[str]:
    return Script("open_replies", [log.names.replies(frontend)], [REPLIES_TTL_MS, read], as_text)


def read_replies(
    log: LogContext, frontend: str, after: str, *, block_ms: int, skipped: Skipped = say_skipped
) -> Command[tuple[str, list[Reply]]]:
    def parse(raw: Any) -> tuple[str, list[Reply]]:
        entries = first_stream(raw)
        return (entries[-1].id if entries else after), replies_of(entries, skipped)

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
    """Return how many steps wait of each engine that has or had a detokenizer."""
    depths = zip(engines, depths_of(replies), strict=True)
    return {engine: depth for engine, depth in depths if depth is not None}


def occupancy(log: LogContext) -> Steps[Occupancy]:
    """Return how much the log holds."""
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


def used_bytes(_: LogContext) -> Command[int]:
    """Return how much memory the server uses, with what others keep in it."""
    return Command(["INFO", "memory"], lambda reply: int(info_of(reply)["used_memory"]))


def snapshot(log: LogContext) -> Steps[LogSnapshot]:
    """Return how the whole log stands now. The work grows with the number of workers, not with what the log holds."""
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
    """Return the command that says who has *entries*, the newest ones of a stream, newest first."""
    return ["XPENDING", inbox.stream, inbox.group, entries[-1].id, "+", HELD_PER_LOOK]


def _held_of(entries: Sequence[Entry], reply: Sequence[Any] | None) -> dict[str, str]:
    """Return uid -> consumer from that reply; nothing where there is no such group."""
    uids = {entry.id: entry.fields.get("uid", "") for entry in entries}
    held = {as_text(entry_id): as_text(consumer) for entry_id, consumer, *_ in reply or ()}
    return {uids[entry_id]: consumer for entry_id, consumer in held.items() if entry_id in uids}


def _redis_facts(server: bytes, memory: bytes) -> RedisFacts:
    """Return what two sections of INFO say."""
    told = info_of(server + memory)
    return RedisFacts(
        *server_of(told),
        int(told.get("uptime_in_seconds", 0)),
        int(told.get("used_memory", 0)),
        int(told.get("maxmemory", 0)),
    )


def _slots(names: Names) -> Steps[tuple[dict[str, SlotState], dict[str, Depth], dict[str, int]]]:
    """Read every slot, what waits of the steps of each engine, and what each detokenizer has pending."""
    slots: dict[str, SlotState] = {}
    steps: dict[str, Depth] = {}
    pending: dict[str, int] = {}
    for first in count(0, SLOTS_PER_LOOK):
        looked_at = [slot for stage in (*STAGES, ARCHIVE, JANITOR) for slot in slots_of(stage, first)]
        engines = slots_of(GENERATE, first)
        of_slots = _slot_commands(names, looked_at)
        replies = yield from Batch([*of_slots, *_steps_depths(names, engines)], list)
        of_steps = replies[len(of_slots) :]
        seen, waiting = _slots_seen(looked_at, replies[: len(of_slots)]), _depths_there(engines, of_steps)
        for reply in of_steps[1::2]:
            pending |= pending_of(reply)
        slots |= seen
        steps |= waiting
        if not seen and not waiting:
            break
    slots |= yield from _rank_slots(names)
    return slots, steps, pending


def _rank_slots(names: Names) -> Steps[dict[str, SlotState]]:
    """Read the slots of the ranks of all engines, up to the first rank that never had one."""
    slots: dict[str, SlotState] = {}
    for rank in count():
        for first in count(0, SLOTS_PER_LOOK):
            looked_at = slots_of(rank_stage(rank), first)
            seen = _slots_seen(looked_at, (yield from Batch(_slot_commands(names, looked_at), list)))
            slots |= seen
            if not seen:
                break
        if first == 0:
            return slots
    return slots


def _slot_commands(names: Names, slots: Sequence[str]) -> list[Words]:
    return [
        ["TIME"],
        ["MGET", *map(names.owner, slots)],
        ["MGET", *map(names.lease, slots)],
        ["MGET", *map(names.status, slots)],
        *(["PTTL", names.lease(slot)] for slot in slots),
        *(["PTTL", names.status(slot)] for slot in slots),
    ]


def _slots_seen(slots: Sequence[str], replies: Sequence[Any]) -> dict[str, SlotState]:
    """Return the slots that somebody has held or speaks for, from the replies to those commands."""
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


def peek(log: LogContext, queries: Mapping[str, HistoryQuery]) -> Steps[dict[str, HistoryEnds]]:
    """Return the ends of the histories uid -> query."""
    commands = [words for uid, query in queries.items() for words in _peek(log.names.request(uid), query)]
    replies = yield from Batch(commands, list, any_type=True)
    ends = {uid: _ends_of(*replies[3 * index : 3 * index + 3]) for index, uid in enumerate(queries)}
    heads = yield from wholes(log.names, [(uid, each.head) for uid, each in ends.items()])
    return {
        uid: HistoryEnds(each.exists, tuple(head), each.last) if head is not None else HistoryEnds(False)
        for (uid, each), head in zip(ends.items(), heads, strict=True)
    }


def _peek(key: str, query: HistoryQuery) -> list[Words]:
    """Return the three commands that look at the ends of a history."""
    nothing = ["XRANGE", key, "+", "-"]  # Redis answers an empty interval with no entries
    after = f"({query.after}" if query.after else "-"
    # The interval ends with the last id of no tokens, `0-*`.
    return [
        ["EXISTS", key],
        nothing if query.after == SEAL else ["XRANGE", key, after, "0", "COUNT", HEAD_ENTRIES],
        ["XREVRANGE", key, "+", f"({TOKENIZED_ID}", "COUNT", 1] if query.last else nothing,
    ]


def _ends_of(exists: int, head: Sequence[Any] | None, last: Sequence[Any] | None) -> HistoryEnds:
    """Return the ends from those replies; None is what a key of another type brings."""
    lasts = history_of(last)
    return HistoryEnds(bool(exists), tuple(history_of(head)), lasts[0] if lasts else None)


def requests(log: LogContext, cursor: str, max_keys: int) -> Command[tuple[str, list[str]]]:
    """Return the next cursor, and the uids of the histories among the next *max_keys* or so keys of the server.

    To get all, begin with the cursor `0` and go on until `0` comes back.
    """
    prefix = log.names.request("")
    return scan(prefix, cursor, max_keys, lambda key: key.decode(errors="backslashreplace").removeprefix(prefix))


def scan(
    prefix: str, cursor: str, max_keys: int, named: Callable[[bytes], str] = as_text
) -> Command[tuple[str, list[str]]]:
    """As `requests`, of the keys that begin with *prefix*, as *named* returns them."""
    literal = re.sub(r"([*?\[\]\\^-])", r"\\\1", prefix)

    def parse(reply: Any) -> tuple[str, list[str]]:
        following, keys = reply
        return as_text(following), [*map(named, keys)]

    return Command(["SCAN", cursor, "MATCH", f"{literal}*", "COUNT", max_keys], parse)
