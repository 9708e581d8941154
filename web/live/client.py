"""One HTTP client while it is answered: what it receives, how its answer ended, and its line in the log file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from pipeline.errors import RequestError
from pipeline.events import Answered, AnyEvent, Cancelled, End, Failed, Finished, Submitted, TokensProduced
from pipeline.names import sibling_uids
from web.live.listener import Listener, Push, Wake, live_events, next_of
from web.wire.frames import ClientEvent
from web.wire.openai.errors import CLIENT_CLOSED, error_of

logger = structlog.get_logger()


class Listen(Protocol):
    """`Tail.listen` or `Tail.follow`."""

    def __call__(self, uid: str, *, index: int, wake: Wake) -> Listener: ...


class Client:
    """A client that reads a request, or siblings, which another client sent."""

    def __init__(self, listen: Listen, uid: str, events: Sequence[Submitted]) -> None:
        self.listeners: Sequence[Listener] = ()
        """One for each of `events`."""
        self.reads: Sequence[str] = ()
        """The uids that count this client as a reader. A request is not cancelled while it has a reader."""
        self._since_s = time.monotonic()
        self._ends: dict[int, End] = {}
        self._failure: Failed | Cancelled | None = None
        """The first failure or cancellation; the client is told of this one."""
        self._refused: RequestError | None = None
        self._broken: RequestError | None = None
        self.subscribe(listen, uid, events)

    def subscribe(self, listen: Listen, uid: str, events: Sequence[Submitted]) -> None:
        """Answer the client from the requests that begin with *events*."""
        for listener in self.listeners:
            listener.close()
        self.uid = uid
        """The uid that the client knows. If siblings share it, it has no history of its own."""
        self.events = events
        """How each of the requests begins; all have the same endpoint, model and presentation."""
        wake, uids = Wake(), sibling_uids(uid, len(events))
        self.listeners = [listen(each, index=index, wake=wake) for index, each in enumerate(uids)]

    @property
    def event(self) -> Submitted:
        """How the first of the siblings begins."""
        return self.events[0]

    @property
    def is_stream(self) -> bool:
        """Return whether the answer is a stream."""
        return True

    @property
    def ended(self) -> bool:
        """Return whether all of its requests have ended in the log."""
        return self._refused is not None or len(self._ends) == len(self.listeners)

    @property
    def done(self) -> bool:
        """Return whether the answer is complete: all siblings have ended, or one has failed."""
        return self.ended or self._failure is not None

    @property
    def broken(self) -> bool:
        """Return whether a bug of ours ended the answer."""
        return self._broken is not None

    @property
    def unended(self) -> list[str]:
        """The uids whose end did not come yet."""
        return [listener.uid for index, listener in enumerate(self.listeners) if index not in self._ends]

    def has_failed_with(self, event: ClientEvent) -> bool:
        """Return whether *event* is the first failure among the siblings."""
        return event.event is self._failure

    def push_to(self, sink: Push) -> None:
        """Call *sink* when events come while `next` waits. It sends `came`, calls `take` and returns True. If it
        returns False, `next` returns the events."""
        self.listeners[0].wake.sink = sink

    @property
    def came(self) -> Sequence[ClientEvent]:
        """The events that can be sent at once; none while a history has to be read, or after an end."""
        return live_events(self.listeners)

    def take(self) -> None:
        """Remove the events of `came`, which were sent."""
        for listener in self.listeners:
            listener.queued.clear()

    async def next(self) -> list[ClientEvent]:
        """Wait for events and return them; return none if none came for 10 s."""
        while True:
            events, lost = await next_of(self.listeners)
            if lost:
                self.recover(lost)
            if events or not lost:
                for each in events:
                    if not isinstance(each.event, TokensProduced):
                        self._note(each.index, each.event)
                return events

    def _note(self, index: int, event: AnyEvent) -> None:
        if isinstance(event, End):
            self._ends[index] = event
        if isinstance(event, Failed | Cancelled):
            self._failure = self._failure or event

    def recover(self, lost: Sequence[Listener]) -> None:
        """Decide about requests that the log has lost: `resume` or `give_up` each of these listeners."""
        for listener in lost:
            if listener.may_come_back:
                listener.begin_again()
                listener.resume()
            else:
                listener.give_up()

    def fail(self, event: Failed) -> None:
        """End the answer of this client alone, if the log cannot or should not end the request."""
        for listener in self.listeners:
            listener.fail(event.code, event.message, event.status)

    def shut_down(self) -> None:
        """End the answer: this process stops. The request goes on."""
        again = "The server is shutting down; connect again."
        self.fail(Failed(status=503, code="shutting_down", message=again))

    def refuse(self, error: RequestError) -> RequestError:
        """Return *error*, for a request that the log did not take."""
        self._refused = error
        return error

    def break_off(self) -> RequestError:
        """Log the current exception, a bug of ours, and return the error for the client."""
        logger.exception("request_broke", uid=self.uid)
        message = "The server failed on this request; that is our bug."
        self._broken = error = RequestError(message, code="internal_error", status=500)
        return error

    @property
    def cut_short(self) -> str:
        """Why the answer is incomplete, a label of DISCONNECTS; empty if it is complete, or was refused."""
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

    def log_line(self, **fields: object) -> None:
        """Write the one log line of this client."""
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
            line |= {"status": 200} | _counts_of([*self._ends.values()], self.events)
        total_ms = round((time.monotonic() - self._since_s) * 1000)
        logger.info("request", uid=self.uid, model=self.event.model, **fields, **line, total_ms=total_ms)


def _counts_of(ends: Sequence[End], events: Sequence[Submitted]) -> dict[str, object]:
    """Return the counts of the log line, for requests that ended well."""
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
