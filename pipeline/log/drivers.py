"""Sends operations to Redis: one driver for threads, one for asyncio. An error of redis-py becomes one of ours.

Each driver has two sets of connections. Operations that are safe to run twice go through the client that retries.
Others have connections of their own and are never sent again. They deliver entries, block, or build on what was
committed before: a lost reply may have delivered entries, and after a broken connection the log may be another one.
Every token needs several of these, so they keep their connections: redis-py's pool takes longer than Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Final, TypeVar

import redis
import redis.asyncio
import redis.exceptions as errors
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from pipeline.errors import GroupLost, LogError, LogFull, LogNotThere, LogReadOnly, LogUnavailable
from pipeline.log.address import parse_address
from pipeline.log.operation import (
    LONGEST_BLOCK_MS,
    Batch,
    Command,
    Computation,
    Operation,
    Script,
    Steps,
    Words,
    script_sha,
    script_text,
)
from pipeline.log.repeated import Repeated, writer_of

try:
    import hiredis
except ImportError:  # redis-py works without it, too
    hiredis = None  # type: ignore[assignment]

T = TypeVar("T")
C = TypeVar("C", redis.Redis, redis.asyncio.Redis)

COMMAND_TIMEOUT_S: Final = 3.0
"""Timeout of a command. Even with the one retry it is far below the watchdog's patience: an error is progress, too."""
PLACE_WAIT_S: Final = 1.0
"""How long a commit waits for a connection while as many as may wait for acknowledgements."""
LONGEST_WAIT_S: Final = LONGEST_BLOCK_MS / 1000 + 2
FRESH_S: Final = 0.1
"""Age of the last reply up to which a connection is used unchecked: it may break during any command."""


def _raw(client: C) -> C:
    """Return *client* without redis-py's own parsing of replies: each operation parses its reply."""
    client.response_callbacks.clear()
    return client


class Driver:
    """Sends operations over synchronous connections. One instance per thread."""

    def __init__(self, url: str, key: str) -> None:
        """*key*: one of the log's, by which the nodes of a cluster know which of them has the log."""
        address = parse_address(url)
        retry = Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.5), 1)
        self._retrying = _raw(address.client(key, socket_timeout=COMMAND_TIMEOUT_S, retry=retry))
        self._once = _raw(address.client(key, socket_timeout=LONGEST_WAIT_S, retry=Retry(NoBackoff(), 0)))
        self._kept: redis.Connection | None = None
        """Connection of `_once`, from its first use on."""
        self._replied_s = 0.0
        """Time of its last reply."""

    def close(self) -> None:
        self._retrying.close()
        self._once.close()

    def run(self, asked: Operation[T] | Steps[T]) -> T:
        """Send an operation, or several in steps, and return the parsed result. Raise the errors of the log."""
        if not isinstance(asked, Generator):  # the common case: each token has one
            return asked.parse(self._send(asked))
        steps, reply = asked, None
        while True:
            try:
                operation = steps.send(reply)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # typeshed leaves the value open
            reply = self._send(operation)

    def _send(self, operation: Operation[Any] | Computation[Any]) -> Any:
        try:
            if isinstance(operation, Computation):
                return operation.compute()
            if isinstance(operation, Batch):
                return self._send_batch(operation)
            send = self._send_once if operation.once else self._retrying.execute_command
            if isinstance(operation, Command):
                return send(*operation.words)
            if operation.then:
                send = functools.partial(self._send_both, operation.then)
            args = _script_args(operation)
            try:
                return send("EVALSHA", script_sha(operation.name), *args)
            except errors.NoScriptError:
                return send("EVAL", script_text(operation.name), *args)
        except errors.RedisError as error:
            raise self._failed(error) from error

    def _send_once(self, *words: str | int | bytes) -> Any:
        is_fresh = time.monotonic() - self._replied_s <= FRESH_S
        if self._kept is None:
            self._kept = self._once.connection_pool.get_connection()
        elif not is_fresh:
            self._kept.connect()  # if it is not
            if not _is_fit(self._kept):
                self._kept.disconnect()
                # The caller must know: the next connection may lead to a server that lacks the last commits.
                raise errors.ConnectionError("the server has closed the connection")
        self._kept.send_packed_command(_packed(self._kept, words))
        reply = self._kept.read_response(disconnect_on_error=True)  # redis-py does not, where Sentinels are asked
        self._replied_s = time.monotonic()
        return reply

    def _send_both(self, then: Words, *words: str | int | bytes) -> list[Any]:
        pipe = self._retrying.pipeline(transaction=False)
        pipe.execute_command(*words)
        pipe.execute_command(*then)
        return _without_errors(pipe.execute(raise_on_error=False))

    def _send_batch(self, batch: Batch[Any]) -> list[Any]:
        pipe = self._retrying.pipeline(transaction=False)
        for words in batch.commands:
            pipe.execute_command(*words)
        return _without_missing(pipe.execute(raise_on_error=False), batch)

    def _failed(self, error: errors.RedisError) -> LogError:
        """Return our exception for *error*. After a failover, the same address may lead to another server."""
        translated = translate(error)
        if isinstance(translated, LogReadOnly):
            self._retrying.connection_pool.disconnect()
            self._once.connection_pool.disconnect()
        return translated


def _packed(connection: redis.Connection, words: Sequence[Any]) -> Sequence[bytes]:
    """Return a command in Redis' format. redis-py does the same, but more slowly: it checks the type of each word."""
    return connection.pack_command(*words) if hiredis is None else (hiredis.pack_command(tuple(words)),)


def _is_fit(connection: redis.Connection) -> bool:
    """Return whether the server has neither closed *connection* nor sent unexpected data."""
    try:
        return not connection.can_read()
    except (errors.ConnectionError, OSError):
        return False


class AsyncDriver:
    """Sends operations over connections of asyncio. Any number of tasks may share one driver."""

    def __init__(self, url: str, key: str, *, most_blocked: int = 8) -> None:
        """See Driver. *most_blocked*: most connections for scripts with a `then`."""
        address = parse_address(url)
        self._retrying = _raw(
            address.bounded_async_client(
                key,
                max_connections=16,
                wait_s=COMMAND_TIMEOUT_S,
                socket_timeout=COMMAND_TIMEOUT_S,
                retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.01, cap=0.5), 3),
            )
        )
        self._blocked = _raw(
            address.bounded_async_client(
                key,
                max_connections=most_blocked,
                wait_s=PLACE_WAIT_S,
                socket_timeout=LONGEST_WAIT_S,
                retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.01, cap=0.5), 1),
            )
        )
        # With a timeout the client waits in asyncio.wait_for, which on 3.11 can swallow a cancellation.
        self._once = _raw(address.async_client(key, socket_timeout=None, retry=AsyncRetry(NoBackoff(), 0)))
        self._idle: list[redis.asyncio.Connection] = []
        """Connections of `_once` that no task uses."""

    async def close(self) -> None:
        await self._retrying.aclose(close_connection_pool=True)
        await self._blocked.aclose(close_connection_pool=True)
        await self._once.aclose(close_connection_pool=True)

    async def run(self, asked: Operation[T] | Steps[T]) -> T:
        """See Driver.run."""
        steps, reply = iter(asked), None
        while True:
            try:
                operation = steps.send(reply)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # as in Driver.run
            reply = await self._send(operation)

    async def _send(self, operation: Operation[Any] | Computation[Any]) -> Any:
        try:
            if isinstance(operation, Computation):
                return await asyncio.to_thread(operation.compute)
            if isinstance(operation, Batch):
                return await self._send_batch(operation)
            send = self._send_once if operation.once else self._retrying.execute_command
            if isinstance(operation, Command):
                return await send(*operation.words)
            if operation.then:
                send = functools.partial(self._send_both, operation.then)
            args = _script_args(operation)
            try:
                return await send("EVALSHA", script_sha(operation.name), *args)
            except errors.NoScriptError:
                return await send("EVAL", script_text(operation.name), *args)
        except errors.RedisError as error:
            raise await self._failed(error) from error

    async def _send_once(self, *words: str | int | bytes) -> Any:
        try:
            async with asyncio.timeout(LONGEST_WAIT_S), self._connection() as connection:
                await connection.send_command(*words)
                return await connection.read_response()
        except TimeoutError as error:
            raise LogUnavailable(f"no reply within {LONGEST_WAIT_S} s") from error

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[redis.asyncio.Connection]:
        """Yield an open connection of `_once` for one task."""
        pool = self._once.connection_pool
        connection = self._idle.pop() if self._idle else await pool.get_connection()
        try:
            if not connection.is_connected or await connection.can_read():
                await pool.ensure_connection(connection)
            yield connection
        finally:
            self._idle.append(connection)

    async def repeat(self, first: Words, then: Callable[[Any], Words | None]) -> None:
        """Send the command *first*, and after each reply the command that *then* returns for it, until that is None.

        *then* is called as the bytes come and must not wait. Commands are sent once. Raise the errors of the log, and
        of *then*.
        """
        try:
            if not await self._repeat_at_once(first, then):
                words: Words | None = first
                while words is not None:
                    words = then(await self._send_once(*words))
        except errors.RedisError as error:
            raise await self._failed(error) from error

    async def _repeat_at_once(self, first: Words, then: Callable[[Any], Words | None]) -> bool:
        """Repeat without a task between the commands; return whether this is possible here."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(LONGEST_WAIT_S):
                    connection = await stack.enter_async_context(self._connection())
            except TimeoutError as error:
                raise LogUnavailable(f"no connection within {LONGEST_WAIT_S} s") from error
            writer = writer_of(connection)
            if writer is None:
                return False
            try:
                await Repeated(writer, then, patience_s=LONGEST_WAIT_S).run(first)
            except BaseException:
                await connection.disconnect(nowait=True)  # a reply may be on its way
                raise
            return True

    async def _send_both(self, then: Words, *words: str | int | bytes) -> list[Any]:
        pipe = self._blocked.pipeline(transaction=False)
        pipe.execute_command(*words)
        pipe.execute_command(*then)
        return _without_errors(await pipe.execute(raise_on_error=False))

    async def _send_batch(self, batch: Batch[Any]) -> list[Any]:
        pipe = self._retrying.pipeline(transaction=False)
        for words in batch.commands:
            pipe.execute_command(*words)
        return _without_missing(await pipe.execute(raise_on_error=False), batch)

    async def _failed(self, error: errors.RedisError) -> LogError:
        """See Driver._failed. Only idle connections are closed, because other tasks use the others."""
        translated = translate(error)
        if isinstance(translated, LogReadOnly):
            for client in (self._retrying, self._blocked):
                await client.connection_pool.disconnect(inuse_connections=False)
            for connection in tuple(self._idle):
                await connection.disconnect(nowait=True)  # without a wait, in which a task could take the next one
        return translated


def _without_errors(replies: list[Any]) -> list[Any]:
    """Return *replies*; raise the first error among them."""
    for reply in replies:
        if isinstance(reply, errors.RedisError):
            raise reply
    return replies


def _script_args(script: Script[Any]) -> list[str | int | bytes]:
    return [len(script.keys), *script.keys, *script.args]


def _without_missing(replies: Sequence[Any], batch: Batch[Any]) -> list[Any]:
    """Return the replies to a batch, with None for errors that the batch allows; raise any other error among them."""
    missing = ("NOGROUP", "WRONGTYPE") if batch.any_type else ("NOGROUP",)
    for reply in replies:
        if isinstance(reply, errors.RedisError) and not str(reply).startswith(missing):
            raise reply
    return [None if isinstance(reply, errors.RedisError) else reply for reply in replies]


_IN_SCRIPT = re.compile(r"(Error running script \(call to \w+\): @user_script: ?\d+: )?(@user_script: ?\d+: -)?")
"""Text of Redis 6.2 before an error inside a script, which makes each a plain ResponseError; 7 has no such text."""

_FORBIDDEN = ("The user executing the script can't", "ACL failure in script")
"""Messages of servers when a script does what its user may not do; a forbidden script call itself is NOPERM."""

_DEMOTED = ("instance state changed", "previous master is now a slave")
"""Texts when a server became a replica: for a client that waits there, with the code UNBLOCKED, which has other
meanings, too; and redis-py's for READONLY from a server that was looked up."""

_NOT_THERE = " connecting to "
"""Text of redis-py's errors when no connection was made. A refused password is a ConnectionError, too."""

_CODES: Final[Mapping[type[errors.RedisError], str]] = {
    errors.AskError: "ASK",
    errors.BusyLoadingError: "LOADING",
    errors.ClusterDownError: "CLUSTERDOWN",
    errors.MasterDownError: "MASTERDOWN",
    errors.MovedError: "MOVED",
    errors.NoPermissionError: "NOPERM",
    errors.OutOfMemoryError: "OOM",
    errors.ReadOnlyError: "READONLY",
    errors.TryAgainError: "TRYAGAIN",
}
"""Codes that redis-py has a class for and removes from the text. Other codes stay in the text. So do these, where a
script of 6.2 passes an error on, or where redis-py does not read the reply."""

PASSING: Final = frozenset(
    {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOAUTH", "NOREPLICAS", "TRYAGAIN"}
)
"""Codes of errors that pass without us: the caller waits and tries again."""
OUSTED: Final = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY", "TRYAGAIN"})
"""Codes of a server that another one may have replaced: it was away, or lost its replicas, master or cluster."""
ELSEWHERE: Final = frozenset({"ASK", "MOVED"})
"""Codes of a cluster node that does not have the log, or is handing it over to another node."""


def code_of(error: errors.RedisError) -> tuple[str, str]:
    """Return the code of an error reply, and its text; for another error its first word, and its text."""
    text = _IN_SCRIPT.sub("", str(error), count=1)
    if code := _CODES.get(type(error)):
        return code, f"{code} {text}"
    return text.partition(" ")[0], text


def translate(error: errors.RedisError) -> LogError:
    """Return our exception for one of redis-py's."""
    code, text = code_of(error)
    if code == "OOM":
        return LogFull(f"Redis is at its maxmemory and takes no new work: {text}")
    if code in OUSTED or any(words in text for words in _DEMOTED):
        return LogReadOnly(text)
    if code in ELSEWHERE:
        return LogReadOnly(f"this node of a cluster does not have the log at the moment: {text}")
    if isinstance(error, errors.ConnectionError | errors.TimeoutError):
        return LogNotThere(text) if _NOT_THERE in text else LogUnavailable(text)
    if code in PASSING:
        return LogUnavailable(text)
    if code == "NOPERM" or any(words in text for words in _FORBIDDEN):
        return LogUnavailable(f"{text}; give the user the rights that ops/redis/users.acl has for its role")
    if code in ("NOGROUP", "UNBLOCKED", "WRONGTYPE"):
        return GroupLost(text)
    return LogError(text)
