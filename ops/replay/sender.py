"""Sends recorded requests to a server, over HTTP: traffic, each request when it is due, and keeps what came of each;
or single requests, which another MiniSGL server computes again.

From our own server it reads the histories of the new requests; those of traffic one at a time and late, because the
server has requests to answer. From another server it knows what the stream and its own clock say.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from ops.bench.load import DONE, Arrival, Client, ServerRefused, connected, read_stream, text_of
from ops.replay.traffic import CANCELLED, FAILED, Form, Outcome, Planned, outcome_of, outcome_seen
from ops.shell.server import UID, base_of
from ops.sse_reader import Frame, FrameReader, frames_in
from pipeline.events import HistoryEvent, Submitted
from pipeline.log.protocol import Entry
from pipeline.names import sibling_uids
from pipeline.recording import Recording
from pipeline.replaying import NotComputed
from pipeline.views.recorded import History
from web.wire import copies
from web.wire.constraints import constraint_fields
from web.wire.sglang.schemas import WITHIN

LEAD_S: Final = 0.2
"""The first request is sent so long after the start."""
LOOP_LATE_S: Final = 0.001
"""The event loop rounds a sleep up to a whole millisecond; the rest of the time before a request it does not sleep."""
READ_AFTER_S: Final = 300.0
"""So long after its end, at most, the history of a request is read. By default a server keeps it for 900 s."""
HIGHEST: Final = 2**31 - 1
"""The lowest priority that a client can ask for."""
EVENTS: Final[TypeAdapter[HistoryEvent]] = TypeAdapter(Annotated[HistoryEvent, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Sent:
    """A planned body that was sent, and what came of it."""

    planned: Planned
    late_s: float
    """Actual minus planned time of sending."""
    uids: tuple[str, ...]
    """Of the new requests; none if the server does not tell them."""
    after: tuple[Outcome | None, ...]
    """One for each recorded request; None: its history could not be read."""
    unread: str = ""
    """Why not."""


def not_sent(planned: Planned, reason: str) -> Sent:
    """Return what came of a body that was not sent because the server could not be reached."""
    return Sent(planned, 0.0, (), (Outcome(FAILED, error=reason),) * len(planned.uids))


class _Left(Exception):
    """The client has as much of the answer as the recorded client had when it left."""


async def send_all(
    client: Client, planned: Sequence[Planned], *, is_ours: bool, after_each: Callable[[Planned], None]
) -> list[Sent]:
    """Send *planned*, which come earliest first, each when it is due; call *after_each* when it is answered."""
    sender = _Sender(client, is_ours, len(planned), after_each)
    began_s = time.perf_counter() + LEAD_S
    tasks = []
    async with asyncio.TaskGroup() as group:
        for one in planned:
            due_s = began_s + one.due_s
            await asyncio.sleep(due_s - LOOP_LATE_S - time.perf_counter())
            while time.perf_counter() < due_s:
                await asyncio.sleep(0)
            tasks.append(group.create_task(sender.send(one, due_s)))
    return [task.result() for task in tasks]


class _Sender:
    def __init__(self, client: Client, is_ours: bool, num_planned: int, after_each: Callable[[Planned], None]) -> None:
        self._client = client
        self._is_ours = is_ours
        self._num_unanswered = num_planned
        self._all_answered = asyncio.Event()
        self._after_each = after_each
        self._reading = asyncio.Lock()

    async def send(self, planned: Planned, due_s: float) -> Sent:
        """Send one body; return what came of it."""
        late_s = time.perf_counter() - due_s
        received = await self._receive(planned)
        self._num_unanswered -= 1
        if not self._num_unanswered:
            self._all_answered.set()
        self._after_each(planned)
        uids = sibling_uids(received.uid, len(planned.uids)) if received.uid else ()
        if not self._is_ours or not uids:  # a request that is refused, or left early, may have no uid
            return Sent(planned, late_s, uids, received.outcomes(len(planned.uids)))
        return await self._read(planned, late_s, uids, received)

    async def _receive(self, planned: Planned) -> _Received:
        leave = planned.leave
        seen = _Seen(planned.form, leave.characters) if leave and leave.characters else None
        received = _Received(time.perf_counter())

        def begun(headers: Mapping[str, str]) -> None:
            received.uid = headers.get(UID, "")

        def came(arrival: Arrival, _: object) -> None:
            if not self._is_ours:
                received.arrivals.append(arrival)
            if seen is not None and seen.is_enough(arrival[1]):
                raise _Left

        try:
            async with asyncio.timeout(leave.after_s if leave and seen is None else None):
                received.error = await self._client.receive(planned.path, planned.body, came, begun, planned.headers)
        except (_Left, TimeoutError):
            received.left = True
        return received

    async def _read(self, planned: Planned, late_s: float, uids: tuple[str, ...], received: _Received) -> Sent:
        """Read the histories of new requests that have ended, or that end because their client is gone."""
        try:
            if received.left or received.error:  # reading would keep alive what nobody cancelled yet
                await self._client.content("DELETE", f"/v1/requests/{received.uid}")
            if not received.error:  # a server forgets refused requests soon
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._all_answered.wait(), READ_AFTER_S)
            async with self._reading:
                outcomes = [await self._history(uid) for uid in uids]
        except ServerRefused as refused:
            return Sent(planned, late_s, uids, (None,) * len(uids), str(refused))
        if received.error:
            outcomes = [dataclasses.replace(one, error=one.error or received.error) for one in outcomes]
        return Sent(planned, late_s, uids, tuple(outcomes))

    async def _history(self, uid: str) -> Outcome:
        frames = await _history_of(self._client, uid)
        try:
            return outcome_of(EVENTS.validate_json(frame.data) for frame in frames)
        except ValidationError:
            raise ServerRefused(f"{self._client.url}: what it says of {uid} are not the events of a request") from None


@dataclass(slots=True)
class _Received:
    """What the client of one body got."""

    sent_s: float
    arrivals: list[Arrival] = dataclasses.field(default_factory=list)
    """None of our own server: its histories have the answers."""
    uid: str = ""
    left: bool = False
    error: str = ""

    def outcomes(self, num_choices: int) -> tuple[Outcome, ...]:
        """Return what the client saw of each choice."""
        if self.error:
            return (Outcome(FAILED, error=self.error),) * num_choices
        if self.left and not self.arrivals:
            return (Outcome(CANCELLED, by_client=True),) * num_choices
        choices = range(num_choices) if num_choices > 1 else [None]
        answers = [read_stream(self.sent_s, self.arrivals, choice=choice, needs_usage=False) for choice in choices]
        return tuple(outcome_seen(answer, left=self.left) for answer in answers)


class _Seen:
    """Counts the characters of an answer while they come, those of all choices together."""

    def __init__(self, form: Form, enough: int) -> None:
        self._form = form
        self._enough = enough
        self._reader = FrameReader()
        self._counts: dict[int, int] = {}
        """For each choice."""

    def is_enough(self, data: bytes) -> bool:
        """Take in a piece of the stream; say whether it is enough."""
        for frame in self._reader.feed(data):
            if self._form == "text":
                self._add(0, frame.data)
                continue
            with contextlib.suppress(orjson.JSONDecodeError):  # [DONE]
                chunk = orjson.loads(frame.data)
                if isinstance(chunk, dict):
                    self._take(chunk)
        return sum(self._counts.values()) >= self._enough

    def _take(self, chunk: Mapping[str, Any]) -> None:
        if self._form == "whole":
            self._counts[chunk.get("index", 0)] = _num_characters(chunk.get("text") or "")
        for choice in chunk.get("choices") or ():
            self._add(choice.get("index", 0), text_of(choice))

    def _add(self, index: int, text: str) -> None:
        self._counts[index] = self._counts.get(index, 0) + _num_characters(text)


def _num_characters(text: str) -> int:
    return len(text.replace("\r\n", "\n"))


async def _history_of(client: Client, uid: str) -> list[Frame]:
    """Return the events of a request of our own server."""
    content = await client.content("GET", f"/v1/requests/{uid}/events?format=events")
    return [frame for frame in frames_in(content) if frame.data != DONE]


class RemoteComputer:
    """Has requests computed by the server at *url*, as a client of /v1/completions."""

    def __init__(self, url: str, api_key: str, *, at_once: int, timeout_s: float) -> None:
        """Raises ConfigError if *url* is not the URL of a server."""
        self._url = base_of(url)
        self._connected = partial(connected, self._url, api_key=api_key, timeout_s=timeout_s)
        self._at_once = at_once

    def compute(self, events: Sequence[Submitted]) -> list[History]:
        """Return the histories of *events*, which that server writes.

        Raises:
            NotComputed: The server cannot be reached, refuses one of them, or is no MiniSGL server.
        """
        return asyncio.run(self._compute(events))

    def models(self) -> list[str]:
        """Return the names of the models that the server lists; none if it does not."""
        return asyncio.run(self._models())

    async def _models(self) -> list[str]:
        async with self._connected() as client:
            try:
                return [str(each["id"]) for each in (await client.document("GET", "/v1/models"))["data"]]
            except (ServerRefused, KeyError, TypeError):
                return []  # what becomes of the requests says why

    async def _compute(self, events: Sequence[Submitted]) -> list[History]:
        turns = asyncio.Semaphore(self._at_once)
        async with self._connected() as client:
            try:
                return await asyncio.gather(*(self._one(client, turns, event) for event in events))
            except ServerRefused as refused:
                raise NotComputed(f"--url {refused}") from refused

    async def _one(self, client: Client, turns: asyncio.Semaphore, event: Submitted) -> History:
        uid = ""

        def begun(headers: Mapping[str, str]) -> None:
            nonlocal uid
            uid = headers.get(UID, "")

        async with turns:
            body = orjson.dumps(body_of(event))
            error = await client.receive("/v1/completions", body, lambda *_: None, begun, _headers(event))
            if not uid:
                raise NotComputed(
                    f"--url {self._url}: {error or 'it answered without a uid, so it is no MiniSGL server'}"
                )
            frames = await _history_of(client, uid)
        entries = (Entry(frame.id, _fields(frame.data)) for frame in frames if frame.id)  # the last one says: over
        return History(Recording(uid, tuple(entries)))


def body_of(event: Submitted) -> dict[str, Any]:
    """Return the body for /v1/completions that asks for the same tokens as *event*."""
    sampling = event.sampling.model_dump(mode="json", exclude_none=True)
    sampling["logit_bias"] = {str(token): value for token, value in event.sampling.logit_bias}
    longest = sampling.pop("max_tokens", None)
    body = {name: value for name, value in sampling.items() if value not in ([], {})}
    body |= {"n_predict": -1} if longest is None else {"max_tokens": longest}
    body |= constraint_fields(event.constraint, WITHIN)
    if "user" in event.labels:  # `replay forget --user` must find it there
        body["user"] = event.labels["user"]
    return {"prompt": list(event.prompt_ids), "priority": HIGHEST, **body}


def _headers(event: Submitted) -> dict[str, str]:
    """Return how `replay forget` finds the request there when the recorded one is to be removed."""
    return {copies.HEADER: event.replay.of} if event.replay is not None else {}


def _fields(data: str) -> dict[str, str]:
    """Return the fields of the entry that a frame holds."""
    values = orjson.loads(data)
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in values.items()}
