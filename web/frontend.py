"""What the routes share: the log, the tail, readiness; and the life of one request from its submit to its last byte.

A client that leaves is noticed as the end of the task that answers it, wherever that task was: then what has not ended
is cancelled in the log, by a task of its own, because one that is being cancelled cannot wait for Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from pipeline.errors import LogError, LogFull, RequestError
from pipeline.events import Cancelled, End, Failed, Finished, Submitted, new_uid
from pipeline.log import Reply, Submission
from pipeline.redis_log import AsyncRedisLog
from web.loops import run_all
from web.openai.errors import CLIENT_CLOSED, error_of
from web.ready import Limits, Readiness, Say
from web.tail import Tail

logger = structlog.get_logger()

T = TypeVar("T")

END_TRIES = 30
"""How often, a second apart, the end of a request is tried while Redis is away; then its engine goes on to the last
token, and nobody listens."""
LOG_PATIENCE_S = 2.0
"""How long the log has to say that a request is past its deadline, before its client is told without it."""
SHUT_DOWN_S = 2.0
"""How long a drain waits for the log to end what is left, and then for the last frames."""


class OpenRequest:
    """One request, while its client is answered."""

    def __init__(self, frontend: Frontend, event: Submitted, *, stream: bool) -> None:
        self.uid = new_uid()
        self.event = event
        self.created_s = int(time.time())
        self.listener = frontend.tail.listen(self.uid)
        self.submission = frontend.spawn(frontend.submit(self.uid, event))
        self._stream = stream
        self._since_s = time.monotonic()
        self._end: End | RequestError | None = None
        self._broken: RequestError | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def next(self) -> list[Reply]:
        """As Listener.next."""
        replies = await self.listener.next()
        match replies:
            case [*_, Reply(event=Finished() | Failed() | Cancelled() as end)]:
                self._end = end
        return replies

    def refuse(self, message: str, code: str) -> RequestError:
        """Return the error for a request that the log did not take."""
        self._end = error = RequestError(message, code=code, status=503)
        return error

    def break_off(self) -> RequestError:
        """Log the exception that is being handled, a bug of ours, and return what the client is told of it."""
        logger.exception("request_broke", uid=self.uid)
        message = "The server failed on this request; that is our bug."
        self._broken = error = RequestError(message, code="internal_error", status=500)
        return error

    def log_line(self) -> None:
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
        logger.info("request", uid=self.uid, model=self.event.model, stream=self._stream, **line, total_ms=total_ms)


class Frontend:
    """One web process: what it listens to and what it has open."""

    def __init__(self, name: str, log: AsyncRedisLog, limits: Limits, say: Say) -> None:
        self.name = name
        self.tail = Tail(log, name)
        self.readiness = Readiness(log, self.tail, name, limits, self._say_unless_draining)
        self.draining = False
        self._log = log
        self.limits = limits
        self._say = say
        self._open: set[OpenRequest] = set()
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def log(self) -> AsyncRedisLog:
        """The log, for routes that ask it something else than a request."""
        return self._log

    async def run(self) -> None:
        """Listen to the log until cancelled."""
        await run_all(*self.tail.loops(), self.readiness.run())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run *work* in a task of its own, which nobody's end cancels."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @property
    def is_busy(self) -> bool:
        """Say whether a client is being answered, or something has yet to be said to the log."""
        return bool(self._open or self._background)

    def admit(self) -> None:
        """Let a new request in.

        Raises:
            RequestError: The process is going down.
        """
        if self.draining:
            raise RequestError("The server is shutting down; send it again later.", code="shutting_down", status=503)

    async def open(self, event: Submitted, *, stream: bool) -> OpenRequest:
        """Submit *event* and listen to it until the current task is done; what has not ended by then is cancelled.

        Raises:
            RequestError: The log does not take it.
        """
        opened = OpenRequest(self, event, stream=stream)
        self._open.add(opened)
        timeout_s = self.limits.timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, opened, timeout_s)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._close(opened, timer))
        try:
            submission = await asyncio.shield(opened.submission)
        except LogFull:
            raise opened.refuse("The log is full until running requests end; send it again.", "overloaded") from None
        except LogError as error:  # it may have got through all the same
            logger.warning("not_submitted", uid=opened.uid, error=str(error))
            self.spawn(self.end(opened, Cancelled(by="web")))
            raise opened.refuse("The log cannot be reached at the moment; send it again.", "overloaded") from None
        except Exception:
            raise opened.break_off() from None
        if submission is Submission.BUSY:
            raise opened.refuse("Too many requests are waiting; send it again.", "overloaded")
        return opened

    async def submit(self, uid: str, event: Submitted) -> Submission:
        """Begin the history of *uid*. Raises as the log does."""
        limits = self.limits
        return await self._log.submit(
            uid,
            event,
            timeout_ms=int(limits.timeout_s * 1000),
            retention_ms=int(limits.retention_s * 1000),
            max_queued=limits.max_queued,
        )

    async def end(self, opened: OpenRequest, event: End) -> None:
        """End the request in the log, unless it has ended, once its submit is over; try again while Redis is away."""
        await asyncio.wait({opened.submission})
        for _ in range(END_TRIES):
            try:
                retention_ms = int(self.limits.retention_s * 1000)
                await self._log.end(opened.uid, event, frontend=self.name, retention_ms=retention_ms)
                return
            except LogError as error:
                logger.warning("request_not_ended", uid=opened.uid, event_kind=event.kind, error=str(error))
                await asyncio.sleep(1)
        logger.error("request_never_ended", uid=opened.uid, event_kind=event.kind, tries=END_TRIES)
        if isinstance(event, Failed):
            opened.listener.fail(event.code, event.message, event.status)

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
        if not await self._is_idle_within(patience_s):
            message = "The server was shut down before the request was done; send it again."
            for opened in self._open:
                self.spawn(self.end(opened, Failed(status=503, code="shutting_down", message=message)))
            if not await self._is_idle_within(SHUT_DOWN_S):  # no Redis: then at least the clients are told
                for opened in self._open:
                    opened.listener.fail("shutting_down", message, 503)
                await self._is_idle_within(SHUT_DOWN_S)
        if self._background:
            await asyncio.wait(self._background, timeout=SHUT_DOWN_S)
        for task in self._background:
            task.cancel()

    async def _is_idle_within(self, patience_s: float) -> bool:
        deadline_s = time.monotonic() + patience_s
        while self._open and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        return not self._open

    def _close(self, opened: OpenRequest, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._open.discard(opened)
        opened.listener.close()
        if not opened.ended:
            self.spawn(self.end(opened, Cancelled(by="web" if opened.broken else "client")))
        opened.log_line()

    def _expire(self, opened: OpenRequest, timeout_s: float) -> None:
        message = f"The request took longer than {timeout_s:g} s (--request-timeout)."
        self.spawn(self._time_out(opened, Failed(status=504, code="timeout", message=message)))

    def _say_unless_draining(self, **changes: object) -> None:
        if not self.draining:
            self._say(**changes)
