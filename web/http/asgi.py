"""Connects a request with its application through Hypercorn's streams and Quart. Only this file imports
Hypercorn.

Neither its server nor its protocols are used, and nothing of it is replaced. `tests/web/http/test_hypercorn.py` has the
names, with what they take.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.protocol.events import Body, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ConnectionState
from quart.asgi import ASGIHTTPConnection

from web.http.connection_limit import BODIES_BYTES, LEAST_BYTES, ConnectionLimit, Proxies
from web.http.keys import Keys
from web.http.log_limiter import LogLimiter

__all__ = [
    "ASGIWrapper",
    "Body",
    "ConnectionState",
    "EndBody",
    "Event",
    "HTTPStream",
    "HttpConfig",
    "OneTask",
    "Request",
    "Response",
    "StreamClosed",
    "TaskGroup",
    "WorkerContext",
]
PLACE: Final = "minisgl.place"
"""Key in the state of an ASGI scope: the connection of the request."""
OUTLET: Final = "minisgl.outlet"
"""Key there: the Outlet of the request, where a stream may go past Quart and Hypercorn."""
PICTURES: Final = "/v1/pipeline/events"
"""The path of the streams that have no end of their own."""
_NO_LOGGER: Final = "hypercorn.error"


class Outlet(Protocol):
    """Sends pieces of an answer of unknown length past Quart, Hypercorn and h11, which take longer than all else that
    is done for a token."""

    async def send_piece(self, data: bytes) -> bool:
        """Send a piece, unless the answer's head was not sent yet or its end was. Return whether it was sent."""
        ...

    def takes_piece(self) -> bool:
        """Return whether a piece can be sent without waiting for the client."""
        ...

    def write_piece(self, data: bytes) -> None:
        """Send a piece while `takes_piece` holds."""
        ...


class HttpConfig(Config):
    """Hypercorn's configuration, and what connections need besides."""

    def __init__(
        self,
        max_body_bytes: int,
        most_connections: int,
        log_limiter: LogLimiter,
        *,
        keys: Keys | None = None,
        proxies: Proxies | None = None,
    ) -> None:
        super().__init__()
        self.include_server_header = False
        self.accesslog = None
        self.errorlog = logging.getLogger(_NO_LOGGER)
        self.max_app_queue_size = 0  # a piece of a body never waits for its application: it may be gone
        self.max_body_bytes = max_body_bytes
        self.keys, self.proxies = keys or Keys(), proxies or Proxies()
        most_bytes = max(BODIES_BYTES * max_body_bytes, LEAST_BYTES)
        self.connection_limit = ConnectionLimit(
            most_connections, log_limiter, has_several_keys=lambda: self.keys.are_several, most_bytes=most_bytes
        )


class OneTask(ASGIHTTPConnection):
    """Answers a request in the task that it has already. Quart starts one more, which costs each request a turn of the
    event loop, and waits for both."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Answer as ASGIHTTPConnection does: the client's disconnect cancels the task."""
        request, answering = self._create_request_from_scope(send), asyncio.current_task()
        assert answering is not None
        receiving = asyncio.ensure_future(self.handle_messages(request, receive))
        has_left = is_over = False

        def leave(_: object) -> None:
            nonlocal has_left
            if not is_over:
                has_left = answering.cancel()

        receiving.add_done_callback(leave)
        try:
            await self.handle_request(request, send)
        except asyncio.CancelledError:
            if not has_left or answering.uncancel():
                raise  # the server ends
        finally:
            is_over = True
            if not receiving.cancel():
                receiving.result()  # raises what was wrong with a message
