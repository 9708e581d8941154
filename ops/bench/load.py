"""Sends conversations to an OpenAI server and notes when each byte of the answers came. Knows HTTP and time, not why.

Client and server often share their cores, so while a stream runs its bytes are only kept, with the time of their
arrival; it is read as JSON once it has ended. Tokens are counted from `usage`: a chunk may hold several.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import orjson

from ops.bench.datasets import Session, Turn, Writer
from pipeline.errors import MiniSGLError

CHAT: Final = "chat"
COMPLETIONS: Final = "completions"
CHAT_PROMPT: Final = "chat-prompt"
"""Mini-SGLang's: a chat completion whose `prompt` goes to the model as it is."""
PATHS: Final = {
    CHAT: "/v1/chat/completions",
    COMPLETIONS: "/v1/completions",
    CHAT_PROMPT: "/v1/chat/completions",
}
FIX_LENGTH: Final = ("ignore-eos", "min-tokens", "no")
CONNECT_TIMEOUT_S: Final = 10.0
LONGEST_ERROR: Final = 300
NOT_SENT: Final = "not sent: an earlier turn of its conversation failed"

Message = dict[str, str]
Arrival = tuple[float, bytes]
"""When a piece of the stream came, on the clock of `time.perf_counter`, and the piece."""


class ServerRefused(MiniSGLError):
    """The server cannot be reached or refuses what it must answer before anything can be measured."""


@dataclass(frozen=True, slots=True)
class Form:
    """What all requests of a run have in common."""

    endpoint: str
    model: str
    temperature: float = 0.0
    fix_length: str = FIX_LENGTH[0]
    """How the server is told to write exactly as many tokens as it may."""

    def body(self, messages: Sequence[Message], max_tokens: int, *, stream: bool) -> bytes:
        """Return the body of one request."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature}
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
    """One request and what came of it. The times are of `time.perf_counter`."""

    sent_s: float
    ended_s: float
    content_s: tuple[float, ...] = ()
    """When each chunk with text came; of an answer without any text, when it was finished."""
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    """Empty for an answer that is whole."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One turn of a session: what was planned, and what came of it."""

    session: int
    turn: int
    input_tokens: int
    output_tokens: int
    lag_s: float
    """How long after it was due it was sent; 0 where nothing was due."""
    answer: Answer


class Client:
    """One server, over as many connections as there are requests at a time."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float) -> None:
        """*timeout_s* is the longest silence within an answer; an answer may take as long as it likes."""
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=timeout_s)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def served_model(self) -> str:
        """Return the first name in /v1/models.

        Raises:
            ServerRefused: There is none.
        """
        document = await self._document("GET", "/v1/models", b"")
        try:
            return str(document["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerRefused(f"{self._url}/v1/models names no model; pass --model") from None

    async def prompt_tokens(self, form: Form, text: str) -> int:
        """Return how many tokens the server makes of a first turn *text*.

        Raises:
            ServerRefused: It does not answer, or not with its usage.
        """
        body = form.body([{"role": "user", "content": text}], 1, stream=False)
        document = await self._document("POST", PATHS[form.endpoint], body)
        try:
            return int(document["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError):
            raise ServerRefused(
                f"{self._url}{PATHS[form.endpoint]} answers without `usage`, and tokens are counted from nothing else"
            ) from None

    async def _document(self, method: str, path: str, body: bytes) -> Any:
        try:
            async with self._session.request(method, self._url + path, data=body or None) as response:
                content = await response.read()
                if response.status != 200:
                    raise ServerRefused(f"{self._url}{path}: {_refusal(response.status, content)}")
                return orjson.loads(content)
        except orjson.JSONDecodeError:
            raise ServerRefused(f"{self._url}{path} answers with something that is not JSON") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerRefused(f"{self._url}: {_broken(error)}") from None

    async def stream(self, form: Form, messages: Sequence[Message], max_tokens: int) -> Answer:
        """Send one request and return what came of it, whatever it is."""
        body = form.body(messages, max_tokens, stream=True)
        arrivals: list[Arrival] = []
        sent_s = time.perf_counter()
        try:
            async with self._session.post(self._url + PATHS[form.endpoint], data=body) as response:
                if response.status != 200:
                    error = _refusal(response.status, await response.read())
                    return Answer(sent_s, time.perf_counter(), error=error)
                while data := await response.content.readany():
                    arrivals.append((time.perf_counter(), data))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Answer(sent_s, time.perf_counter(), error=_broken(error))
        return read_stream(sent_s, arrivals)


def _refusal(status: int, content: bytes) -> str:
    try:
        said = _error_text(orjson.loads(content))
    except orjson.JSONDecodeError:
        said = content.decode(errors="replace")
    return _one_line(f"HTTP {status}: {said}" if said else f"HTTP {status}")


def _error_text(document: Any) -> str:
    """Return the message of an error body, however it is nested; empty where it is none."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error", document.get("detail", document if document.get("object") == "error" else None))
    if isinstance(error, dict):
        error = error.get("message") or orjson.dumps(error).decode()
    if error is None:
        return ""
    return error if isinstance(error, str) else orjson.dumps(error).decode()


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_ERROR else f"{line[:LONGEST_ERROR]}.."


def _broken(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return _one_line(f"cannot connect: {os.strerror(error.errno) if error.errno else error}")
    if isinstance(error, TimeoutError):
        return "nothing came for too long (--timeout)"
    return _one_line(f"the connection broke: {error or type(error).__name__}")


def read_stream(sent_s: float, arrivals: Iterable[Arrival]) -> Answer:
    """Return the answer that the pieces of a stream make; a line arrives with the piece that ends it."""
    reader = _StreamReader()
    rest, ended_s = b"", sent_s
    for ended_s, data in arrivals:  # the last one is when it ended
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            reader.read(ended_s, line)
    reader.read(ended_s, rest)
    return reader.answer(sent_s, ended_s)


class _StreamReader:
    """Folds the lines of a stream of server-sent events into an answer."""

    def __init__(self) -> None:
        self._content_s: list[float] = []
        self._texts: list[str] = []
        self._finished_s: float | None = None
        self._usage: dict[str, Any] = {}
        self._error = ""

    def read(self, came_s: float, line: bytes) -> None:
        """Take in one line."""
        if not line.startswith(b"data:") or self._error:
            return
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            self._error = _one_line(f"a chunk is not JSON: {data.decode(errors='replace')}")
            return
        if error := _error_text(chunk):
            self._error = _one_line(f"error in the stream: {error}")
            return
        if not isinstance(chunk, dict):
            self._error = _one_line(f"a chunk is not a JSON object: {data.decode(errors='replace')}")
            return
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            self._read_choice(came_s, choice)

    def _read_choice(self, came_s: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content") or choice.get("text")
        if text or thought:
            self._content_s.append(came_s)
            self._texts.append(text or "")  # a conversation goes on with what was said, not with what was thought
        if choice.get("finish_reason"):
            self._finished_s = came_s

    def answer(self, sent_s: float, ended_s: float) -> Answer:
        """Return the whole."""
        error, finished_s = self._error, self._finished_s
        if not error and finished_s is None:
            error = "the stream ended without a finish_reason"
        if not error and not {"prompt_tokens", "completion_tokens"} <= set(self._usage):
            error = "the stream ended without `usage`, which stream_options.include_usage asks for"
        if error or finished_s is None:
            return Answer(sent_s, ended_s, tuple(self._content_s), "".join(self._texts), error=error)
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            sent_s,
            ended_s,
            tuple(self._content_s) or (finished_s,),
            "".join(self._texts),
            prompt_tokens=int(self._usage["prompt_tokens"]),
            output_tokens=int(self._usage["completion_tokens"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )


async def calibrate(client: Client, form: Form, words: Sequence[str]) -> Writer:
    """Return a writer for the server's tokenizer, from what it makes of one word and of all *words*.

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
    """Makes the text of a turn."""
    after_each: Callable[[Measured], None]
    """Called when a request has ended."""

    async def at_once(self, sessions: Sequence[Session], concurrency: int) -> list[Measured]:
        """Send *sessions* so that *concurrency* of them are under way until there are no more."""
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
        """Send *sessions*, earliest first, each when it is due, however many are under way."""
        started_s = time.perf_counter()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for index, session in enumerate(sessions):
                text = self.write(session.turns[0])  # ahead of time: long prompts take a while
                due_s = started_s + session.due_s
                await asyncio.sleep(due_s - time.perf_counter())
                tasks.append(group.create_task(self._run(index, session, text, due_s)))
        return [one for task in tasks for one in task.result()]

    async def _run(self, index: int, session: Session, text: str, due_s: float | None) -> list[Measured]:
        messages: list[Message] = []
        measured: list[Measured] = []
        failed = False
        for place, turn in enumerate(session.turns):
            if failed:
                now_s = time.perf_counter()
                answer = Answer(now_s, now_s, error=NOT_SENT)
            else:
                messages.append({"role": "user", "content": text if place == 0 else self.write(turn)})
                answer = await self.client.stream(self.form, messages, turn.output_tokens)
                messages.append({"role": "assistant", "content": answer.text})
                failed = bool(answer.error)
            lag_s = answer.sent_s - due_s if due_s is not None and place == 0 else 0.0
            measured.append(Measured(index, place, turn.num_tokens, turn.output_tokens, lag_s, answer))
            self.after_each(measured[-1])
        return measured
