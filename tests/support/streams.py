"""Streaming clients of a real server for tests that disturb it, many clients of several engines, and what the log says
of their requests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
from support.selection import by_night
from support.servers import Command, Server, eventually

from pipeline.events import Admitted, AnyEvent, Finished, TokensProduced, decode
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import STAGES

LONG = by_night(500, 1200)
"""Tokens of an answer that is long enough to be disturbed."""
IDS = {"x-minisgl-event-ids": "1"}
PROMPTS = tuple(f"Tell me story number {number}." for number in range(4))


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": LONG}
    return {"messages": [{"role": "user", "content": prompt}], **greedy, **fields}


class Stream:
    """A client in a thread of its own that reads one streamed answer, and keeps what it was sent."""

    def __init__(self, server: Server, prompt: str, **fields: Any) -> None:
        self.prompt = prompt
        self.uid = ""
        self._left = threading.Event()
        self.lines: list[str] = []
        self.longest_pause_s = 0.0
        """Longest time between two lines."""
        self.error: httpx.TransportError | None = None
        self._url = f"{server.url}/v1/chat/completions"
        self._body = body(prompt, stream=True, **fields)
        self._thread = threading.Thread(target=self._read, name=prompt, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, headers=IDS, timeout=120) as response:
                self.uid = response.headers["x-minisgl-uid"]
                self.lines += [f"HTTP {response.status_code}"] if response.status_code != 200 else []
                last_s = time.monotonic()
                for line in response.iter_lines():
                    self.lines.append(line)
                    now_s = time.monotonic()
                    self.longest_pause_s, last_s = max(self.longest_pause_s, now_s - last_s), now_s
                    if self._left.is_set():
                        return
        except httpx.TransportError as error:
            self.error = error

    @property
    def num_frames(self) -> int:
        return sum(line.startswith("data: ") for line in tuple(self.lines))

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def begun(self, num_frames: int = 5) -> Stream:
        """Wait until it has begun: more frames than that have come."""
        eventually(lambda: self.num_frames > num_frames, f"it has begun: {self.prompt}")
        return self

    def leave(self) -> None:
        """Close the connection at the next line."""
        self._left.set()
        self.join()

    def join(self) -> Stream:
        """Wait until the connection is closed, by whomever."""
        self._thread.join(120)
        assert not self._thread.is_alive(), f"the stream goes on and on: {self.lines[-3:]}"
        return self

    @property
    def frames(self) -> list[dict[str, Any]]:
        """All frames of a stream that ended as it should, with [DONE], which is left out."""
        said = [line.removeprefix("data: ") for line in self.join().lines if line.startswith("data: ")]
        assert self.error is None
        assert said[-1:] == ["[DONE]"], self.lines[-3:]
        return [json.loads(data) for data in said[:-1]]

    @property
    def answer(self) -> tuple[str, str]:
        """The text, and why it ended."""
        assert not (errors := [frame for frame in self.frames if "error" in frame]), errors
        choices = [frame["choices"][0] for frame in self.frames]
        return "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]


def ask_all(server: Server, **fields: Any) -> list[Stream]:
    return [Stream(server, prompt, **fields) for prompt in PROMPTS]


def begun(server: Server, **fields: Any) -> list[Stream]:
    """Return one stream for each prompt, all of which have begun."""
    return [stream.begun() for stream in ask_all(server, **fields)]


def events_of(log: RedisLog, uid: str) -> list[AnyEvent]:
    return [decode(entry.fields) for entry in log.histories([uid])[0]]


def num_of(events: list[AnyEvent], kind: type[AnyEvent]) -> int:
    return sum(isinstance(event, kind) for event in events)


def token_counts(events: list[AnyEvent]) -> list[int]:
    """Return how many tokens each event of them has."""
    return [event.count for event in events if isinstance(event, TokensProduced)]


def tokens_in(events: Sequence[AnyEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TokensProduced) for token in event.tokens]


def assert_whole(log: RedisLog, streams: Sequence[Stream]) -> list[list[AnyEvent]]:
    """See that each history has each token once and ended well; return all histories."""
    histories = [events_of(log, stream.uid) for stream in streams]
    for events in histories:
        assert sum(token_counts(events)) == LONG and isinstance(events[-1], Finished)
    return histories


def assert_nothing_is_left(log: RedisLog, *engines: str) -> None:
    """Every work stream becomes empty, and no request lives."""
    inboxes = [Inbox.submitted(log.names), Inbox.tokenized(log.names)]
    inboxes += [Inbox.steps(log.names, engine) for engine in engines or ("generate-0",)]
    eventually(lambda: not any(map(log.backlog, inboxes)), "the work streams are empty")
    assert log.living() == []


@contextlib.contextmanager
def family_of(command: Command) -> Iterator[list[psutil.Process]]:
    """Give all processes of `minisgl serve`; whatever happens in the block, none of them outlives it."""
    family = command.processes()
    # A supervisor, its Redis and one worker of each stage: else a test that finds nothing left proves nothing. Redis
    # may have a child that writes its file, and a tokenizer the process that checks its grammars.
    assert [len(command.workers(stage)) for stage in STAGES] == [1, 1, 1, 1] and len(family) >= 6
    try:
        yield family
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def no_process_restarts(server: Server) -> Iterator[None]:
    def pids() -> dict[str, list[int]]:
        return {stage: [worker.pid for worker in server.command.workers(stage)] for stage in STAGES}

    before, num_deaths = pids(), len(server.command.log_lines("worker_died"))
    assert all(len(of_stage) == 1 for of_stage in before.values())
    yield
    assert pids() == before
    assert len(server.command.log_lines("worker_died")) == num_deaths


BURST = 64
WORDS = 150
"""Of a long prompt. Each engine computes some ms for those that it takes, so that the others have the time to come."""
NUM_CLIENTS = 16
"""Of those that ask one thing after the other."""


class Clients:
    """Clients of a server. What they ask has a number, and equal numbers get equal answers."""

    def __init__(self, server: Server, max_tokens: int, more: str = "") -> None:
        self._url, self._max_tokens, self._more = f"{server.url}/v1/completions", max_tokens, more
        self._http = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=BURST))

    def ask(self, number: int) -> httpx.Response:
        fields = {"max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True}
        return self._http.post(self._url, json={"prompt": f"Request {number}.{self._more}", **fields})

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def burst(server: Server, max_tokens: int, *, num_words: int = 0) -> Iterator[list[Future[httpx.Response]]]:
    """Send the requests of as many clients at once, with *num_words* more each; give their answers to be.

    No engine has cached anything of the prompts.
    """
    httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    with (
        contextlib.closing(Clients(server, max_tokens, " more" * num_words)) as clients,
        ThreadPoolExecutor(BURST) as threads,
    ):
        yield [threads.submit(clients.ask, number) for number in range(BURST)]


@contextlib.contextmanager
def steady_load(server: Server, max_tokens: int) -> Iterator[dict[int, list[httpx.Response]]]:
    """Have some clients ask one thing after the other; give the answers by what was asked. The block waits for all."""
    numbers, stopped = itertools.count(), threading.Event()
    answers: dict[int, list[httpx.Response]] = {number: [] for number in range(BURST)}

    def go_on() -> None:
        while not stopped.is_set():
            number = next(numbers) % BURST
            answers[number].append(clients.ask(number))

    with contextlib.closing(Clients(server, max_tokens)) as clients, ThreadPoolExecutor(NUM_CLIENTS) as threads:
        going = [threads.submit(go_on) for _ in range(NUM_CLIENTS)]
        try:
            yield answers
        finally:
            stopped.set()
        for each in going:
            each.result()


def answer_of(response: httpx.Response) -> tuple[str, str]:
    """Return the text, and why it ended."""
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


def answers_of(coming: Sequence[Future[httpx.Response]]) -> list[tuple[str, str]]:
    """Wait for all answers of a burst."""
    return [answer_of(each.result()) for each in coming]


def uids_of(coming: Sequence[Future[httpx.Response]]) -> list[str]:
    """Return the uids of answers that have come."""
    return [each.result().headers["x-minisgl-uid"] for each in coming]


def engines_of(log: RedisLog, uids: Sequence[str]) -> Counter[str]:
    """Return how many of the requests each engine has taken first."""
    events = (next(event for event in events_of(log, uid) if isinstance(event, Admitted)) for uid in uids)
    return Counter(event.engine for event in events)
