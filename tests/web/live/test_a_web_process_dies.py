"""Kill a web process with a stream open: its client goes on where it was, with another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from redis_servers import until
from stand_in_stages import StandIn
from web_site import CHAT, chat

from web.listener import open_listener

PROGRAM = """
import os, sys
import web.server
from pipeline.flags import parse_config
from web.config import WebStageConfig
sys.exit(web.server.run(parse_config("stage web", WebStageConfig, sys.argv[1:], os.environ)))
"""
ENDLESS = chat("endless", stream=True)


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def serving(redis_url: str, slot: int) -> Iterator[Server]:
    """Run a web process on an inherited socket until it is ready, and end it."""
    with open_listener("127.0.0.1", 0) as listener:
        flags = ["--redis-url", redis_url, "--listen-fd", str(listener.fileno()), "--slot", str(slot)]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *flags],
            pass_fds=[listener.fileno()],
            cwd=os.getcwd(),
            stdout=subprocess.DEVNULL,
        )
        server = Server(process, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        until(lambda: process.poll() is not None or server.is_ready(), timeout_s=30)
        assert process.poll() is None
        yield server
    finally:
        process.kill()
        process.wait()


class Stream:
    """The frames of a streaming answer, one by one."""

    def __init__(self, response: httpx.Response) -> None:
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        self.uid = response.headers["x-minisgl-uid"]
        self._pieces = response.iter_raw()
        self._rest = b""

    def frames_until(self, wanted: bytes) -> list[bytes]:
        """Return the next frames, up to the one that has *wanted* in it."""
        frames: list[bytes] = []
        while not frames or wanted not in frames[-1]:
            while b"\n\n" not in self._rest:
                self._rest += next(self._pieces)
            frame, _, self._rest = self._rest.partition(b"\n\n")
            frames.append(frame)
        return frames


def test_the_client_of_a_killed_web_process_goes_on_with_another_one(redis_url: str, stand_in: StandIn) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving(redis_url, slot)) for slot in (0, 1))
        client = stack.enter_context(httpx.Client(timeout=20))

        def stream(method: str, url: str, **options: Any) -> Stream:
            return Stream(stack.enter_context(client.stream(method, url, **options)))

        original = stream("POST", first.url + CHAT, json=ENDLESS)
        path = f"{second.url}/v1/requests/{original.uid}"
        sent = original.frames_until(b"id: 10-0\n")
        first.process.kill()
        first.process.wait()
        resumed = stream("GET", f"{path}/events", headers={"Last-Event-ID": "10-0"})
        sent += resumed.frames_until(b"id: 200-0\n")
        assert client.delete(path).json()["cancelled"] is True
        sent += resumed.frames_until(b"[DONE]")
        ids = [frame.partition(b"\n")[0] for frame in sent if frame.startswith(b"id: ")]
        assert ids[:200] == [b"id: %d-0" % n for n in range(1, 201)] and len(ids) == len(set(ids))
        assert b'"code":"cancelled"' in sent[-2]
        assert stream("GET", f"{path}/events").frames_until(b"[DONE]") == sent
