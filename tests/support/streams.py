"""Streaming clients of a real server for tests that disturb it, and what its log says of their requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
from support.selection import by_night
from support.servers import Command, Server, eventually

from pipeline.events import AnyEvent, TokensProduced, decode
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
                for line in response.iter_lines():
                    self.lines.append(line)
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
    streams = ask_all(server, **fields)
    eventually(lambda: all(stream.num_frames > 5 for stream in streams), "all streams have begun")
    return streams


def events_of(log: RedisLog, uid: str) -> list[AnyEvent]:
    return [decode(entry.fields) for entry in log.histories([uid])[0]]


def num_of(events: list[AnyEvent], kind: type[AnyEvent]) -> int:
    return sum(isinstance(event, kind) for event in events)


def token_counts(events: list[AnyEvent]) -> list[int]:
    """Return how many tokens each event of them has."""
    return [event.count for event in events if isinstance(event, TokensProduced)]


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
