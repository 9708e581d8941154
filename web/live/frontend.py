"""What the routes share: the log, the tail, readiness; and the life of one request from its submit to its last byte.

A client that leaves is noticed as the end of the task that answers it, wherever that task was: then what has not ended
and what nobody else reads is cancelled in the log, after a period of grace, by a task of its own, because one that is
being cancelled cannot wait for Redis. A client that came to a request under its idempotency key cancels it by leaving
only where the one that sent it has left before; a client that reads the events of a request cancels nothing.

What a client sends may be several requests of the log, siblings: one for each choice and prompt. They are submitted
together, heard together, and where one of them fails the client is told so and the others are cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from pipeline.errors import LogError, LogFull, LogUnavailable, RequestError, UndecodableEvent
from pipeline.events import Answered, Cancelled, End, Failed, Finished, Submitted, decode, new_uid
from pipeline.log.protocol import Once, Quota, RequestLimits, Submission, SubmitResult
from pipeline.log.redis import AsyncRedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import COMMIT_SECONDS, DISCONNECTS, REJECTIONS, REQUEST_SUCCESS, STREAMS_OPEN
from pipeline.names import SEAL, SUBMITTED_ID, sibling_uids
from pipeline.process.failpoints import failpoint
from web.live.idempotency import HEADER
from web.live.loops import run_all
from web.live.readers import Readers
from web.live.ready import Readiness, Say
from web.live.retry_after import RetryAfter
from web.live.tail import Listener, Tail, next_of
from web.wire.client_event import ClientEvent
from web.wire.openai.errors import CLIENT_CLOSED, NotNow, error_of

logger = structlog.get_logger()

T = TypeVar("T")

END_TRIES = 30
"""How often, a second apart, the end of a request is tried while Redis is away; then its engine goes on to the last
token, and nobody listens."""
LOG_PATIENCE_S = 2.0
"""How long the log has to say that a request is past its deadline, before its client is told without it."""
LOST = "The log lost this request: Redis came back without it. Send it again."
UNREACHABLE = "The log cannot be reached at the moment; send it again."
SHUT_DOWN_S = 2.0
"""How long a drain waits for the log to end what is left, and then for the last frames."""


class Client:
    """One client, while it is answered with what a request says, or several siblings."""

    @property
    def is_stream(self) -> bool:
        """Say whether it is answered with frames as they come."""
        return True

    def __init__(self, uid: str, events: Sequence[Submitted], listeners: Sequence[Listener]) -> None:
        self.uid = uid
        """What the client knows its request by; that of siblings has no history of its own."""
        self.events = events
        self.listeners = listeners
        """One for each of `events`; they share a `wake`."""
        self.reads: Sequence[str] = ()
        """The uids of which it is counted as a reader, where another client sent the request."""
        self._since_s = time.monotonic()
        self._ends: dict[int, End] = {}
        self._refused: RequestError | None = None
        self._broken: RequestError | None = None

    @property
    def event(self) -> Submitted:
        """How the first of them begins: all have the same endpoint, model and presentation."""
        return self.events[0]

    @property
    def ended(self) -> bool:
        """Say whether nothing of it goes on in the log."""
        return self._refused is not None or len(self._ends) == len(self.listeners)

    @property
    def done(self) -> bool:
        """Say whether its client hears no more: all have ended, or one has failed."""
        return self.ended or self._failure is not None

    @property
    def broken(self) -> bool:
        return self._broken is not None

    @property
    def unended(self) -> list[str]:
        """The uids of which no end was heard."""
        return [listener.uid for index, listener in enumerate(self.listeners) if index not in self._ends]

    def has_failed_with(self, heard: ClientEvent) -> bool:
        """Say whether *heard* is the first failure of all: what its client is told of them."""
        return heard.event is self._failure

    @property
    def _failure(self) -> Failed | Cancelled | None:
        return next((end for end in self._ends.values() if isinstance(end, Failed | Cancelled)), None)

    async def next(self) -> list[ClientEvent]:
        """As `next_of`."""
        heard = await next_of(self.listeners)
        self._ends |= {each.index: each.event for each in heard if isinstance(each.event, End)}
        return heard

    def refuse(self, message: str, code: str, *, status: int = 503, param: str | None = None) -> RequestError:
        """Return the error for a request that the log did not take."""
        self._refused = error = RequestError(message, code=code, status=status, param=param)
        return error

    def put_off(self, message: str, retry_after_s: int, *, status: int = 503) -> RequestError:
        """Return the error for a request that the log did not take, and may take later."""
        code = "overloaded" if status == 503 else None
        self._refused = error = NotNow(message, code=code, status=status, retry_after_s=retry_after_s)
        return error

    def break_off(self) -> RequestError:
        """Log the exception that is being handled, a bug of ours, and return what the client is told of it."""
        logger.exception("request_broke", uid=self.uid)
        message = "The server failed on this request; that is our bug."
        self._broken = error = RequestError(message, code="internal_error", status=500)
        return error

    @property
    def cut_short(self) -> str:
        """Why it did not get the end of its answer, in the words of DISCONNECTS; empty when it did, or was refused."""
        match self._broken or self._refused or self._failure:
            case None if not self.ended:
                return "client"
            case Cancelled():
                return "cancelled"
            case Failed(code="timeout"):
                return "deadline"
            case Failed(code="shutting_down"):
                return "shutdown"
            case Failed(status=status) if status >= 500:
                return "error"
            case _:
                return "error" if self._broken else ""

    def log_line(self, **said: object) -> None:
        """Write the canonical line."""
        generates = self.event.task == "generate"
        line: dict[str, object] = {} if generates else {"task": self.event.task}
        if generates:
            line |= {"completion_tokens": sum(listener.n for listener in self.listeners)}
        if len(self.listeners) > 1:
            line |= {"siblings": len(self.listeners)}
        failure = self._failure
        error = self._broken or self._refused or (error_of(failure) if failure is not None else None)
        if error is not None:
            line |= {"status": error.status, "error": error.code}
        elif not self.ended:
            line |= {"status": CLIENT_CLOSED, "error": "client_left"}
        else:
            line |= {"status": 200} | _said_of([*self._ends.values()], self.events)
        total_ms = round((time.monotonic() - self._since_s) * 1000)
        logger.info("request", uid=self.uid, model=self.event.model, **said, **line, total_ms=total_ms)


class OpenRequest(Client):
    """A client that sends a request, or comes to the one that was sent under its idempotency key before."""

    submission: asyncio.Task[SubmitResult]

    def __init__(self, tail: Tail, events: Sequence[Submitted], *, once: Once | None, quota: Quota | None) -> None:
        uid, wake = new_uid(), asyncio.Event()
        uids = sibling_uids(uid, len(events))
        super().__init__(uid, events, [tail.listen(each, index=i, wake=wake) for i, each in enumerate(uids)])
        if self.event.frontend != tail.frontend:  # renamed since it was made
            for listener in self.listeners:
                listener.follow()
        self.once = once
        self.attached = False
        """Another client sent the request."""
        self._sender = {"key": quota.key[:8]} if quota else {}

    @property
    def is_stream(self) -> bool:
        return self.event.presentation.stream

    def attach(self, uid: str, events: Sequence[Submitted], tail: Tail) -> None:
        """Answer with the request *uid* instead of an own one."""
        for listener in self.listeners:
            listener.close()
        wake = asyncio.Event()
        self.uid, self.events, self.attached = uid, events, True
        uids = sibling_uids(uid, len(events))
        self.listeners = [tail.follow(each, index=i, wake=wake) for i, each in enumerate(uids)]

    def log_line(self, **said: object) -> None:
        """As Client.log_line."""
        attached = {"attached": True} if self.attached else {}
        super().log_line(stream=self.is_stream, **self._sender, **said, **attached)


class Frontend:
    """One web process: what it listens to and what it has open."""

    def __init__(
        self,
        name: str,
        log: AsyncRedisLog,
        say: Say,
        *,
        disconnect_grace_s: float = 0.0,
        measures: Measures | None = None,
    ) -> None:
        self.name = name
        self.measures = measures or Measures()
        self.tail = Tail(log, name, retention_s=log.limits.retention_s, measures=self.measures)
        self.readers = Readers(log, name)
        self.readiness = Readiness(log, self.tail, self._say_unless_draining, self.measures)
        self._pace = RetryAfter()
        self.draining = False
        self._log = log
        self._say = say
        self._grace_s = disconnect_grace_s
        self._clients: set[Client] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._in_grace: set[asyncio.TimerHandle] = set()

    @property
    def log(self) -> AsyncRedisLog:
        """The log, for routes that ask it something else than a request."""
        return self._log

    @property
    def limits(self) -> RequestLimits:
        """What holds for every request."""
        return self._log.limits

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
            self.measures.add(REJECTIONS, "shutting_down")
            raise RequestError("The server is shutting down; send it again later.", code="shutting_down", status=503)

    async def open(
        self, events: Sequence[Submitted], *, once: Once | None = None, quota: Quota | None = None
    ) -> OpenRequest:
        """Submit *events*, all or none, and listen to them until the current task is done; what has not ended by then
        is cancelled.

        With *once*, what was submitted under that key before is listened to instead, from its start, unless it is gone
        or ended in vain. With *quota*, it counts as what that API key has sent.

        Raises:
            RequestError: The log does not take it.
        """
        if len(events) > self.limits.max_queued:
            most = f"{self.limits.max_queued} (--max-queued-requests)"
            raise RequestError(
                f"n: with so many prompts and choices it is {len(events)} answers; at most {most}", param="n"
            )
        opened = OpenRequest(self.tail, events, once=once, quota=quota)
        self._add(opened)
        timeout_s = self.limits.timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, opened, timeout_s)
        self._when_done(lambda: self._close(opened, timer))
        while True:
            opened.submission = self.spawn(self._submit(opened.uid, events, once, quota))
            try:
                submitted = await asyncio.shield(opened.submission)
            except LogFull:
                self.measures.add(REJECTIONS, "log_full")
                message = "The log is full until running requests end; send it again."
                raise opened.put_off(message, self._pace.retry_after_s()) from None
            except LogError as error:  # it may have got through all the same
                logger.warning("not_submitted", uid=opened.uid, error=str(error))
                self.measures.add(REJECTIONS, "log_unreachable")
                self.spawn(self.end(opened, Cancelled(by="web")))
                raise opened.refuse(UNREACHABLE, "overloaded") from None
            except Exception:
                raise opened.break_off() from None
            match submitted.submission:
                case Submission.BUSY:
                    self.measures.add(REJECTIONS, "queue_full")
                    message = "Too many requests are waiting; send it again."
                    raise opened.put_off(message, self._pace.retry_after_s())
                case Submission.TOO_FAST if quota is not None:
                    self.measures.add(REJECTIONS, "requests_per_minute")
                    again_s = math.ceil(submitted.again_ms / 1000)
                    message = f"This API key may send {quota.requests_per_minute} requests a minute; wait {again_s} s."
                    raise opened.put_off(message, again_s, status=429)
                case Submission.TOO_MANY if quota is not None:
                    self.measures.add(REJECTIONS, "concurrent_requests")
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
                    if (
                        opened.event.task == "generate"
                    ):  # the others are over at once, and say nothing of when there is room
                        self._pace.begun(opened)
                    for listener in opened.listeners:
                        listener.submit_again = functools.partial(self._submit_again, opened, listener)
                    return opened

    async def read(self, uid: str, event: Submitted, *, whole: bool) -> Client:
        """Listen to a request that is there, as Tail.follow, until the current task is done, which cancels nothing.

        Raises:
            RequestError: The log cannot be reached.
        """
        client = Client(uid, [event], [self.tail.follow(uid, whole=whole)])
        self._add(client)
        self._when_done(lambda: self._drop(client, reader=True))
        try:
            await self._begin_reading(client, [uid])
        except LogError as error:
            logger.warning("reader_not_begun", uid=uid, error=str(error))
            raise client.refuse(UNREACHABLE, "overloaded") from None
        return client

    async def end(self, opened: OpenRequest, event: End) -> None:
        """End the request in the log, unless it has ended, once its submit is over; try again while Redis is away."""

        uids = opened.unended  # now: a client that is told of the end without the log needs it all the more

        async def end() -> None:
            for uid in uids:
                if await self._log.end(uid, event, frontend=opened.event.frontend):
                    self.count_end(event)

        if not await self._try_to_end(opened, event, end) and isinstance(event, Failed):
            self._fail(opened, event)

    def _fail(self, client: Client, event: Failed) -> None:
        """Tell a client alone, where the log cannot, or should not."""
        for listener in client.listeners:
            listener.fail(event.code, event.message, event.status)

    def count_end(self, event: End) -> None:
        """Count a request that this process has ended."""
        self.measures.add(REQUEST_SUCCESS, "error" if isinstance(event, Failed) else "abort")

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

    async def _submit(
        self, uid: str, events: Sequence[Submitted], once: Once | None, quota: Quota | None = None
    ) -> SubmitResult:
        """Begin the history of *uid*, or those of its siblings. Raises as the log does."""
        failpoint("web.before_submit")
        began_s = time.perf_counter()
        submitted = await self._log.submit(uid, events, once, quota=quota)
        self.measures.observe(COMMIT_SECONDS, time.perf_counter() - began_s, "submit")
        failpoint("web.after_submit")
        return submitted

    def _submit_again(self, opened: OpenRequest, listener: Listener) -> None:
        """Begin anew what Redis lost: as nothing was said of it, nor of a sibling, its client need not know."""
        if any(other.n for other in opened.listeners):
            listener.fail("log_lost", LOST)
        elif opened.submission.done():
            logger.warning("submitted_again", uid=opened.uid)
            opened.submission = self.spawn(self._submit(opened.uid, opened.events, opened.once))
            opened.submission.add_done_callback(lambda submission: self._submitted_again(opened, submission))

    def _submitted_again(self, opened: OpenRequest, submission: asyncio.Task[SubmitResult]) -> None:
        """Go on listening, or end the stream of a client whose request the log does not take once more."""
        error = None if submission.cancelled() else submission.exception()
        if error is not None and not isinstance(error, LogError):
            logger.error("request_broke", uid=opened.uid, exc_info=error)
        if error is None and submission.result().submission is not Submission.BUSY:
            for listener in opened.listeners:
                listener.check()
        elif not isinstance(error, LogUnavailable):  # else the next look tries again
            self._fail(opened, Failed(status=500, code="log_lost", message=LOST))

    async def _attach(self, opened: OpenRequest, uid: str) -> bool:
        """Have a client answered by the request *uid*; False when that is gone, or ended in vain.

        Raises:
            RequestError: The log cannot be reached.
        """
        uids = sibling_uids(uid, len(opened.events))  # as many: the body is the same
        try:
            await self._begin_reading(opened, uids)  # before the look, so that nobody cancels it after that
            found = [await self.ask(self._log.entries(each, (SUBMITTED_ID, SEAL))) for each in uids]
            begins = [decode(there[SUBMITTED_ID].fields) if SUBMITTED_ID in there else None for there in found]
            ends = [decode(there[SEAL].fields) for there in found if SEAL in there]
        except UndecodableEvent:
            raise opened.break_off() from None
        except LogError as error:
            logger.warning("not_attached", uid=uid, error=str(error))
            raise opened.refuse(UNREACHABLE, "overloaded") from None
        in_vain = any(isinstance(end, Cancelled) or (isinstance(end, Failed) and end.status >= 500) for end in ends)
        events = [event for event in begins if isinstance(event, Submitted)]
        if len(events) < len(uids) or in_vain:
            self._stop_reading(opened)
            return False
        opened.attach(uid, events, self.tail)
        return True

    async def _begin_reading(self, client: Client, uids: Sequence[str]) -> None:
        client.reads = uids
        for uid in uids:
            self.readers.add(uid)
        for uid in uids:
            await self.ask(self.readers.tell(uid))

    def _stop_reading(self, client: Client) -> None:
        async def tell(uid: str) -> None:
            try:
                await self.readers.tell(uid)
            except LogError as error:  # then it is over within a minute
                logger.warning("reader_not_gone", uid=uid, error=str(error))

        for uid in client.reads:
            self.readers.remove(uid)
            self.spawn(tell(uid))
        client.reads = ()

    async def _time_out(self, opened: OpenRequest, event: Failed) -> None:
        """End the request in the log; a client whom the log cannot tell in time is told without it."""
        ended = self.spawn(self.end(opened, event))
        _, late = await asyncio.wait({ended}, timeout=LOG_PATIENCE_S)
        if late:
            self._fail(opened, event)

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
                    again = "The server is shutting down; come again."
                    self._fail(client, Failed(status=503, code="shutting_down", message=again))
            if not await self._is_idle_within(SHUT_DOWN_S):  # no Redis: then at least the clients are told
                for client in self._clients:
                    self._fail(client, Failed(status=503, code="shutting_down", message=message))
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
        came_to = opened.reads  # perhaps it is not attached to them yet
        self._drop(opened)
        if opened.ended:
            return
        failpoint("web.on_disconnect")
        if opened.broken and not came_to:
            self.spawn(self.end(opened, Cancelled(by="web")))
        elif self._grace_s <= 0:
            self.spawn(self._abandon(opened, came_to))
        elif not self.draining:
            self._abandon_later(opened, came_to)

    def _add(self, client: Client) -> None:
        self._clients.add(client)
        if client.is_stream:
            self.measures.add(STREAMS_OPEN)

    def _drop(self, client: Client, **said: object) -> None:
        self._clients.discard(client)
        if client.is_stream:
            self.measures.add(STREAMS_OPEN, amount=-1)
        if client.cut_short:
            self.measures.add(DISCONNECTS, client.cut_short)
        for listener in client.listeners:
            listener.close()
        self._stop_reading(client)
        client.log_line(**said)

    def _abandon_later(self, opened: OpenRequest, came_to: Sequence[str]) -> None:
        def grace_is_over() -> None:
            self._in_grace.discard(timer)
            self.spawn(self._abandon(opened, came_to))

        timer = asyncio.get_running_loop().call_later(self._grace_s, grace_is_over)
        self._in_grace.add(timer)

    async def _abandon(self, opened: OpenRequest, came_to: Sequence[str]) -> None:
        """Cancel the request of a client that left, its own or the one that it *came_to*, unless somebody reads it."""
        uids, event = came_to or opened.unended, Cancelled(by="client")

        async def abandon() -> None:
            for uid in uids:
                await self.readers.tell(uid)  # that nobody here reads it any more, or that somebody does
                abandoned = await self._log.abandon(
                    uid,
                    event,
                    frontend=opened.event.frontend,
                    once=opened.once,
                    attached=bool(came_to),
                )
                if abandoned:
                    self.count_end(event)

        await self._try_to_end(opened, event, abandon)

    def _expire(self, opened: OpenRequest, timeout_s: float) -> None:
        message = f"The request took longer than {timeout_s:g} s (--request-timeout)."
        self.spawn(self._time_out(opened, Failed(status=504, code="timeout", message=message)))

    def _say_unless_draining(self, **changes: object) -> None:
        if not self.draining:
            self._say(**changes)


def _said_of(ends: Sequence[End], events: Sequence[Submitted]) -> dict[str, object]:
    """Return what the canonical line says of requests that ended well."""
    finished = [end for end in ends if isinstance(end, Finished)]
    if not finished:
        answered = [len(end.token_ids) for end in ends if isinstance(end, Answered)]
        return {"prompt_tokens": sum(answered) or sum(len(event.prompt_ids) for event in events)}
    return {
        "finish_reason": ",".join(sorted({end.reason for end in finished})),
        "prompt_tokens": sum(end.usage.prompt_tokens for end in finished),
        "queue_ms": max(end.timings.admitted_ms for end in finished),
        "first_token_ms": max(end.timings.first_token_ms for end in finished),
    }
