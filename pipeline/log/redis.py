"""The log in Redis Streams, on the commands of Redis 6.2: RedisLog for the synchronous stages, AsyncRedisLog for web.

A method sends the operation of its name: `pipeline.log.operations` defines the operations, `pipeline.log.drivers` sends
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from pipeline.log.drivers import AsyncDriver, Driver
from pipeline.log.entries import Skipped, say_skipped
from pipeline.log.operation import LogContext, Operation, Steps, Words
from pipeline.log.operations import (
    archivers,
    detokenizers,
    engines,
    forgetting,
    frontends,
    groups,
    past,
    ranks,
    requests,
    slots,
    usage,
)
from pipeline.log.protocol import DEFAULT_LIMITS, Reply, RequestLimits
from pipeline.names import Names

P = ParamSpec("P")
T = TypeVar("T")


def _sent(
    operation: Callable[Concatenate[LogContext, P], Operation[T] | Steps[T]],
) -> Callable[Concatenate[RedisLog, P], T]:
    """Return the method that sends *operation* and returns the parsed reply."""

    @functools.wraps(operation)
    def method(log: RedisLog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return log._run(operation(log, *args, **kwargs))

    return method


def _awaited(
    operation: Callable[Concatenate[LogContext, P], Operation[T] | Steps[T]],
) -> Callable[Concatenate[AsyncRedisLog, P], Coroutine[Any, Any, T]]:
    """Return the same as `_sent`, for asyncio."""

    @functools.wraps(operation)
    async def method(log: AsyncRedisLog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await log._run(operation(log, *args, **kwargs))

    return method


class RedisLog:
    """All that a stage can do with the log: commits and reads; there is no plain append. One instance per thread.

    `False` from a commit means that it was done before. A commit is safe to run twice. If it is not, its operation sets
    `once`, and it is never sent again. The tests have another log, with which a contract suite compares this one.

    Every method raises LogUnavailable if the log cannot be reached, and GroupLost if it lost its data.
    """

    def __init__(self, url: str, names: Names, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.url = url
        self.names = names
        self.limits = limits
        self._driver = Driver(url, names.live)
        self._run = self._driver.run

    def close(self) -> None:
        self._driver.close()

    def another(self) -> RedisLog:
        """Return a log with connections of its own, for another thread."""
        return RedisLog(self.url, self.names, self.limits)

    # requests

    submit = _sent(requests.submit)
    tokenized = _sent(requests.tokenized)
    end = _sent(requests.end)
    abandon = _sent(requests.abandon)
    reading = _sent(requests.reading)
    stop_reading = _sent(requests.stop_reading)
    histories = _sent(requests.histories)
    alive = _sent(requests.alive)

    # usage

    users = _sent(usage.users)
    recount = _sent(usage.recount)
    usage = _sent(usage.usage)  # the last one, because it hides the module

    # the janitor, dead letters, and whether it is another server

    overdue = _sent(requests.overdue)
    living = _sent(requests.living)
    frontends_of = _sent(requests.frontends_of)
    read_by_others = _sent(requests.read_by_others)
    retire = _sent(requests.retire)
    dead_letters = _sent(requests.dead_letters)
    drop_dead = _sent(requests.drop_dead)
    incarnation = _sent(requests.incarnation)

    # engines and detokenizers

    take = _sent(engines.take)
    wait = _sent(engines.wait)
    step = _sent(engines.step)
    flush = _sent(engines.flush)
    produced = _sent(detokenizers.produced)
    journal = _sent(detokenizers.journal)

    # archivers

    open_archive = _sent(archivers.open_archive)
    close_archive = _sent(archivers.close_archive)
    archived = _sent(archivers.archived)
    num_unarchived = _sent(archivers.num_unarchived)
    begins = _sent(archivers.begins)
    is_recounted = _sent(archivers.is_recounted)
    recounted = _sent(archivers.recounted)

    # ranks

    form = _sent(ranks.form)
    joined = _sent(ranks.joined)

    # consumer groups

    backlog = _sent(groups.backlog)
    prepare = _sent(groups.prepare)
    read = _sent(groups.read)
    pending = _sent(groups.pending)
    claim = _sent(groups.claim)
    claim_from = _sent(groups.claim_from)
    retry = _sent(groups.retry)
    in_hand = _sent(groups.in_hand)
    num_pending = _sent(groups.num_pending)
    bury = _sent(groups.bury)
    leave = _sent(groups.leave)
    left = _sent(groups.left)
    forsaken = _sent(groups.forsaken)

    # slots

    acquire = _sent(slots.acquire)
    announce = _sent(slots.announce)
    unattended = _sent(slots.unattended)
    renew = _sent(slots.renew)
    release = _sent(slots.release)
    lease = _sent(slots.lease)
    statuses = _sent(slots.statuses)
    serving = _sent(slots.serving)
    last_engine = _sent(slots.last_engine)

    # frontends, and tools that show the log

    open_replies = _sent(frontends.open_replies)
    read_replies = _sent(frontends.read_replies)
    snapshot = _sent(frontends.snapshot)
    peek = _sent(frontends.peek)
    requests = _sent(frontends.requests)

    # requests of the past

    made_between = _sent(past.made_between)
    import_history = _sent(past.import_history)

    # erasing requests

    archive_id = _sent(forgetting.archive_id)
    at_work = _sent(forgetting.at_work)
    unread_steps = _sent(forgetting.unread_steps)
    told = _sent(forgetting.told)
    erase = _sent(forgetting.erase)
    purge = _sent(forgetting.purge)
    rewrite_files = _sent(forgetting.rewrite_files)
    are_rewritten = _sent(forgetting.are_rewritten)


class AsyncRedisLog:
    """The part of the log that a frontend needs, for asyncio. Methods do the same as RedisLog's."""

    def __init__(self, url: str, names: Names, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.url = url
        self.names = names
        self.limits = limits
        # A disk makes a submit wait for up to a second, a replica for less than a millisecond.
        self._driver = AsyncDriver(url, names.live, most_blocked=128 if limits.acks_disk else 8)
        self._run = self._driver.run

    async def close(self) -> None:
        await self._driver.close()

    def for_a_thread(self) -> RedisLog:
        """Return a log with connections of its own, for a thread."""
        return RedisLog(self.url, self.names, self.limits)

    async def follow_replies(
        self,
        frontend: str,
        after: str,
        take: Callable[[str, list[Reply]], bool],
        *,
        block_ms: int,
        skipped: Skipped = say_skipped,
    ) -> None:
        """Call `read_replies` again and again, until *take* returns False. *take* gets the result of each read. It is
        called as the bytes come, and must not wait. Raise the errors of the log, and of *take*."""
        first = frontends.read_replies(self, frontend, after, block_ms=block_ms, skipped=skipped)
        *words, cursor = first.words

        def then(reply: Any) -> Words | None:
            nonlocal cursor
            last, replies = first.parse(reply)
            if last != after:  # else nothing came: ids only grow
                cursor = last
            return (*words, cursor) if take(str(cursor), replies) else None

        await self._driver.repeat(first.words, then)

    submit = _awaited(requests.submit)
    end = _awaited(requests.end)
    abandon = _awaited(requests.abandon)
    reading = _awaited(requests.reading)
    stop_reading = _awaited(requests.stop_reading)
    living = _awaited(requests.living)
    entries = _awaited(requests.entries)
    histories = _awaited(requests.histories_there)
    read_histories = _awaited(requests.read_histories)
    flush = _awaited(engines.flush)
    statuses = _awaited(slots.statuses)
    remember_engine = _awaited(slots.remember_engine)
    last_engine = _awaited(slots.last_engine)
    drop_journals = _awaited(detokenizers.drop_journals)
    server = _awaited(frontends.server)
    used_bytes = _awaited(frontends.used_bytes)
    memory = _awaited(frontends.memory)
    occupancy = _awaited(frontends.occupancy)
    peek = _awaited(frontends.peek)
    lengths = _awaited(requests.lengths)
    expires_ms = _awaited(requests.expires_ms)
    erase = _awaited(forgetting.erase)
    journal = _awaited(detokenizers.journal)
    dead_letters = _awaited(requests.dead_letters)
    dead_letter = _awaited(requests.dead_letter)
    drop_dead = _awaited(requests.drop_dead)
    open_replies = _awaited(frontends.open_replies)
    read_replies = _awaited(frontends.read_replies)
    users = _awaited(usage.users)
    living_of = _awaited(requests.living_of)
    usage = _awaited(usage.usage)  # the last ones, because they hide modules
    requests = _awaited(frontends.requests)
