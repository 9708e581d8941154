"""What the routes share: the log, the tail, readiness; and the life of one request from its submit to its last byte.

A client that leaves is noticed as the end of the task that answers it, wherever that task was: then what has not ended
and what nobody else reads is cancelled in the log, after a period of grace, by a task of its own, because one that is
being cancelled cannot wait for Redis. A client that came to a request under its idempotency key cancels it by leaving
only where the one that sent it has left before; a client that reads the events of a request cancels nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from pipeline.errors import LogError, LogFull, LogUnavailable, RequestError, UndecodableEvent
from pipeline.events import Cancelled, End, Failed, Finished, Submitted, decode, new_uid
from pipeline.failpoints import failpoint
from pipeline.log import Once, Quota, Submission, SubmittedOnce
from pipeline.names import SEAL, SUBMITTED_ID
from pipeline.redis_log import AsyncRedisLog
from web.idempotency import HEADER
from web.loops import run_all
from web.openai.errors import CLIENT_CLOSED, NotNow, error_of
from web.pace import Pace
from web.readers import Readers
from web.ready import Limits, Readiness, Say
from web.tail import Heard, Listener, Tail
from web.uids import drawn_ms

logger = structlog.get_logger()

T = TypeVar("T")

END_TRIES = 30
"""How often, a second apart, the end of a request is tried while Redis is away; then its engine goes on to the last
token, and nobody listens."""
LOG_PATIENCE_S = 2.0
"""How long the log has to say that a request is past its deadline, before its client is told without it."""
UNREACHABLE = "The log cannot be reached at the moment; send it again."
SHUT_DOWN_S = 2.0
"""How long a drain waits for the log to end what is left, and then for the last frames."""


class Client:
    """One client, while it is answered with what a request says."""

    def __init__(self, uid: str, event: Submitted, listener: Listener) -> None:
        self.uid = uid
        self.event = event
        self.listener = listener
        self.reads = ""
        """The uid of which it is counted as a reader, where another client sent the request."""
        self._since_s = time.monotonic()
        self._end: End | RequestError | None = None
        self._broken: RequestError | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def next(self) -> list[Heard]:
        """As Listener.next."""
        heard = await self.listener.next()
        match heard:
            case [*_, Heard(event=Finished() | Failed() | Cancelled() as end)]:
                self._end = end
        return heard

    def refuse(self, message: str, code: str, *, status: int = 503, param: str | None = None) -> RequestError:
        """Return the error for a request that the log did not take."""
        self._end = error = RequestError(message, code=code, status=status, param=param)
        return error

    def put_off(self, message: str, retry_after_s: int, *, status: int = 503) -> RequestError:
        """Return the error for a request that the log did not take, and may take later."""
        code = "overloaded" if status == 503 else None
        self._end = error = NotNow(message, code=code, status=status, retry_after_s=retry_after_s)
        return error

    def break_off(self) -> RequestError:
        """Log the exception that is being handled, a bug of ours, and return what the client is told of it."""
        logger.exception("request_broke", uid=self.uid)
        message = "The server failed on this request; that is our bug."
        self._broken = error = RequestError(message, code="internal_error", status=500)
        return error

    def log_line(self, **said: object) -> None:
        """Write the canonical line."""
        line: dict[str, object] = {"completion_tokens": self.listener.n}
        match self._broken or self._end:
            case Finished(usage=usage, timings=timings, reason=reason):
                line |= {"status": 200, "finish_reason": reason}
                line |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
                line |= {"queue_ms": timings.admitted_ms, "first_token_ms": timings.first_token_ms}
            case RequestError() as error:
                line |= {"status": error.status, "error": error.code}
            case Failed() | Cancelled() as ended:
                error = error_of(ended)
                line |= {"status": error.status, "error": error.code}
            case None:
                line |= {"status": CLIENT_CLOSED, "error": "client_left"}
        total_ms = round((time.monotonic() - self._since_s) * 1000)
        logger.info("request", uid=self.uid, model=self.event.model, **said, **line, total_ms=total_ms)


class OpenRequest(Client):
    """A client that sends a request, or comes to the one that was sent under its idempotency key before."""

    submission: asyncio.Task[SubmittedOnce]

    def __init__(self, tail: Tail, event: Submitted, *, stream: bool, once: Once | None, quota: Quota | None) -> None:
        uid = new_uid()
        super().__init__(uid, event, tail.listen(uid))
        if event.frontend != tail.frontend:  # renamed since it was made
            self.listener.follow()
        self.once = once
        self.attached = False
        """Another client sent the request."""
        self._stream = stream
        self._sender = {"key": quota.key[:8]} if quota else {}

    @property
    def created_s(self) -> int:
        return drawn_ms(self.uid) // 1000

    def attach(self, uid: str, event: Submitted, listener: Listener) -> None:
        """Answer with the request *uid* instead of an own one."""
        self.listener.close()
        self.uid, self.event, self.listener, self.attached = uid, event, listener, True

    def log_line(self, **said: object) -> None:
        """As Client.log_line."""
        attached = {"attached": True} if self.attached else {}
        super().log_line(stream=self._stream, **self._sender, **said, **attached)


class Frontend:
    """One web process: what it listens to and what it has open."""

    def __init__(
        self, name: str, log: AsyncRedisLog, limits: Limits, say: Say, *, disconnect_grace_s: float = 0.0
    ) -> None:
        self.name = name
        self.tail = Tail(log, name, retention_s=limits.retention_s)
        self.readers = Readers(log, name)
        self.readiness = Readiness(log, self.tail, limits, self._say_unless_draining)
        self._pace = Pace()
        self.draining = False
        self._log = log
        self.limits = limits
        self._say = say
        self._grace_s = disconnect_grace_s
        self._clients: set[Client] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._in_grace: set[asyncio.TimerHandle] = set()

    @property
    def log(self) -> AsyncRedisLog:
        """The log, for routes that ask it something else than a request."""
        return self._log

    async def run(self) -> None:
        """Listen to the log until cancelled."""
        await run_all(*self.tail.loops(), self.readers.run(), self.readiness.run())

    def rename(self, name: str) -> None:
        """Have what is submitted from now on answered under another name; what is open goes on."""
        logger.info("renamed", before=self.name, name=name)
        self.name = name
        self.tail.rename(name)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run *work* in a task of its own, which nobody's end cancels."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Return what the log answers, for a task that may answer its client for long: not on its own, for in Python
        3.11 redis-py swallows a cancellation that comes as a command is sent, and the client that left would be
        answered for ever. Raises as the log does.
        """
        return await asyncio.shield(self.spawn(question))

    @property
    def is_busy(self) -> bool:
        """Say whether a client is being answered, or something has yet to be said to the log."""
        return bool(self._clients or self._background)

    def admit(self) -> None:
        """Let a new request in.

        Raises:
            RequestError: The process is going down.
        """
        if self.draining:
            raise RequestError("The server is shutting down; send it again later.", code="shutting_down", status=503)

    async def open(
        self, event: Submitted, *, stream: bool, once: Once | None = None, quota: Quota | None = None
    ) -> OpenRequest:
        """Submit *event* and listen to it until the current task is done; what has not ended by then is cancelled.

        With *once*, what was submitted under that key before is listened to instead, from its start, unless it is gone
        or ended in vain. With *quota*, it counts as what that API key has sent.

        Raises:
            RequestError: The log does not take it.
        """
        opened = OpenRequest(self.tail, event, stream=stream, once=once, quota=quota)
        self._clients.add(opened)
        timeout_s = self.limits.timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, opened, timeout_s)
        self._when_done(lambda: self._close(opened, timer))
        while True:
            opened.submission = self.spawn(self._submit(opened.uid, event, once, quota))
            try:
                submitted = await asyncio.shield(opened.submission)
            except LogFull:
                message = "The log is full until running requests end; send it again."
                raise opened.put_off(message, self._pace.retry_after_s()) from None
            except LogError as error:  # it may have got through all the same
                logger.warning("not_submitted", uid=opened.uid, error=str(error))
                self.spawn(self.end(opened, Cancelled(by="web")))
                raise opened.refuse(UNREACHABLE, "overloaded") from None
            except Exception:
                raise opened.break_off() from None
            match submitted.submission:
                case Submission.BUSY:
                    message = "Too many requests are waiting; send it again."
                    raise opened.put_off(message, self._pace.retry_after_s())
                case Submission.TOO_FAST if quota is not None:
                    again_s = math.ceil(submitted.again_ms / 1000)
                    message = f"This API key may send {quota.requests_per_minute} requests a minute; wait {again_s} s."
                    raise opened.put_off(message, again_s, status=429)
                case Submission.TOO_MANY if quota is not None:
                    message = f"This API key may have {quota.concurrent_requests} requests at once; send it again."
                    raise opened.put_off(message, 1, status=429)
                case Submission.MISMATCH:
                    message = f"{HEADER}: it was used with another body before; take a new one for a new request"
                    raise opened.refuse(message, "idempotency_key_reused", status=400, param=HEADER)
                case Submission.ATTACH if once is not None:
                    if await self._attach(opened, submitted.uid):
                        return opened
                    once = dataclasses.replace(once, instead_of=submitted.uid)
                case _:
                    self._pace.begun(opened)
                    opened.listener.submit_again = lambda: self._submit_again(opened)
                    return opened

    async def read(self, uid: str, event: Submitted, *, whole: bool) -> Client:
        """Listen to a request that is there, as Tail.follow, until the current task is done, which cancels nothing.

        Raises:
            RequestError: The log cannot be reached.
        """
        client = Client(uid, event, self.tail.follow(uid, whole=whole))
        self._clients.add(client)
        self._when_done(lambda: self._drop(client, reader=True))
        try:
            await self._begin_reading(client, uid)
        except LogError as error:
            logger.warning("reader_not_begun", uid=uid, error=str(error))
            raise client.refuse(UNREACHABLE, "overloaded") from None
        return client

    async def end(self, opened: OpenRequest, event: End) -> None:
        """End the request in the log, unless it has ended, once its submit is over; try again while Redis is away."""

        async def end() -> None:
            retention_ms = int(self.limits.retention_s * 1000)
            await self._log.end(opened.uid, event, frontend=opened.event.frontend, retention_ms=retention_ms)

        if not await self._try_to_end(opened, event, end) and isinstance(event, Failed):
            opened.listener.fail(event.code, event.message, event.status)

    async def _try_to_end(self, opened: OpenRequest, event: End, way: Callable[[], Awaitable[None]]) -> bool:
        """Go the *way* of ending a request until the log has heard it; say whether it has."""
        await asyncio.wait({opened.submission})
        for _ in range(END_TRIES):
            try:
                await way()
                return True
            except LogError as error:
                logger.warning("request_not_ended", uid=opened.uid, event_kind=event.kind, error=str(error))
                await asyncio.sleep(1)
        logger.error("request_never_ended", uid=opened.uid, event_kind=event.kind, tries=END_TRIES)
        return False

    async def _submit(self, uid: str, event: Submitted, once: Once | None, quota: Quota | None = None) -> SubmittedOnce:
        """Begin the history of *uid*. Raises as the log does."""
        limits: Any = {
            "timeout_ms": int(self.limits.timeout_s * 1000),
            "retention_ms": int(self.limits.retention_s * 1000),
            "max_queued": self.limits.max_queued,
        }
        failpoint("web.before_submit")
        submitted = await self._log.submit_once(uid, event, once, quota=quota, **limits)
        failpoint("web.after_submit")
        return submitted

    def _submit_again(self, opened: OpenRequest) -> None:
        """Begin a history anew that Redis lost: as nothing of it was said, its client need not know."""
        if opened.submission.done():
            logger.warning("submitted_again", uid=opened.uid)
            opened.submission = self.spawn(self._submit(opened.uid, opened.event, opened.once))
            opened.submission.add_done_callback(lambda submission: self._submitted_again(opened, submission))

    def _submitted_again(self, opened: OpenRequest, submission: asyncio.Task[SubmittedOnce]) -> None:
        """Go on listening, or end the stream of a client whose request the log does not take once more."""
        error = None if submission.cancelled() else submission.exception()
        if error is not None and not isinstance(error, LogError):
            logger.error("request_broke", uid=opened.uid, exc_info=error)
        if error is None and submission.result().submission is not Submission.BUSY:
            opened.listener.check()
        elif not isinstance(error, LogUnavailable):  # else the next look tries again
            opened.listener.fail("log_lost", "The log lost this request: Redis came back without it. Send it again.")

    async def _attach(self, opened: OpenRequest, uid: str) -> bool:
        """Have a client answered by the request *uid*; False when that is gone, or ended in vain.

        Raises:
            RequestError: The log cannot be reached.
        """
        try:
            await self._begin_reading(opened, uid)  # before the look, so that nobody cancels it after that
            there = await self.ask(self._log.entries(uid, (SUBMITTED_ID, SEAL)))
            event = decode(there[SUBMITTED_ID].fields) if SUBMITTED_ID in there else None
            end = decode(there[SEAL].fields) if SEAL in there else None
        except UndecodableEvent:
            raise opened.break_off() from None
        except LogError as error:
            logger.warning("not_attached", uid=uid, error=str(error))
            raise opened.refuse(UNREACHABLE, "overloaded") from None
        in_vain = isinstance(end, Cancelled) or (isinstance(end, Failed) and end.status >= 500)
        if not isinstance(event, Submitted) or in_vain:
            self._stop_reading(opened)
            return False
        opened.attach(uid, event, self.tail.follow(uid))
        return True

    async def _begin_reading(self, client: Client, uid: str) -> None:
        client.reads = uid
        self.readers.add(uid)
        await self.ask(self.readers.tell(uid))

    def _stop_reading(self, client: Client) -> None:
        async def tell(uid: str) -> None:
            try:
                await self.readers.tell(uid)
            except LogError as error:  # then it is over within a minute
                logger.warning("reader_not_gone", uid=uid, error=str(error))

        if client.reads:
            self.readers.remove(client.reads)
            self.spawn(tell(client.reads))
            client.reads = ""

    async def _time_out(self, opened: OpenRequest, event: Failed) -> None:
        """End the request in the log; a client whom the log cannot tell in time is told without it."""
        ended = self.spawn(self.end(opened, event))
        _, late = await asyncio.wait({ended}, timeout=LOG_PATIENCE_S)
        if late:
            opened.listener.fail(event.code, event.message, event.status)

    async def drain(self, patience_s: float) -> None:
        """Take nothing new, let what is open end, and end in the log what is left after *patience_s*."""
        self.draining = True
        self._say(phase="draining", detail="")
        for timer in self._in_grace:  # the log keeps what they wait for: another process can go on with it
            timer.cancel()
        self._in_grace.clear()
        if not await self._is_idle_within(patience_s):
            message = "The server was shut down before the request was done; send it again."
            for client in self._clients:
                if isinstance(client, OpenRequest) and not client.attached:
                    self.spawn(self.end(client, Failed(status=503, code="shutting_down", message=message)))
                else:
                    client.listener.fail("shutting_down", "The server is shutting down; come again.", 503)
            if not await self._is_idle_within(SHUT_DOWN_S):  # no Redis: then at least the clients are told
                for client in self._clients:
                    client.listener.fail("shutting_down", message, 503)
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

    def _when_done(self, callback: Callable[[], None]) -> None:
        """Call *callback* when the current task, which answers a client, is done."""
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: callback())

    def _close(self, opened: OpenRequest, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._pace.ended(opened)
        uid = opened.reads  # which it may have come to and not be attached to yet
        self._drop(opened)
        if opened.ended:
            return
        failpoint("web.on_disconnect")
        if opened.broken and not uid:
            self.spawn(self.end(opened, Cancelled(by="web")))
        elif self._grace_s <= 0:
            self.spawn(self._abandon(opened, uid))
        elif not self.draining:
            self._abandon_later(opened, uid)

    def _drop(self, client: Client, **said: object) -> None:
        self._clients.discard(client)
        client.listener.close()
        self._stop_reading(client)
        client.log_line(**said)

    def _abandon_later(self, opened: OpenRequest, uid: str) -> None:
        def grace_is_over() -> None:
            self._in_grace.discard(timer)
            self.spawn(self._abandon(opened, uid))

        timer = asyncio.get_running_loop().call_later(self._grace_s, grace_is_over)
        self._in_grace.add(timer)

    async def _abandon(self, opened: OpenRequest, came_to: str) -> None:
        """Cancel the request of a client that left, its own or the one that it *came_to*, unless somebody reads it."""
        uid, event = came_to or opened.uid, Cancelled(by="client")

        async def abandon() -> None:
            await self.readers.tell(uid)  # that nobody here reads it any more, or that somebody does
            await self._log.abandon(
                uid,
                event,
                frontend=opened.event.frontend,
                retention_ms=int(self.limits.retention_s * 1000),
                once=opened.once,
                attached=bool(came_to),
            )

        await self._try_to_end(opened, event, abandon)

    def _expire(self, opened: OpenRequest, timeout_s: float) -> None:
        message = f"The request took longer than {timeout_s:g} s (--request-timeout)."
        self.spawn(self._time_out(opened, Failed(status=504, code="timeout", message=message)))

    def _say_unless_draining(self, **changes: object) -> None:
        if not self.draining:
            self._say(**changes)
