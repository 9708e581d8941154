"""The life of one HTTP request that generates, from its submit to the last byte of its answer.

One body may become several requests of the log, siblings: one for each choice and prompt. They are submitted together.
If one of them fails, the client is told so and the others are cancelled.

A client that leaves is noticed as the end of the task that answers it. Then the requests that have not ended, and that
no other client reads, are cancelled in the log, after a period of grace. A task of its own does that: a task that is
being cancelled cannot wait for Redis. A client that came to a request under its idempotency key cancels it by leaving
only if the client that sent it has left before. A client that reads the events of a request cancels nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from pipeline.errors import LogError, LogFull, LogUnavailable, RequestError, UndecodableEvent
from pipeline.events import Cancelled, End, Failed, Finished, Submitted, decode, new_uid
from pipeline.log.protocol import Once, Quota, Submission, SubmitResult
from pipeline.metrics.families import COMMIT_SECONDS, MAX_GENERATION_TOKENS, PARAMS_MAX_TOKENS, PARAMS_N
from pipeline.names import SEAL, SUBMITTED_ID, sibling_uids
from pipeline.process.failpoints import failpoint
from pipeline.recording import Recording
from web.http.keys import shown
from web.live.client import Client
from web.live.frontend import SHUTTING_DOWN, Frontend, reaching
from web.live.listener import Listener, Wake
from web.live.lookup import Lookup, told
from web.live.refusals import REFUSALS, refusal

logger = structlog.get_logger()

END_TRIES = 30
"""How often, a second apart, this process tries to end a request while Redis is away; after that, the engine computes
the rest of the answer for nobody."""
FOUND_COUNTS_S = 1.0
"""A request that is lost so soon after a second submit found it has lost siblings alone, and cannot go on."""
LOG_PATIENCE_S = 2.0
"""How long the log has to say that a request is past its deadline, before its client is told without it."""


async def open_request(
    frontend: Frontend, events: Sequence[Submitted], *, once: Once | None = None, quota: Quota | None = None
) -> OpenRequest:
    """Submit *events*, all or none, and listen to them until the current task is done; requests that have not ended by
    then are cancelled.

    With *once*, the client is answered from the request that was submitted under that key before, from its start,
    unless it is gone or ended in vain. With *quota*, the request counts as sent by that API key.

    Raises:
        RequestError: The log does not take it.
    """
    if len(events) > frontend.limits.max_queued:
        most = f"{frontend.limits.max_queued} (--max-queued-requests)"
        raise RequestError(f"n: these prompts and choices make {len(events)} answers; at most {most}", param="n")
    opened = OpenRequest(frontend, events, once=once, quota=quota)
    timeout_s = frontend.limits.timeout_s
    timer = asyncio.get_running_loop().call_later(timeout_s, lambda: frontend.spawn(opened.expire(timeout_s)))
    frontend.enter(opened, functools.partial(opened.leave, timer))
    await opened.submit()
    return opened


async def read_request(frontend: Frontend, uid: str, event: Submitted, *, whole: bool) -> Client:
    """Listen to a request that is already there, as Tail.follow, until the current task is done. Cancels nothing.

    Raises:
        RequestError: The log cannot be reached.
    """
    client = Client(functools.partial(frontend.tail.follow, whole=whole), uid, [event])
    frontend.enter(client, lambda: frontend.drop(client, reader=True))
    try:
        with reaching("reader_not_begun", uid=uid):
            await frontend.begin_reading(client, [uid])
    except RequestError as error:
        raise client.refuse(error) from None
    return client


def read_archived(frontend: Frontend, recording: Recording, event: Submitted, *, whole: bool) -> Client:
    """Answer from the archive, as `read_request` from the log, until the current task is done."""

    def listen(uid: str, *, index: int, wake: Wake) -> Listener:
        return told(uid, recording.entries, whole=whole, index=index, wake=wake)

    client = Client(listen, recording.uid, [event])
    frontend.enter(client, lambda: frontend.drop(client, reader=True, archived=True))
    return client


async def read_found(frontend: Frontend, uid: str, found: Lookup, *, whole: bool) -> Client:
    """Answer from where a request was found, as `read_request`."""
    if found.archived is None:
        return await read_request(frontend, uid, found.submitted, whole=whole)
    return read_archived(frontend, found.archived, found.submitted, whole=whole)


class OpenRequest(Client):
    """A client that sends a request, or comes to the one that was sent under its idempotency key before."""

    submission: asyncio.Task[SubmitResult]

    def __init__(
        self, frontend: Frontend, events: Sequence[Submitted], *, once: Once | None, quota: Quota | None
    ) -> None:
        """Listen, under a new uid, before the submit: so no reply is missed."""
        super().__init__(frontend.tail.listen, new_uid(), events)
        self.attached = False
        """Another client sent the request."""
        if self.event.frontend != frontend.tail.frontend:  # renamed since the event was made
            for listener in self.listeners:
                listener.follow()
        self._frontend = frontend
        self._once = once
        self._quota = quota
        self._num_bytes = 0
        """Size of its texts."""
        self._kept_bytes: int | None = None
        """Size of what can be submitted again; None: nothing."""
        self._found_s = -math.inf
        """Time when a second submit found the request."""

    @property
    def is_stream(self) -> bool:
        """As Client.is_stream."""
        return self.event.presentation.stream

    # submit

    async def submit(self) -> None:
        """Submit the request, or find the one to be answered from. Raises RequestError if the log does not take it."""
        once = self._once
        while True:
            self.submission = self._frontend.spawn(self._submit(once, self._quota))
            try:
                submitted = await asyncio.shield(self.submission)
            except LogFull:
                raise self._refusal(LogFull) from None
            except LogError as error:  # Redis may have accepted it all the same
                logger.warning("not_submitted", uid=self.uid, error=str(error))
                self._frontend.spawn(self._abandon((), by="web"))  # unless a client has come to it under its key
                raise self._refusal(LogError) from None
            except Exception:
                raise self.break_off() from None
            if submitted.submission is Submission.UNACKNOWLEDGED and submitted.uid == self.uid:
                self._frontend.spawn(self._abandon((), by="web"))  # likewise
            if submitted.submission in REFUSALS:
                raise self._refusal(submitted)
            if submitted.submission is not Submission.ATTACH or once is None:
                if self.event.task == "generate":  # the others end at once, and tell nothing about free room
                    self._frontend.retry_after.begun(self)
                    self._keep()
                return
            if await self._attach(submitted.uid):
                return
            once = dataclasses.replace(once, instead_of=submitted.uid)

    async def _submit(self, once: Once | None, quota: Quota | None = None, *, again: bool = False) -> SubmitResult:
        """Begin the histories of the request, *again* if the log had accepted it. Raises as the log does."""
        failpoint("web.before_submit")
        began_s, log = time.perf_counter(), self._frontend.log
        left_ms = max(self._left_ms, 1) if again else None
        with self._frontend.budget.submitting(again=again) as has_room:

            def has_room_for(num_bytes: int) -> bool:
                self._num_bytes = num_bytes
                return has_room(num_bytes)

            submitted = await log.submit(
                self.uid, self.events, once, quota=quota, has_room=has_room_for, left_ms=left_ms
            )
        self._frontend.measures.observe(COMMIT_SECONDS, time.perf_counter() - began_s, "submit")
        failpoint("web.after_submit")
        return submitted

    def _refusal(self, outcome: SubmitResult | type[LogError]) -> RequestError:
        """Count that the request was not taken, and return the error for the client."""
        return self.refuse(refusal(self._frontend, outcome, self._quota))

    async def _attach(self, uid: str) -> bool:
        """Subscribe to the request *uid* of another client, unless it is gone or ended in vain. Return whether it did.

        Raises:
            RequestError: The log cannot be reached.
        """
        frontend, uids = self._frontend, sibling_uids(uid, len(self.events))  # as many: the body is the same
        try:
            with reaching("not_attached", uid=uid):
                await frontend.begin_reading(self, uids)  # before the lookup, so that no client cancels it afterwards
                look = frontend.log.entries
                found = [await frontend.ask(look(each, (SUBMITTED_ID, SEAL), whole=each == uids[0])) for each in uids]
            first = [decode(entries[SUBMITTED_ID].fields) for entries in found[:1] if SUBMITTED_ID in entries]
            ends = [decode(entries[SEAL].fields) for entries in found if SEAL in entries]
        except UndecodableEvent:
            raise self.break_off() from None
        except RequestError as error:
            raise self.refuse(error) from None
        in_vain = any(isinstance(end, Cancelled) or (isinstance(end, Failed) and end.status >= 500) for end in ends)
        events = [event for event in first if isinstance(event, Submitted)] * len(uids)  # they differ in what is asked
        # Keys do not share what they send. An older version did not say whose a request is.
        is_others = any(event.owner not in ("", self.event.owner) for event in events)
        if not events or in_vain or is_others or not all(SUBMITTED_ID in entries for entries in found):
            frontend.stop_reading(self)
            return False
        self.subscribe(frontend.tail.follow, uid, events)
        self.attached = True
        return True

    def _keep(self) -> None:
        """Keep the texts of the request, to submit it again; or forget them, if those of all requests are too many."""
        if self._frontend.budget.keep(self._num_bytes):
            self._kept_bytes = self._num_bytes
            return
        self.events = [
            event.model_copy(
                update={
                    "messages": event.messages[:1] if event.presentation.echoes else (),  # a response has the first
                    "prompt": "",
                    "prompt_ids": (),
                    "prediction": "",
                }
            )
            for event in self.events
        ]

    @property
    def _left_ms(self) -> int:
        """Time until the deadline."""
        return self._frontend.limits.timeout_ms - int((time.monotonic() - self._since_s) * 1000)

    @property
    def _may_begin_again(self) -> bool:
        """Whether the same answer comes if the request is submitted again, as far as its client has that."""
        is_kept = self._kept_bytes is not None or self.event.task != "generate"
        if not is_kept or self._left_ms <= 0 or time.monotonic() - self._found_s < FOUND_COUNTS_S:
            return False
        if not any(listener.has_begun for listener in self.listeners):
            return True
        is_expired = any(listener.is_slow for listener in self.listeners)
        return self._frontend.readiness.batch_invariant and not is_expired

    def recover(self, lost: Sequence[Listener]) -> None:
        """Submit again what the log has lost, with its siblings, if the same tokens come: its client need not know.
        Else give up."""
        if self.attached:
            super().recover(lost)
            return
        if not self._may_begin_again:
            for listener in lost:
                listener.give_up()
            return
        for listener in self.listeners:
            listener.begin_again()
        for listener in lost:
            listener.resume()
        if self.submission.done():
            logger.warning("submitted_again", uid=self.uid)
            self.submission = self._frontend.spawn(self._submit(self._once, self._quota, again=True))
            self.submission.add_done_callback(self._submitted_again)

    def _submitted_again(self, submission: asyncio.Task[SubmitResult]) -> None:
        """Go on listening, or end the stream of a client whose request the log does not take once more."""
        error = None if submission.cancelled() else submission.exception()
        if error is not None and not isinstance(error, LogError):
            logger.error("request_broke", uid=self.uid, exc_info=error)
        if error is None:
            if submission.result().submission is Submission.DUPLICATE:
                self._found_s = time.monotonic()
            for listener in self.listeners:
                listener.check()
        elif not isinstance(error, LogUnavailable):  # the next read of the history tries again
            for listener in self.listeners:
                listener.give_up()

    # the end

    async def end(self, event: End) -> None:
        """End the request in the log, unless it has ended, once its submit is over; try again while Redis is away."""
        uids = self.unended  # now: `fail` below would add ends that are not in the log

        async def end() -> None:
            log, frontend = self._frontend.log, self.event.frontend
            for uid in uids:
                if await log.end(uid, event, frontend=frontend):
                    self._frontend.count_end(event)

        if not await self._try_to_end(event, end) and isinstance(event, Failed):
            self.fail(event)

    async def _try_to_end(self, event: End, way: Callable[[], Awaitable[None]]) -> bool:
        """Call *way*, which ends the request, until the log has accepted it. Return whether it has."""
        await asyncio.wait({self.submission})
        for _ in range(END_TRIES):
            try:
                await way()
                return True
            except LogError as error:
                logger.warning("request_not_ended", uid=self.uid, event_kind=event.kind, error=str(error))
                await asyncio.sleep(1)
        logger.error("request_never_ended", uid=self.uid, event_kind=event.kind, tries=END_TRIES)
        return False

    async def expire(self, timeout_s: float) -> None:
        """End the request, past its deadline, in the log; if that takes long, tell the client without the log."""
        message = f"The request took longer than {timeout_s:g} s (--request-timeout)."
        event = Failed(status=504, code="timeout", message=message)
        ended = self._frontend.spawn(self.end(event))
        _, late = await asyncio.wait({ended}, timeout=LOG_PATIENCE_S)
        if late:
            self.fail(event)

    def shut_down(self) -> None:
        """As Client.shut_down; a request that this client sent fails."""
        if self.attached:
            super().shut_down()
        else:
            self._frontend.spawn(self.end(SHUTTING_DOWN))

    def leave(self, timer: asyncio.TimerHandle) -> None:
        """Note that the client is answered or has left, and end the requests that no client needs."""
        timer.cancel()
        self._frontend.retry_after.ended(self)
        self._frontend.budget.let_go(self._kept_bytes or 0)
        attached_to = self.reads  # it may not be subscribed to them yet
        self._frontend.drop(self)
        if self.ended:
            self._measure()
            return
        failpoint("web.on_disconnect")
        if self.broken and not attached_to:
            self._frontend.spawn(self.end(Cancelled(by="web")))
        elif self._failure is not None:  # no client resumes the siblings of a failed request
            self._frontend.spawn(self._abandon(attached_to))
        else:
            self._frontend.after_grace(functools.partial(self._abandon, attached_to))

    def _measure(self) -> None:
        """Count what the client asked for, as vLLM does it, if all choices have finished."""
        finished = [end for _, end in sorted(self._ends.items()) if isinstance(end, Finished)]
        if self.attached or len(finished) < len(self.events):
            return
        observe, choices = self._frontend.measures.observe, self.event.presentation.choices
        lengths = [end.usage.completion_tokens for end in finished]
        for first in range(0, len(lengths), choices):
            observe(PARAMS_N, choices)
            observe(MAX_GENERATION_TOKENS, max(lengths[first : first + choices]))
        if self.event.sampling.max_tokens is not None:
            observe(PARAMS_MAX_TOKENS, self.event.sampling.max_tokens, times=len(finished))

    async def _abandon(self, attached_to: Sequence[str], by: str = "client") -> None:
        """Cancel the own request, or the one that this client is *attached_to*, unless another client reads it."""
        uids, event = attached_to or self.unended, Cancelled(by=by)
        refused = isinstance(self._failure, Failed) and self._failure.status < 500

        async def abandon() -> None:
            for uid in uids:
                await self._frontend.readers.tell(uid)  # whether a client of this process still reads it
                abandoned = await self._frontend.log.abandon(
                    uid,
                    event,
                    frontend=self.event.frontend,
                    once=self._once,
                    attached=bool(attached_to),
                    refused=refused,
                )
                if abandoned:
                    self._frontend.count_end(event)

        await self._try_to_end(event, abandon)

    def log_line(self, **fields: object) -> None:
        """As Client.log_line."""
        sender = {"key": shown(self._quota.key)} if self._quota else {}
        attached = {"attached": True} if self.attached else {}
        super().log_line(stream=self.is_stream, **sender, **fields, **attached)


async def submit_without_client(
    frontend: Frontend, event: Submitted, quota: Quota | None = None, *, letter: str = "", once: Once | None = None
) -> SubmitResult:
    """Submit *event*, or find the request that was submitted under the key *once* before. With *quota*, it counts as
    sent by that API key.

    Where it sends the dead letter *letter* again, that is dropped.

    Raises:
        RequestError: The log does not take it.
    """
    uid = new_uid()
    try:
        with frontend.budget.submitting() as has_room:
            submitted = await frontend.ask(
                frontend.log.submit(uid, [event], once, quota=quota, letter=letter, has_room=has_room)
            )
    except LogFull:
        raise refusal(frontend, LogFull, quota) from None
    except LogError as error:
        logger.warning("not_submitted", uid=uid, error=str(error))
        # It may have got through. Then it may be all that is left of the letter, or found under its key.
        if not letter and once is None:
            frontend.spawn(_take_back(frontend, uid))
        raise refusal(frontend, LogError, quota) from None
    if submitted.submission is Submission.UNACKNOWLEDGED and submitted.uid == uid and once is None:
        frontend.spawn(_take_back(frontend, uid))  # with a key, another client may have come to it and have its answer
    if submitted.submission in REFUSALS:
        raise refusal(frontend, submitted, quota)
    return submitted


async def _take_back(frontend: Frontend, uid: str) -> None:
    """End a request that may have got through all the same."""
    try:
        await frontend.log.end(uid, Cancelled(by="web"), frontend="")
    except LogError as error:
        logger.warning("request_not_ended", uid=uid, event_kind="cancelled", error=str(error))
