"""Commands over one connection of asyncio, each made from the reply to the one before, without a task between them.

A frontend reads the tokens of every step like this. A read in a coroutine wakes a task, arms timers and goes through
the layers of redis-py. That takes longer than everything else for a token of a single stream. Here the transport calls
when bytes come, and the next command is sent in the same call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import redis.asyncio
import redis.exceptions as errors

from pipeline.log.operation import Words

try:
    import hiredis
except ImportError:  # redis-py works without it, too
    hiredis = None  # type: ignore[assignment]

_MORE: Final = object()
"""Stands for a reply that is not complete yet."""


def writer_of(connection: redis.asyncio.Connection) -> asyncio.StreamWriter | None:
    """Return the stream of an open *connection*, or None if `Repeated` cannot read from it.

    redis-py has no public way to it. If a version gives it another name, redis-py's coroutines are used.
    """
    writer = getattr(connection, "_writer", None)
    return writer if hiredis is not None and isinstance(writer, asyncio.StreamWriter) else None


class Repeated(asyncio.Protocol):
    """Replaces the protocol of a connection while it sends and reads."""

    def __init__(
        self, writer: asyncio.StreamWriter, answer: Callable[[Any], Words | None], *, patience_s: float
    ) -> None:
        """*answer* gets each reply and returns the next command, or None to end. A reply may take *patience_s*."""
        self._loop = asyncio.get_running_loop()
        self._transport = writer.transport
        self._before = self._transport.get_protocol()
        self._answer = answer
        self._patience_s = patience_s
        self._reader = hiredis.Reader(errors.InvalidResponse, errors.ResponseError, notEnoughData=_MORE)
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._sent_s = 0.0

    async def run(self, first: Words) -> None:
        """Send *first* and go on until *answer* returns None; then the connection is as before. After an exception, a
        reply may be on its way: the caller must close the connection.

        Raises:
            RedisError: The connection broke, Redis refused a command, or a reply took too long.
            Exception: *answer* raised it.
        """
        self._transport.set_protocol(self)
        self._timer = self._loop.call_later(self._patience_s, self._look_at_clock)
        try:
            self._send(first)
            await self._over
        finally:
            self._timer.cancel()
            self._transport.set_protocol(self._before)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MORE:
                if not isinstance(reply, hiredis.PushNotification):
                    self._take(reply)
        except Exception as error:  # `run` raises it
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end(errors.ConnectionError(str(error or "the server closed the connection")))
        self._before.connection_lost(error)

    def pause_writing(self) -> None:
        """See asyncio.Protocol. Nothing here waits: there is one short command at a time."""
        self._before.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._before.resume_writing()

    def _take(self, reply: Any) -> None:
        if self._over.done():
            return
        if isinstance(reply, errors.RedisError):
            raise reply
        words = self._answer(reply)
        if words is None:
            self._over.set_result(None)
        else:
            self._send(words)

    def _send(self, words: Words) -> None:
        self._sent_s = self._loop.time()
        packed: bytes = hiredis.pack_command(words if type(words) is tuple else tuple(words))  # type: ignore[arg-type]  # its stub knows tuples of one
        self._transport.write(packed)

    def _look_at_clock(self) -> None:
        """End if the reply takes too long. One timer serves many commands."""
        left_s = self._sent_s + self._patience_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look_at_clock)
        else:
            self._end(errors.TimeoutError(f"no reply within {self._patience_s} s"))

    def _end(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)
