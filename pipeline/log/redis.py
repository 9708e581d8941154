"""StreamLog in Redis Streams, on the commands of Redis 6.2: a client for the synchronous stages, one for asyncio (web).

Only scripts that are safe to run twice and plain reads go through the client that retries; what delivers entries (read,
take, claim) and what blocks has a connection of its own and is never retried: a lost reply may have delivered entries,
which `pending` finds. Nor is what builds on what was said before (step, produced): behind a broken connection the log
may be another one, which has not heard it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from pipeline.errors import LogError, LogReadOnly, LogUnavailable
from pipeline.events import End, StepCompleted, Submitted, Tokenized
from pipeline.log import calls
from pipeline.log.address import parse_address
from pipeline.log.protocol import (
    DeadLetter,
    Depth,
    Entry,
    Inbox,
    Lease,
    Occupancy,
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
from pipeline.log.snapshot import HistoryEnds, HistoryQuery, LogSnapshot, SlotState
from pipeline.names import DETOKENIZE, GENERATE, Names, slot_index, slot_name

T = TypeVar("T")
C = TypeVar("C", redis.Redis, redis.asyncio.Redis)

COMMAND_TIMEOUT_S = 3.0
"""With the one retry of a synchronous command well below the patience of the watchdog: an error is progress, too."""
LONGEST_WAIT_S = calls.LONGEST_BLOCK_MS / 1000 + 2


def _raw(client: C) -> C:
    """Return *client* with its own reply parsing switched off: `calls` knows what we sent."""
    client.response_callbacks.clear()
    return client


class RedisLog:
    """StreamLog over synchronous connections. One instance per thread."""

    def __init__(self, url: str, names: Names) -> None:
        self.url = url
        self.names = names
        address = parse_address(url)
        retry = Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.5), 1)
        self._redis = _raw(address.client(socket_timeout=COMMAND_TIMEOUT_S, retry=retry))
        self._once = _raw(address.client(socket_timeout=LONGEST_WAIT_S, retry=Retry(NoBackoff(), 0)))

    def close(self) -> None:
        self._redis.close()
        self._once.close()

    def another(self) -> RedisLog:
        """Return a log on connections of its own, for another thread."""
        return RedisLog(self.url, self.names)

    def _failed(self, error: redis.exceptions.RedisError) -> LogError:
        """Return our exception for *error*. After a failover another server may be found under the same address."""
        translated = calls.translate(error)
        if isinstance(translated, LogReadOnly):
            self._redis.connection_pool.disconnect()
            self._once.connection_pool.disconnect()
        return translated

    def _run(self, call: calls.Call[T], *, retry: bool = True) -> T:
        args = [len(call.keys), *call.keys, *call.args]
        client = self._redis if retry else self._once
        try:
            try:
                reply = client.execute_command("EVALSHA", calls.script_sha(call.script), *args)
            except redis.exceptions.NoScriptError:
                reply = client.execute_command("EVAL", calls.script_text(call.script), *args)
        except redis.exceptions.RedisError as error:
            raise self._failed(error) from error
        return call.parse(reply)

    def _do(self, *command: str | int | bytes) -> Any:
        try:
            return self._redis.execute_command(*command)
        except redis.exceptions.RedisError as error:
            raise self._failed(error) from error

    def _all(self, commands: Sequence[Sequence[str | int]]) -> list[Any]:
        """Return the replies to commands that are sent in one piece; None for one whose group is not there."""
        pipe = self._redis.pipeline(transaction=False)
        for words in commands:
            pipe.execute_command(*words)
        try:
            replies: list[Any] = pipe.execute(raise_on_error=False)
        except redis.exceptions.RedisError as error:
            raise self._failed(error) from error
        for index, reply in enumerate(replies):
            if isinstance(reply, redis.exceptions.RedisError):
                if not str(reply).startswith("NOGROUP"):
                    raise self._failed(reply) from reply
                replies[index] = None
        return replies

    def _block(self, *command: str | int) -> Any:
        try:
            return self._once.execute_command(*command)
        except redis.exceptions.RedisError as error:
            raise self._failed(error) from error

    # requests

    def submit(self, uid: str, event: Submitted, *, timeout_ms: int, retention_ms: int, max_queued: int) -> Submission:
        return self._run(
            calls.submit(
                self.names, uid, [event], timeout_ms=timeout_ms, retention_ms=retention_ms, max_queued=max_queued
            )
        ).submission

    def submit_once(
        self,
        uid: str,
        events: Sequence[Submitted],
        once: Once | None,
        *,
        timeout_ms: int,
        retention_ms: int,
        max_queued: int,
        quota: Quota | None = None,
    ) -> SubmittedOnce:
        def submit(minute: int) -> SubmittedOnce:
            call = calls.submit(
                self.names,
                uid,
                events,
                timeout_ms=timeout_ms,
                retention_ms=retention_ms,
                max_queued=max_queued,
                once=once,
                quota=quota,
                minute=minute,
            )
            return self._run(call)

        try:
            return submit(calls.this_minute())
        except calls.OtherMinute as other:
            return submit(other.minute)

    def tokenized(self, entry: Entry, event: Tokenized) -> bool:
        return self._run(calls.tokenized(self.names, entry, event))

    def end(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        retention_ms: int,
        consume: Entry | None = None,
        dead: DeadLetter | None = None,
    ) -> bool:
        return self._run(
            calls.end(self.names, uid, event, frontend=frontend, retention_ms=retention_ms, consume=consume, dead=dead)
        )

    def abandon(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        retention_ms: int,
        once: Once | None = None,
        attached: bool = False,
    ) -> bool:
        return self._run(
            calls.abandon(
                self.names, uid, event, frontend=frontend, retention_ms=retention_ms, once=once, attached=attached
            )
        )

    def reading(self, uids: Sequence[str], who: str) -> None:
        self._run(calls.reading(self.names, uids, who))

    def stop_reading(self, uid: str, who: str) -> None:
        self._do(*calls.stop_reading(self.names, uid, who))

    def histories(self, uids: Sequence[str], *, after: str = "") -> list[list[Entry]]:
        if not uids:
            return []
        pipe = self._redis.pipeline(transaction=False)
        for uid in uids:
            pipe.execute_command(*calls.history(self.names, uid, after))
        try:
            return [calls.entries_of(raw) for raw in pipe.execute()]
        except redis.exceptions.RedisError as error:
            raise self._failed(error) from error

    def alive(self, uids: Sequence[str]) -> set[str]:
        if not uids:
            return set()
        scores = self._do("ZMSCORE", self.names.live, *uids)
        return {uid for uid, score in zip(uids, scores, strict=True) if score is not None}

    # the janitor

    def overdue(self, max_uids: int) -> list[str]:
        seconds, microseconds = self._do("TIME")
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        uids = self._do("ZRANGEBYSCORE", self.names.live, "-inf", now_ms, "LIMIT", 0, max_uids)
        return [calls.as_text(uid) for uid in uids]

    def living(self) -> list[str]:
        return [calls.as_text(uid) for uid in self._do("ZRANGE", self.names.live, 0, -1)]

    def frontends_of(self, uids: Sequence[str]) -> dict[str, str]:
        pipe = self._redis.pipeline(transaction=False)
        for uid in uids:
            pipe.execute_command("XRANGE", self.names.request(uid), "-", "+", "COUNT", 1)
        try:
            firsts = [calls.entries_of(raw) for raw in pipe.execute()]
        except redis.exceptions.RedisError as error:
            raise self._failed(error) from error
        return {
            uid: first[0].fields.get("frontend", "") if first else "" for uid, first in zip(uids, firsts, strict=True)
        }

    def read_by_others(self, uids: Sequence[str]) -> set[str]:
        if not uids:
            return set()
        pipe = self._redis.pipeline(transaction=False)
        for uid in uids:
            pipe.execute_command("EXISTS", self.names.reader(uid))
        try:
            return {uid for uid, exists in zip(uids, pipe.execute(), strict=True) if exists}
        except redis.exceptions.RedisError as error:
            raise self._failed(error) from error

    # dead letters

    def dead_letters(self, max_entries: int, *, before: str = "") -> list[Entry]:
        return calls.entries_of(self._do(*calls.dead_letters(self.names, max_entries, before)))

    def drop_dead(self, entry_id: str) -> bool:
        return bool(self._do("XDEL", self.names.dead, entry_id))

    # after a time in which the log could not be reached

    def incarnation(self) -> str:
        found = re.search(r"^run_id:(\w+)", calls.as_text(self._do("INFO", "server")), re.MULTILINE)
        return found[1] if found else ""

    # engines

    def take(self, owner: Owner, max_entries: int, *, control_cursor: str) -> Taken:
        return self._run(calls.take(self.names, owner, max_entries, control_cursor), retry=False)

    def wait(self, cursor: str, control_cursor: str, *, block_ms: int) -> None:
        streams = [self.names.tokenized, self.names.control, cursor, control_cursor]
        self._block("XREAD", "COUNT", 1, *calls.blocking(block_ms), "STREAMS", *streams)

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
        return self._run(
            calls.step(self.names, owner, number, event, ended=ended, control_cursor=control_cursor, lease_ms=lease_ms),
            retry=False,
        )

    def flush(self, by: str) -> str:
        return self._run(calls.flush(self.names, by))

    # detokenizers

    def produced(
        self, owner: Owner, entry: Entry, engine: str, events: Sequence[Produced], *, retention_ms: int
    ) -> bool:
        call = calls.produced(self.names, owner, entry, engine, events, retention_ms=retention_ms)
        return self._run(call, retry=False)

    # consumer groups

    def backlog(self, inbox: Inbox) -> int:
        return int(self._do("XLEN", inbox.stream))

    def prepare(self, inbox: Inbox) -> None:
        self._run(calls.prepare(inbox))

    def read(self, inbox: Inbox, consumer: str, *, max_entries: int, block_ms: int) -> list[Entry]:
        group: list[str | int] = ["GROUP", inbox.group, consumer, "COUNT", max_entries, *calls.blocking(block_ms)]
        return calls.first_stream(self._block("XREADGROUP", *group, "STREAMS", inbox.stream, ">"))

    def pending(self, inbox: Inbox, consumer: str) -> list[Entry]:
        entries: list[Entry] = []
        first = "-"
        while True:
            items = self._do("XPENDING", inbox.stream, inbox.group, first, "+", 100, consumer)
            for raw_id, *_ in items:
                entry_id = calls.as_text(raw_id)
                found = calls.entries_of(self._do("XRANGE", inbox.stream, entry_id, entry_id))
                if not found:  # deleted while pending: nothing is left to do but to forget it
                    self._do("XACK", inbox.stream, inbox.group, entry_id)
                entries += found
            if len(items) < 100:
                return entries
            first = f"({calls.as_text(items[-1][0])}"

    def claim(self, inbox: Inbox, owner: Owner, max_entries: int) -> list[Entry]:
        entries: list[Entry] = []
        for other in self._holdings(inbox):
            if other != owner.slot and len(entries) < max_entries:
                call = calls.claim(self.names, inbox, owner, other, max_entries - len(entries))
                claimed = self._run(call, retry=False)
                entries += claimed
        return entries

    def claim_from(self, inbox: Inbox, owner: Owner, guest: Owner, max_entries: int) -> list[Entry]:
        return self._run(calls.claim(self.names, inbox, owner, guest.slot, max_entries, guest), retry=False)

    def retry(self, inbox: Inbox, owner: Owner, entry: Entry) -> int:
        return self._run(calls.retry(self.names, inbox, owner, entry), retry=False)

    def num_pending(self, inbox: Inbox, consumer: str) -> int:
        return self._holdings(inbox).get(consumer, 0)

    def forsaken(self, inbox: Inbox) -> list[str]:
        return [slot for slot in self._holdings(inbox) if self.lease(slot).is_free]

    def _holdings(self, inbox: Inbox) -> dict[str, int]:
        """Return how many entries each consumer has pending."""
        _, _, _, consumers = self._do("XPENDING", inbox.stream, inbox.group)
        return {calls.as_text(name): int(count) for name, count in consumers or ()}

    # slots

    def acquire(self, slot: str, nonce: str, lease_ms: int) -> Owner | None:
        return self._run(calls.acquire(self.names, slot, nonce, lease_ms))

    def announce(self, slot: str, status: str) -> bool:
        return self._run(calls.announce(self.names, slot, status))

    def unattended(self) -> list[str]:
        found: list[str] = []
        first = 0
        while True:
            engines = [slot_name(GENERATE, index) for index in range(first, first + calls.SLOTS_PER_LOOK)]
            detokenizers = [slot_name(DETOKENIZE, slot_index(engine)) for engine in engines]
            pipe = self._redis.pipeline(transaction=False)
            for engine in engines:
                pipe.execute_command("XLEN", self.names.steps(engine))
            pipe.execute_command("MGET", *(self.names.lease(slot) for slot in (*engines, *detokenizers)))
            try:
                *lengths, holders = pipe.execute()
            except redis.exceptions.RedisError as error:
                raise self._failed(error) from error
            living, attending = holders[: len(engines)], holders[len(engines) :]
            for engine, length, lives, attends in zip(engines, lengths, living, attending, strict=True):
                if (length or lives) and calls.lease_of(attends, 0).is_free:
                    found.append(engine)
            first += calls.SLOTS_PER_LOOK
            if not any(lengths) and not any(holders):
                return found

    def renew(self, owner: Owner, lease_ms: int, status: str) -> bool:
        return self._run(calls.renew(self.names, owner, lease_ms, status))

    def release(self, owner: Owner) -> bool:
        return self._run(calls.release(self.names, owner))

    def lease(self, slot: str) -> Lease:
        key = self.names.lease(slot)
        return calls.lease_of(self._do("GET", key), self._do("PTTL", key))

    def statuses(self, stage: str) -> dict[str, str]:
        found: dict[str, str] = {}
        first = 0
        while True:
            keys = calls.status_keys(self.names, stage, first)
            there = calls.texts_there(keys, self._do("MGET", *keys.values()))
            found |= there
            first += calls.SLOTS_PER_LOOK
            if not there:
                return found

    # frontends

    def open_replies(self, frontend: str) -> str:
        return self._run(calls.open_replies(self.names, frontend))

    def read_replies(self, frontend: str, after: str, *, block_ms: int) -> tuple[str, list[Reply]]:
        raw = self._block(*calls.read_replies(self.names, frontend, after, block_ms))
        entries = calls.first_stream(raw)
        return (entries[-1].id if entries else after), calls.replies_of(entries)

    # who shows the log

    def snapshot(self) -> LogSnapshot:
        """Return how the whole log stands now; the work does not grow with what it holds, but with the workers."""
        names = self.names
        shared = (Inbox.submitted(names), Inbox.tokenized(names))
        now, server, memory, num_dead, num_live, living, *more = self._all(calls.snapshot(names))
        newest = [calls.entries_of(raw) for raw in more[:2]]
        submitted, tokenized = (depth or Depth(0, 0) for depth in calls.depths_of(more[2:]))
        slots, steps, pending = self._slots()
        for reply in more[3::2]:
            pending |= calls.pending_of(reply)
        held: dict[str, str] = {}
        asked = [(inbox, entries) for inbox, entries in zip(shared, newest, strict=True) if entries]
        for (_, entries), reply in zip(asked, self._all([calls.holders(*each) for each in asked]), strict=True):
            held |= calls.held_of(entries, reply)
        return LogSnapshot(
            calls.clock_ms(now),
            calls.redis_facts(server, memory),
            Occupancy(submitted, tokenized, steps, num_dead, num_live),
            slots,
            pending,
            tuple(calls.as_text(uid) for uid in living),
            held,
        )

    def _slots(self) -> tuple[dict[str, SlotState], dict[str, Depth], dict[str, int]]:
        """Return every slot, what waits of the steps of each engine, and what each detokenizer has pending."""
        slots: dict[str, SlotState] = {}
        steps: dict[str, Depth] = {}
        pending: dict[str, int] = {}
        first = 0
        while True:
            looked_at = calls.slots_looked_at(first)
            engines = [slot_name(GENERATE, first + index) for index in range(calls.SLOTS_PER_LOOK)]
            of_slots = calls.slot_looks(self.names, looked_at)
            of_steps = [words for engine in engines for words in calls.depth(Inbox.steps(self.names, engine))]
            replies = self._all([*of_slots, *of_steps])
            seen = calls.slots_seen(looked_at, replies[: len(of_slots)])
            depths = zip(engines, calls.depths_of(replies[len(of_slots) :]), strict=True)
            waiting = {engine: depth for engine, depth in depths if depth is not None}
            for reply in replies[len(of_slots) + 1 :: 2]:
                pending |= calls.pending_of(reply)
            slots |= seen
            steps |= waiting
            first += calls.SLOTS_PER_LOOK
            if not seen and not waiting:
                return slots, steps, pending

    def peek(self, asks: Mapping[str, HistoryQuery]) -> dict[str, HistoryEnds]:
        """Return what is wanted of the histories uid -> ask."""
        commands = [words for uid, ask in asks.items() for words in calls.peek(self.names, uid, ask)]
        replies = self._all(commands) if commands else []
        return {uid: calls.peek_of(*replies[3 * index : 3 * index + 3]) for index, uid in enumerate(asks)}

    def requests(self, cursor: str, max_keys: int) -> tuple[str, list[str]]:
        """Return whose histories are among the next *max_keys* or so keys of the server, and how to go on: from `0` to
        `0` is all of them."""
        following, keys = self._do(*calls.scan_requests(self.names, cursor, max_keys))
        return calls.as_text(following), calls.uids_scanned(self.names, keys)


class AsyncRedisLog:
    """The part of the log that a frontend needs, for asyncio."""

    def __init__(self, url: str, names: Names) -> None:
        self.names = names
        address = parse_address(url)
        self._redis = _raw(
            address.bounded_async_client(
                max_connections=16,
                wait_s=COMMAND_TIMEOUT_S,
                socket_timeout=COMMAND_TIMEOUT_S,
                retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.01, cap=0.5), 3),
            )
        )
        # With a time-out the client waits in asyncio.wait_for, which on 3.11 can swallow a cancellation.
        self._blocking = _raw(address.async_client(socket_timeout=None, retry=AsyncRetry(NoBackoff(), 0)))

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)
        await self._blocking.aclose(close_connection_pool=True)

    async def _failed(self, error: redis.exceptions.RedisError) -> LogError:
        """As RedisLog._failed; only idle connections are closed, others are in use by other tasks."""
        translated = calls.translate(error)
        if isinstance(translated, LogReadOnly):
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            await self._blocking.connection_pool.disconnect(inuse_connections=False)
        return translated

    async def _run(self, call: calls.Call[T]) -> T:
        args = [len(call.keys), *call.keys, *call.args]
        try:
            try:
                reply = await self._redis.execute_command("EVALSHA", calls.script_sha(call.script), *args)
            except redis.exceptions.NoScriptError:
                reply = await self._redis.execute_command("EVAL", calls.script_text(call.script), *args)
        except redis.exceptions.RedisError as error:
            raise await self._failed(error) from error
        return call.parse(reply)

    async def submit(
        self, uid: str, event: Submitted, *, timeout_ms: int, retention_ms: int, max_queued: int
    ) -> Submission:
        """As StreamLog.submit."""
        done = await self._run(
            calls.submit(
                self.names, uid, [event], timeout_ms=timeout_ms, retention_ms=retention_ms, max_queued=max_queued
            )
        )
        return done.submission

    async def submit_once(
        self,
        uid: str,
        events: Sequence[Submitted],
        once: Once | None,
        *,
        timeout_ms: int,
        retention_ms: int,
        max_queued: int,
        quota: Quota | None = None,
    ) -> SubmittedOnce:
        """As StreamLog.submit_once."""

        async def submit(minute: int) -> SubmittedOnce:
            call = calls.submit(
                self.names,
                uid,
                events,
                timeout_ms=timeout_ms,
                retention_ms=retention_ms,
                max_queued=max_queued,
                once=once,
                quota=quota,
                minute=minute,
            )
            return await self._run(call)

        try:
            return await submit(calls.this_minute())
        except calls.OtherMinute as other:
            return await submit(other.minute)

    async def end(
        self, uid: str, event: End, *, frontend: str, retention_ms: int, dead: DeadLetter | None = None
    ) -> bool:
        """As StreamLog.end."""
        return await self._run(
            calls.end(self.names, uid, event, frontend=frontend, retention_ms=retention_ms, consume=None, dead=dead)
        )

    async def abandon(
        self,
        uid: str,
        event: End,
        *,
        frontend: str,
        retention_ms: int,
        once: Once | None = None,
        attached: bool = False,
    ) -> bool:
        """As StreamLog.abandon."""
        return await self._run(
            calls.abandon(
                self.names, uid, event, frontend=frontend, retention_ms=retention_ms, once=once, attached=attached
            )
        )

    async def reading(self, uids: Sequence[str], who: str) -> None:
        """As StreamLog.reading."""
        await self._run(calls.reading(self.names, uids, who))

    async def stop_reading(self, uid: str, who: str) -> None:
        """As StreamLog.stop_reading."""
        try:
            await self._redis.execute_command(*calls.stop_reading(self.names, uid, who))
        except redis.exceptions.RedisError as error:
            raise await self._failed(error) from error

    async def living(self) -> list[str]:
        """As StreamLog.living."""
        try:
            uids = await self._redis.execute_command("ZRANGE", self.names.live, 0, -1)
        except redis.exceptions.RedisError as error:
            raise await self._failed(error) from error
        return [calls.as_text(uid) for uid in uids]

    async def flush(self, by: str) -> str:
        """As StreamLog.flush."""
        return await self._run(calls.flush(self.names, by))

    async def entries(self, uid: str, ids: Sequence[str]) -> dict[str, Entry]:
        """Return those of the entries *ids* that the history of *uid* has."""
        pipe = self._redis.pipeline(transaction=False)
        for entry_id in ids:
            pipe.execute_command("XRANGE", self.names.request(uid), entry_id, entry_id)
        try:
            raw = await pipe.execute()
        except redis.exceptions.RedisError as error:
            raise await self._failed(error) from error
        return {entry.id: entry for found in raw for entry in calls.entries_of(found)}

    async def histories(self, cursors: Mapping[str, str], *, max_entries: int = 0) -> dict[str, list[Entry] | None]:
        """Return the entries of each history uid -> after id, the first *max_entries* where that is not 0; None where
        there is no history any more.
        """
        if not cursors:
            return {}
        pipe = self._redis.pipeline(transaction=False)
        for uid, after in cursors.items():
            pipe.execute_command("EXISTS", self.names.request(uid))
            pipe.execute_command(*calls.history(self.names, uid, after, max_entries))
        try:
            raw = await pipe.execute()
        except redis.exceptions.RedisError as error:
            raise await self._failed(error) from error
        return {
            uid: calls.entries_of(entries) if exists else None
            for uid, exists, entries in zip(cursors, raw[::2], raw[1::2], strict=True)
        }

    async def statuses(self, stage: str) -> dict[str, str]:
        """As StreamLog.statuses."""
        found: dict[str, str] = {}
        first = 0
        while True:
            keys = calls.status_keys(self.names, stage, first)
            try:
                values = await self._redis.execute_command("MGET", *keys.values())
            except redis.exceptions.RedisError as error:
                raise await self._failed(error) from error
            there = calls.texts_there(keys, values)
            found |= there
            first += calls.SLOTS_PER_LOOK
            if not there:
                return found

    async def occupancy(self) -> Occupancy:
        """Return how much the log holds."""
        names = self.names
        shared = (Inbox.submitted(names), Inbox.tokenized(names))
        num_dead, num_live, *replies = await self._all(
            [["XLEN", names.dead], ["ZCARD", names.live], *(words for inbox in shared for words in calls.depth(inbox))]
        )
        submitted, tokenized = (depth or Depth(0, 0) for depth in calls.depths_of(replies))
        steps: dict[str, Depth] = {}
        first = 0
        while True:
            engines = [slot_name(GENERATE, index) for index in range(first, first + calls.SLOTS_PER_LOOK)]
            commands = [words for engine in engines for words in calls.depth(Inbox.steps(names, engine))]
            depths = zip(engines, calls.depths_of(await self._all(commands)), strict=True)
            found = {engine: depth for engine, depth in depths if depth is not None}
            steps |= found
            first += calls.SLOTS_PER_LOOK
            if not found:
                return Occupancy(submitted, tokenized, steps, num_dead, num_live)

    async def _all(self, commands: Sequence[Sequence[str]]) -> list[Any]:
        """Return the replies to commands that are sent in one piece; None for one whose group is not there."""
        pipe = self._redis.pipeline(transaction=False)
        for words in commands:
            pipe.execute_command(*words)
        try:
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        except redis.exceptions.RedisError as error:
            raise await self._failed(error) from error
        for index, reply in enumerate(replies):
            if isinstance(reply, redis.exceptions.RedisError):
                if not str(reply).startswith("NOGROUP"):
                    raise await self._failed(reply) from reply
                replies[index] = None
        return replies

    async def open_replies(self, frontend: str) -> str:
        """As StreamLog.open_replies."""
        return await self._run(calls.open_replies(self.names, frontend))

    async def read_replies(self, frontend: str, after: str, *, block_ms: int) -> tuple[str, list[Reply]]:
        """As StreamLog.read_replies."""
        entries = calls.first_stream(await self._block(calls.read_replies(self.names, frontend, after, block_ms)))
        return (entries[-1].id if entries else after), calls.replies_of(entries)

    async def read_histories(self, cursors: Mapping[str, str], *, block_ms: int) -> dict[str, list[Entry]]:
        """Return what comes after the id in each of the histories uid -> id that has something, waiting for the first
        of it up to *block_ms*. One that is gone is waited for like one to come.
        """
        raw = await self._block(calls.read_histories(self.names, cursors, block_ms))
        uids = {self.names.request(uid): uid for uid in cursors}
        return {uids[key]: entries for key, entries in calls.streams_of(raw).items()}

    async def _block(self, command: Sequence[str | int]) -> Any:
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                return await self._blocking.execute_command(*command)
        except TimeoutError as error:
            raise LogUnavailable(f"no reply within {LONGEST_WAIT_S} s") from error
        except redis.exceptions.RedisError as error:
            raise await self._failed(error) from error
