"""A real web process on an inherited socket, behind which stand-in stages may be."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
from support.redis_servers import command, until
from support.stand_in_stages import StandIn

from pipeline.names import SEAL, Names
from web.http.listener import open_listener

PROGRAM = """
import gc
gc.disable()  # while it imports, as `minisgl stage web` does
import asyncio, os, sys, time
import pipeline.process.observe
import web.app, web.http.connections, web.live.frontend, web.server
from pipeline.flags import parse_config
from web.config import WebStageConfig
gc.enable()

web.server.DRAIN_S = web.server.HARD_EXIT_S = web.live.frontend.SHUT_DOWN_S = float(sys.argv.pop(1))
web.app.BODY_TIMEOUT_S = web.http.connections.LINGER_S = float(sys.argv.pop(1))
web.http.connections.GRACE_S = web.server.HARD_EXIT_S / 4
web.http.connections.HEAD_TIMEOUT_S = float(sys.argv.pop(1))
create_app = web.server.create_app
deaf_ones = set()
run_handle = asyncio.Handle._run
longest = [0.0, ""]


def run_and_measure(handle):
    began_s = time.thread_time()
    run_handle(handle)
    took_s = time.thread_time() - began_s
    if took_s > longest[0]:
        longest[:] = took_s, repr(handle)[:2000] if took_s > 0.02 else ""


asyncio.Handle._run = run_and_measure


def create_app_with_more(frontend, keys, **more):
    app = create_app(frontend, keys, **more)

    @app.get("/left")
    async def left():
        served = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Connection.run"]
        return {
            "connections": len(served),
            "listeners": sorted(listener.uid for listener in frontend.tail.listeners),
            "deaf": len(deaf_ones),
        }

    @app.get("/longest")
    async def longest_callback():
        took_s, what = longest
        longest[:] = 0.0, ""
        return {"ms": took_s * 1000, "what": what}

    @app.get("/deaf")
    async def deaf():
        deaf_ones.add(asyncio.current_task())
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:  # as code of others does at times
            return "done"
        finally:
            deaf_ones.clear()

    return app


web.server.create_app = create_app_with_more
sys.exit(web.server.run(parse_config("stage web", WebStageConfig, sys.argv[1:], os.environ)))
"""
"""The server, with less patience where a test says so. GET /left says what it holds, GET /deaf cannot be cancelled, and
GET /longest says how much of its CPU time a callback of the loop has taken at most, since it was asked before."""


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[bytes]
    port: int

    def client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="x", max_retries=0, _strict_response_validation=True)

    def status(self, path: str) -> int:
        """Return the status of a GET; 0 when nobody answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                line = connection.makefile("rb").readline()
        except OSError:
            return 0
        return int(line.split()[1]) if line else 0


Starts = Callable[[], Server]
"""Starts a server when a test is ready for it."""


@contextmanager
def serving(
    redis_url: str,
    *more: str,
    patience_s: float = 10.0,
    body_timeout_s: float = 30.0,
    head_timeout_s: float = 20.0,
    user_timeout_s: float | None = None,
    files: tuple[int, int] | None = None,
    output: Path | None = None,
    waits: bool = True,
) -> Iterator[Server]:
    """Run a web process on an inherited socket, and end it; what it prints goes to *output*.

    *waits*: until it is ready, before the block begins. *patience_s* is how long it waits for streams as it stops, and
    then for clients; *user_timeout_s* how long for one that acknowledges nothing. *files*: the soft and hard limit on
    its open files.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(open_listener("127.0.0.1", 0))
        printed = stack.enter_context(output.open("ab")) if output else None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        if user_timeout_s is not None:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))
        port = listener.getsockname()[1]
        flags = ["--redis-url", redis_url, "--listen-fd", str(listener.fileno()), "--slot", "0", *more]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(patience_s), str(body_timeout_s), str(head_timeout_s), *flags],
            pass_fds=[listener.fileno()],
            cwd=os.getcwd(),
            stdout=printed or subprocess.DEVNULL,
            stderr=printed,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files)) if files else None,
        )
    server = Server(process, port)
    try:
        if waits:
            until(lambda: process.poll() is not None or server.status("/ready") == 200, timeout_s=20)
            assert process.poll() is None
        yield server
    finally:
        process.kill()
        process.wait()


def ends(stand_in: StandIn, redis_url: str, key: str) -> list[str]:
    """Return a field of the seals of all requests but the probe."""
    found = []
    for uid, _ in stand_in.requests():
        for _, fields in command(redis_url, "XRANGE", Names().request(uid), SEAL, SEAL):
            found.append(dict(zip(fields[::2], fields[1::2], strict=True)).get(key.encode(), b"").decode())
    return found
