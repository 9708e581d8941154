"""The parts that all clients of one web process share: the log, the tail, readiness. Also stops the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import structlog

from pipeline.errors import LogError, RequestError, UndecodableEvent
from pipeline.events import End, Failed
from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import AsyncRedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import DISCONNECTS, REJECTIONS, REQUEST_SUCCESS, STREAMS_OPEN
from web.http.turns import Turns
from web.live.catalogue import Catalogue
from web.live.client import Client
from web.live.counts import Budget, Readers, RetryAfter
from web.live.folding import Folding
from web.live.lookup import Archived
from web.live.pictures import Pictures
from web.live.ready import Readiness, Say
from web.live.tail import Tail

logger = structlog.get_logger()

T = TypeVar("T")

UNREACHABLE = "The log cannot be reached at the moment; send it again."
SHUT_DOWN_S = 2.0
"""How long a drain waits for the log to end what is left, and then for the last frames."""
CANCEL_AGAIN_S = 0.05


class Frontend:
    """One web process, as its routes see it."""

    def __init__(
        self,
        name: str,
        log: AsyncRedisLog,
        say: Say,
        *,
        disconnect_grace_s: float = 0.0,
        strict_model_names: bool = False,
        max_log_bytes: int = 0,
        measures: Measures | None = None,
        archive: str = "",
        engines_on_demand: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self.disconnect_grace_s = disconnect_grace_s
        self.strict_model_names = strict_model_names
        self.measures = measures or Measures()
        self.tail = Tail(log, name, retention_s=log.limits.retention_s, measures=self.measures)
        self.readers = Readers(log, name)
        self.readiness = Readiness(
            log, self.tail, self._say_unless_draining, self.measures, engines_on_demand=engines_on_demand
        )
        self.retry_after = RetryAfter()
        self.budget = Budget(log, max_log_bytes)
        self.archived = Archived(archive)
        self.catalogue = Catalogue(log, self.archived)
        self.pictures = Pictures(log)
        self.turns = Turns()
        self.folding = Folding()
        self.draining = False
        self._say = say
        self._clients: set[Client] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._in_grace: set[asyncio.TimerHandle] = set()

    @property
    def limits(self) -> RequestLimits:
        """The limits of every request."""
        return self.log.limits

    async def run(self) -> None:
        """Listen to the log until cancelled."""
        reading = [self.budget.run()] if self.budget.most_bytes else []
        await run_all(*self.tail.loops(), self.readers.run(), self.readiness.run(), *reading)

    def rename(self, name: str) -> None:
        """Submit under another name from now on; open requests go on."""
        logger.info("renamed", before=self.name, name=name)
        self.name = name
        self.tail.rename(name)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run *work* in a task of its own, which goes on when its caller is cancelled."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Return the answer of the log, for a task that may serve its client for long. Raises as the log does.

        The question runs in a task of its own: in Python 3.11 redis-py swallows a cancellation that comes as a command
        is sent, and a client that left would be answered for ever.
        """
        return await asyncio.shield(self.spawn(question))

    # clients

    def admit(self) -> None:
        """Let a new request in.

        Raises:
            RequestError: The process is going down.
        """
        if self.draining:
            self.measures.add(REJECTIONS, "shutting_down")
            raise RequestError("The server is shutting down; send it again later.", code="shutting_down", status=503)

    def enter(self, client: Client, leave: Callable[[], None]) -> None:
        """Count *client* as being answered; call *leave*, which calls `drop`, when the current task is done."""
        self._clients.add(client)
        if client.is_stream:
            self.measures.add(STREAMS_OPEN)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: leave())

    def drop(self, client: Client, **fields: object) -> None:
        """Forget *client*, and write its log line with *fields*."""
        self._clients.discard(client)
        if client.is_stream:
            self.measures.add(STREAMS_OPEN, amount=-1)
        if client.cut_short:
            self.measures.add(DISCONNECTS, client.cut_short)
        for listener in client.listeners:
            listener.close()
        self.stop_reading(client)
        client.log_line(**fields)

    async def begin_reading(self, client: Client, uids: Sequence[str]) -> None:
        """Count *client* as a reader of requests that another client sent. Raises as the log does."""
        client.reads = uids
        for uid in uids:
            self.readers.add(uid)
        for uid in uids:
            await self.ask(self.readers.tell(uid))

    def stop_reading(self, client: Client) -> None:
        """Undo `begin_reading`."""

        async def tell(uid: str) -> None:
            try:
                await self.readers.tell(uid)
            except LogError as error:  # the log forgets this reader within a minute
                logger.warning("reader_not_gone", uid=uid, error=str(error))

        for uid in client.reads:
            self.readers.remove(uid)
            self.spawn(tell(uid))
        client.reads = ()

    def after_grace(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run *work* when the grace for a client to come back is over, unless the process stops before."""

        def grace_is_over() -> None:
            self._in_grace.discard(timer)
            self.spawn(work())

        if self.disconnect_grace_s <= 0:
            self.spawn(work())
        elif not self.draining:
            timer = asyncio.get_running_loop().call_later(self.disconnect_grace_s, grace_is_over)
            self._in_grace.add(timer)

    def count_end(self, event: End) -> None:
        """Count a request that this process has ended."""
        self.measures.add(REQUEST_SUCCESS, "error" if isinstance(event, Failed) else "abort")

    # the end of the process

    async def drain(self, patience_s: float) -> None:
        """Take no new requests, let the open ones end, and end in the log those that are left after *patience_s*."""
        self.draining = True
        self.pictures.close()
        self._say(phase="draining", detail="")
        for timer in self._in_grace:  # the log keeps these requests, so their clients can resume on another process
            timer.cancel()
        self._in_grace.clear()
        if not await self._is_idle_within(patience_s):
            for client in self._clients:
                client.shut_down()
            if not await self._is_idle_within(SHUT_DOWN_S):  # no Redis: tell at least the clients
                for client in self._clients:
                    client.fail(SHUTTING_DOWN)
                await self._is_idle_within(SHUT_DOWN_S)
        if self._background:
            await asyncio.wait(self._background, timeout=SHUT_DOWN_S)
        for task in self._background:
            task.cancel()

    async def _is_idle_within(self, patience_s: float) -> bool:
        deadline_s = time.monotonic() + patience_s
        while self._clients and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        return not self._clients

    def _say_unless_draining(self, **changes: object) -> None:
        if not self.draining:
            self._say(**changes)


@contextmanager
def reaching(warning: str, **said: object) -> Iterator[None]:
    """Turn errors of the log within into 503 and the log line *warning*; what does not decode is our bug and stays."""
    try:
        yield
    except UndecodableEvent:
        raise
    except LogError as error:
        logger.warning(warning, **said, error=str(error))
        raise RequestError(UNREACHABLE, code="overloaded", status=503) from None


SHUTTING_DOWN = Failed(
    status=503,
    code="shutting_down",
    message="The server was shut down before the request was done; send it again.",
)


async def run_all(*loops: Coroutine[object, object, NoReturn]) -> None:
    """Run endless *loops* until cancelled, or until one fails: then raise its error. All loops have ended afterwards.

    Each is cancelled again until it ends: in Python 3.11 `asyncio.wait_for`, through which redis-py sends, swallows a
    cancellation that comes as it is done.
    """
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        broken = [task for task in tasks if task.done()]
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in broken:
        task.result()
