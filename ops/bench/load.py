"""Sends conversations to an OpenAI server and keeps the arrival time of every byte. Knows HTTP and time, not why.

Client and server often share their cores. So a running stream is only kept, with times, and parsed when it has ended.
Tokens are counted from `usage`: a chunk may hold several.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import aiohttp
import orjson

from ops.bench.datasets import Session, Turn, Writer
from ops.shell.refusals import refusal_in, refusal_of
from ops.sse_reader import Frame, FrameReader
from pipeline.errors import MiniSGLError

CHAT: Final = "chat"
COMPLETIONS: Final = "completions"
CHAT_PROMPT: Final = "chat-prompt"
"""Mini-SGLang's chat completion: the model gets `prompt` as it is."""
PATHS: Final = {
    CHAT: "/v1/chat/completions",
    COMPLETIONS: "/v1/completions",
    CHAT_PROMPT: "/v1/chat/completions",
}
DONE: Final = "[DONE]"
FIX_LENGTH: Final = ("ignore-eos", "min-tokens", "no")
CONNECT_TIMEOUT_S: Final = 10.0
NO_CONNECTION: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
LONGEST_ERROR: Final = 300
NOT_SENT: Final = "not sent: an earlier turn of its conversation failed"

Message = dict[str, str]
Arrival = tuple[float, bytes]
"""A piece of a stream and its arrival time, by `time.perf_counter`."""


class ServerRefused(MiniSGLError):
    """The server cannot be reached, or refuses a request that comes before the measurement."""


class Unreachable(ServerRefused):
    """No connection to the server comes about."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Form:
    """The common part of all requests of a run."""

    endpoint: str
    model: str
    fix_length: str = FIX_LENGTH[0]
    """The field that makes the server write exactly `max_tokens`."""
    fields: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})

    def body(self, messages: Sequence[Message], max_tokens: int | None, *, stream: bool) -> bytes:
        """Return the body of one request. None: there is no limit but the context."""
        fields: dict[str, Any] = {"model": self.model, **self.fields}
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        if self.endpoint == CHAT:
            fields["messages"] = list(messages)
        else:
            fields["prompt"] = "\n".join(message["content"] for message in messages)
        if self.fix_length == "ignore-eos":
            fields["ignore_eos"] = True
        elif self.fix_length == "min-tokens":
            fields["min_tokens"] = max_tokens
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return orjson.dumps(fields)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request. Times are of `time.perf_counter`."""

    sent_s: float
    ended_s: float
    content_s: tuple[float, ...] = ()
    """When each chunk with text came; for an answer without text, when it was finished."""
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reason: str = ""
    """The `finish_reason`."""
    error: str = ""
    """Empty if the answer is complete."""

    @property
    def ttft_ms(self) -> float:
        """Time to the first text."""
        return (self.content_s[0] - self.sent_s) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first; None if the answer has one token."""
        if self.output_tokens < 2:
            return None
        return (self.content_s[-1] - self.content_s[0]) * 1000 / (self.output_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Times between chunks with text."""
        return [(later - earlier) * 1000 for earlier, later in pairwise(self.content_s)]

    @property
    def e2e_ms(self) -> float:
        """Time to the end of the stream."""
        return (self.ended_s - self.sent_s) * 1000


@dataclass(frozen=True, slots=True)
class Measured:
    """One turn of a session: the plan and the result."""

    session: int
    turn: int
    input_tokens: int
    output_tokens: int
    lag_s: float
    """How late it was sent; 0 if it had no due time."""
    answer: Answer


@contextlib.asynccontextmanager
async def connected(url: str, *, api_key: str = "", timeout_s: float) -> AsyncIterator[Client]:
    """Give a client; *timeout_s* is the longest silence within an answer, which has no limit as a whole."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        yield Client(url.rstrip("/").removesuffix("/v1"), session)


@dataclass(frozen=True, slots=True)
class Client:
    """A server, with one connection for each concurrent request."""

    url: str
    session: aiohttp.ClientSession

    async def served_model(self) -> str:
        """Return the first name in /v1/models.

        Raises:
            ServerRefused: There is none.
        """
        document = await self.document("GET", "/v1/models")
        try:
            return str(document["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerRefused(f"{self.url}/v1/models names no model; pass --model") from None

    async def numerics(self) -> str:
        """Return how the engines of the server compute, as MiniSGL's /version says it; "" of another server."""
        try:
            document = await self.document("GET", "/version")
            return ", ".join(sorted({str(engine["numerics"]) for engine in document["engines"]}))
        except (ServerRefused, KeyError, TypeError):
            return ""

    async def prompt_tokens(self, form: Form, text: str) -> int:
        """Return the server's token count of *text* as a first turn.

        Raises:
            ServerRefused: It does not answer, or without `usage`.
        """
        body = form.body([{"role": "user", "content": text}], 1, stream=False)
        document = await self.document("POST", PATHS[form.endpoint], body)
        try:
            return int(document["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError):
            raise ServerRefused(
                f"{self.url}{PATHS[form.endpoint]} answers without `usage`, from which tokens are counted"
            ) from None

    async def document(self, method: str, path: str, body: bytes = b"") -> Any:
        """Return the JSON that the server answers.

        Raises:
            ServerRefused: It answers with an error, with something else, or not at all.
            Unreachable: It cannot be reached; this is a ServerRefused, too.
        """
        try:
            return orjson.loads(await self.content(method, path, body))
        except orjson.JSONDecodeError:
            raise ServerRefused(f"{self.url}{path}: the answer is not JSON") from None

    async def content(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return what the server answers. Raises ServerRefused as `document`, but for what is not JSON."""
        try:
            async with self.session.request(method, self.url + path, data=body or None) as response:
                content = await response.read()
                if response.status != 200:
                    raise ServerRefused(f"{self.url}{path}: {refusal_of(response.status, content).message}")
                return content
        except NO_CONNECTION as error:
            raise Unreachable(self.url, broken(error)) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerRefused(f"{self.url}: {broken(error)}") from None

    async def stream(
        self, form: Form, messages: Sequence[Message], max_tokens: int | None, arrivals: list[Arrival] | None = None
    ) -> Answer:
        """Send one request and return its result, also if it failed. What comes is added to *arrivals*."""
        body = form.body(messages, max_tokens, stream=True)
        arrivals = [] if arrivals is None else arrivals
        sent_s = time.perf_counter()
        error = await self.receive(PATHS[form.endpoint], body, lambda arrival, _: arrivals.append(arrival))
        return Answer(sent_s, time.perf_counter(), error=error) if error else read_stream(sent_s, arrivals)

    async def receive(
        self,
        path: str,
        body: bytes,
        came: Callable[[Arrival, Mapping[str, str]], None],
        begun: Callable[[Mapping[str, str]], None] = lambda headers: None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Send *body*; give the headers of any answer to *begun*, and each piece of a good one, with the headers, to
        *came*. Return why it failed, or ""."""
        try:
            async with self.session.post(self.url + path, data=body, headers=headers) as response:
                begun(response.headers)
                if response.status != 200:
                    return refusal_of(response.status, await response.read()).message
                while data := await response.content.readany():
                    came((time.perf_counter(), data), response.headers)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return broken(error)
        return ""


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_ERROR else f"{line[:LONGEST_ERROR]}.."


def broken(error: Exception) -> str:
    """Return in one line what came of a connection."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return _one_line(f"cannot connect: {os.strerror(error.errno) if error.errno else error}")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"cannot connect: no answer within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, TimeoutError):
        return "no data within --timeout"
    return _one_line(f"the connection broke: {error or type(error).__name__}")


def timed_frames(arrivals: Iterable[Arrival]) -> Iterator[tuple[float, Frame]]:
    """Yield the frames of a stream, each with the time of the piece that completes it."""
    reader = FrameReader()
    for came_s, data in arrivals:
        for frame in reader.feed(data):
            yield came_s, frame


def text_of(choice: Mapping[str, Any]) -> str:
    """Return the new text that one choice of a chunk brings."""
    return (choice.get("delta") or {}).get("content") or choice.get("text") or ""


def read_stream(
    sent_s: float, arrivals: Sequence[Arrival], *, choice: int | None = None, needs_usage: bool = True
) -> Answer:
    """Return the answer that the pieces of a stream make. Of several choices, only *choice*, whose tokens are not
    counted. Unless it *needs_usage*, a stream without token counts is a good answer of 0 tokens.
    """
    ended_s = arrivals[-1][0] if arrivals else sent_s
    chunks = _Chunks(choice)
    for came_s, frame in timed_frames([*arrivals, (ended_s, b"\n\n")]):  # some servers leave out the last blank line
        if frame.data != DONE and not chunks.error:
            chunks.error = chunks.read(came_s, frame.data)
    usage, error = chunks.usage, chunks.error
    if not error and not chunks.reason:
        error = "the stream ended without a finish_reason"
    if not error and needs_usage and choice is None and not {"prompt_tokens", "completion_tokens"} <= usage.keys():
        error = "the stream ended without `usage`, which stream_options.include_usage asks for"
    answer = Answer(sent_s, ended_s, tuple(chunks.content_s), "".join(chunks.texts), error=error)
    if error:
        return answer
    return replace(
        answer,
        content_s=answer.content_s or (chunks.finished_s,),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        reason=chunks.reason,
    )


@dataclass(slots=True)
class _Chunks:
    """Folds the chunks of a stream, or those of one choice."""

    choice: int | None
    content_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished_s: float = 0.0
    reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def read(self, came_s: float, data: str) -> str:
        """Take in one chunk; return what is wrong with it, or ""."""
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return _one_line(f"a chunk is not JSON: {data}")
        if refusal := refusal_in(chunk):
            return f"error in the stream: {refusal.message}"
        if not isinstance(chunk, dict):
            return _one_line(f"a chunk is not a JSON object: {data}")
        if chunk.get("usage") and self.choice is None:
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            if self.choice in (None, choice.get("index", 0)):
                self._read_choice(came_s, choice)
        return ""

    def _read_choice(self, came_s: float, choice: dict[str, Any]) -> None:
        delta, text = choice.get("delta") or {}, text_of(choice)
        if text or delta.get("reasoning_content") or delta.get("reasoning"):
            self.content_s.append(came_s)
            self.texts.append(text)  # thoughts are not part of the conversation
        if choice.get("finish_reason"):
            self.finished_s, self.reason = came_s, str(choice["finish_reason"])


async def calibrate(client: Client, form: Form, words: Sequence[str]) -> Writer:
    """Return a writer for the server's tokenizer, from its token counts of one word and of all *words*.

    Raises:
        ServerRefused: It does not answer.
    """
    of_one = await client.prompt_tokens(form, words[0])
    of_all = await client.prompt_tokens(form, " ".join(words))
    tokens_per_word = max((of_all - of_one) / (len(words) - 1), 0.01)
    return Writer(tokens_per_word, max(of_one - tokens_per_word, 0.0))


@dataclass(frozen=True, slots=True)
class Load:
    """Sends sessions to one server."""

    client: Client
    form: Form
    write: Callable[[Turn], str]
    """Returns the text of a turn."""
    after_each: Callable[[Measured], None]
    """Called after each request."""

    async def at_once(self, sessions: Sequence[Session], concurrency: int) -> list[Measured]:
        """Send *sessions*, *concurrency* of them at any time."""
        waiting = iter(enumerate(sessions))
        measured: list[Measured] = []

        async def work() -> None:
            for index, session in waiting:  # shared: each session is taken by one worker
                measured.extend(await self._run(index, session, self.write(session.turns[0]), None))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(sessions))):
                group.create_task(work())
        return sorted(measured, key=lambda one: (one.session, one.turn))

    async def when_due(self, sessions: Sequence[Session]) -> list[Measured]:
        """Send each of *sessions* when it is due; they come earliest first."""
        started_s = time.perf_counter()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for index, session in enumerate(sessions):
                text = self.write(session.turns[0])  # ahead of time: long prompts take time
                due_s = started_s + session.due_s
                await asyncio.sleep(due_s - time.perf_counter())
                tasks.append(group.create_task(self._run(index, session, text, due_s)))
        return [one for task in tasks for one in task.result()]

    async def _run(self, index: int, session: Session, text: str, due_s: float | None) -> list[Measured]:
        messages: list[Message] = []
        measured: list[Measured] = []
        for place, turn in enumerate(session.turns):
            if measured and measured[-1].answer.error:
                now_s = time.perf_counter()
                answer = Answer(now_s, now_s, error=NOT_SENT)
            else:
                messages.append({"role": "user", "content": text if place == 0 else self.write(turn)})
                answer = await self.client.stream(self.form, messages, turn.output_tokens)
                messages.append({"role": "assistant", "content": answer.text})
            lag_s = answer.sent_s - due_s if due_s is not None and place == 0 else 0.0
            measured.append(Measured(index, place, turn.num_tokens, turn.output_tokens, lag_s, answer))
            self.after_each(measured[-1])
        return measured
