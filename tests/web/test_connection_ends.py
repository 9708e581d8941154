"""How a connection ends, within the process of the test: nothing of it is left, and not all end together."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import hypercorn.protocol
import pytest
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.typing import LifespanState
from raw_client import request
from web_site import until

from web.connections import HEAD_TIMEOUT_S, IDLE_TIMEOUT_S, Connection, HttpConfig, Protocol
from web.seldom import Seldom

NUM = 50


@dataclass
class Server:
    port: int = 0
    connections: list[weakref.ref[Connection]] = field(default_factory=list)


async def _say_hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """Run a server that says hello."""
    monkeypatch.setattr(hypercorn.protocol, "H11Protocol", Protocol)
    server, loop, context = Server(), asyncio.get_running_loop(), WorkerContext(None)
    config, state = HttpConfig(1024, 2 * NUM, Seldom()), LifespanState()
    tasks: list[asyncio.Task[None] | None] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        connection = Connection(ASGIWrapper(_say_hello), loop, config, context, state, reader, writer)
        server.connections.append(weakref.ref(connection))
        await connection

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        await context.terminated.set()
        await asyncio.wait([each for each in tasks if each])
        listening.close()


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ends", ["by the client", "by the server"])
async def test_a_connection_that_has_ended_is_freed_without_a_collection(
    monkeypatch: pytest.MonkeyPatch, without_collections: None, ends: str
) -> None:
    async with asyncio.timeout(10), serving(monkeypatch) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(None, *(["Connection: close"] if ends == "by the server" else []), path="/"))
        await reader.readuntil(b"hello")
        writer.close()
        await until(lambda: server.connections[0]() is None)


async def test_connections_that_opened_together_do_not_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, patience_s = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def noting(when_s: float, *more: Any, **options: Any) -> asyncio.TimerHandle:
        patience_s.append(when_s - loop.time())
        return call_at(when_s, *more, **options)

    def about(timeout_s: float) -> list[float]:
        return [each for each in patience_s if timeout_s / 2 < each <= 1.25 * timeout_s]

    monkeypatch.setattr(loop, "call_at", noting)
    async with asyncio.timeout(10), serving(monkeypatch) as server:
        with ExitStack() as stack:
            for _ in range(NUM):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            await until(lambda: len(about(HEAD_TIMEOUT_S)) == len(about(IDLE_TIMEOUT_S)) == NUM)
    for timeout_s in (HEAD_TIMEOUT_S, IDLE_TIMEOUT_S):
        ends_s = about(timeout_s)
        assert min(ends_s) > 0.99 * timeout_s  # the clock went on a little
        assert max(ends_s) - min(ends_s) > 0.1 * timeout_s
