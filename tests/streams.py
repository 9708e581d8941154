"""Streaming clients of a real server for tests that disturb it, and what its log says of their requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
from servers import Command, Server

from pipeline.events import AnyEvent, decode
from pipeline.log.redis import RedisLog

LONG = 400
"""Tokens of an answer that is long enough to be disturbed."""
PROMPTS = tuple(f"Tell me story number {number}." for number in range(6))


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
            with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
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


def events_of(log: RedisLog, uid: str) -> list[AnyEvent]:
    return [decode(entry.fields) for entry in log.histories([uid])[0]]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def family_of(command: Command) -> Iterator[list[psutil.Process]]:
    """Give all processes of *command*; whatever happens in the block, none of them outlives it."""
    family = command.processes()
    try:
        yield family
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
