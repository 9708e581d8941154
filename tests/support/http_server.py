"""A server of an ASGI application within the process of the test, whose connections can be looked at."""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import web.http.connections
from web.http.asgi import HttpConfig
from web.http.connections import Connection, serve
from web.http.listener import open_listener
from web.http.log_limiter import LogLimiter

MOST = 100
BODY_BYTES = 1 << 20


@dataclass
class Server:
    port: int
    config: HttpConfig
    connections: list[weakref.ref[Connection]] = field(default_factory=list)


class Application:
    """An ASGI application that begins and ends as Quart's do."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def startup(self) -> None: ...
    async def shutdown(self) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._answer(scope, receive, send)


async def say_hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@contextmanager
def _noting(connections: list[weakref.ref[Connection]]) -> Iterator[None]:
    class Noted(Connection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            connections.append(weakref.ref(self))

    with mock.patch.object(web.http.connections, "Connection", Noted):
        yield


@asynccontextmanager
async def serving(
    answer: Any = say_hello,
    *,
    most: int = MOST,
    body_bytes: int = BODY_BYTES,
    path: Path | None = None,
    answered_probe: Callable[[], None] = lambda: None,
    **more: Any,
) -> AsyncIterator[Server]:
    """Run a server of *answer*, on a socket in the file system if there is a *path*."""
    if path is None:
        listener = open_listener("127.0.0.1", 0)
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
    server = Server(0 if path else listener.getsockname()[1], HttpConfig(body_bytes, most, LogLimiter(), **more))
    stop = asyncio.Event()
    with _noting(server.connections):
        app: Any = answer if hasattr(answer, "startup") else Application(answer)
        running = asyncio.create_task(serve(app, listener, server.config, stop, answered_probe=answered_probe))
        try:
            yield server
        finally:
            stop.set()
            await running
