"""HTTP/1.1 connections: how they read or refuse requests, and how they end.

Hypercorn 0.18                                            here
refuses a malformed request with an empty body            the usual error body, an id, a line in the log
stops reading while it answers, once more has come        reads on, so that it notices a disconnect at once
closes while a body is coming: the answer may be lost     reads and drops the rest, for LINGER_S at most
keeps a connection that its client closed for two minutes ends it
switches to HTTP/2 or a websocket when asked              answers in HTTP/1.1, which every such client speaks too
says `100 Continue` to any request                        not if the body is too large

A half-closed connection counts as a disconnect: a client that was killed sends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import uuid
from typing import Any, Final

import h11
import hypercorn.protocol.events
import structlog
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol

from pipeline.errors import RequestError
from web.app import BODY_TIMEOUT_S, MAX_BODY_BYTES
from web.wire.openai.errors import error_body

logger = structlog.get_logger()

LINGER_S: Final = float(BODY_TIMEOUT_S)
"""How long a client may go on sending a body that is dropped; then the connection is cut."""
CLOSE: Final = (b"connection", b"close")
_URL: Final = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
_VERSIONS: Final = (b"1.0", b"1.1")


class Connection(TCPServer):
    """A connection that ends when its client closes it, and not before the client could read its last answer."""

    _lingering: asyncio.TimerHandle | None = None

    async def protocol_send(self, event: Event) -> None:
        """As TCPServer.protocol_send."""
        http = self.protocol.protocol
        if isinstance(event, Closed) and isinstance(http, Protocol) and http.expects_more:
            await self._linger()
        else:
            await super().protocol_send(event)

    async def _linger(self) -> None:
        """Send nothing more, and drop what comes. With unread data, closing would make TCP discard the answer."""
        if self._lingering is None:
            self._lingering = self.loop.call_later(LINGER_S, self.writer.close)
            with contextlib.suppress(OSError, RuntimeError):  # it is closed already
                self.writer.write_eof()
            await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        data = b"anything"
        while data:
            try:
                data = await self.reader.read(MAX_RECV)
            except OSError:  # reset
                break
            if self._lingering is None:
                await self.protocol.handle(RawData(data))
        if self._lingering is not None:
            self._lingering.cancel()
        await self.protocol.handle(Closed())
        await self.idle_task.stop()


class Protocol(H11Protocol):
    """The requests of one connection, one after the other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connection = self._requests = Requests(h11.SERVER, self.config.h11_max_incomplete_size)
        self._in_turn = asyncio.Lock()
        self._is_over = False

    @property
    def expects_more(self) -> bool:
        """Say whether the client may be in the middle of a body."""
        return self._requests.their_state in (h11.SEND_BODY, h11.ERROR)

    async def handle(self, event: Event) -> None:
        """As H11Protocol.handle; stop reading only if the client is far ahead of its answers."""
        if isinstance(event, Closed):
            self._is_over = True
            await self.can_read.set()
        await super().handle(event)
        if isinstance(event, RawData) and self._requests.is_far_ahead and not self._is_over:
            await self.can_read.clear()
            await self.can_read.wait()

    async def stream_send(self, event: hypercorn.protocol.events.Event) -> None:
        """As H11Protocol.stream_send; an answer that comes before the end of its request closes the connection."""
        if isinstance(event, hypercorn.protocol.events.Response) and self.expects_more:
            event = dataclasses.replace(event, headers=[*event.headers, CLOSE])
        await super().stream_send(event)

    async def _handle_events(self) -> None:
        async with self._in_turn:
            await super()._handle_events()

    async def _maybe_recycle(self) -> None:
        if self._is_over:
            await self._close_stream()
            return
        await super()._maybe_recycle()
        if self._requests.is_ahead and self._requests.our_state is h11.IDLE:
            self.task_group.spawn(self._handle_events)  # not in this task, which belongs to the request before

    async def _send_error_response(self, status_code: int) -> None:
        """Refuse bytes that are not a request."""
        error = _refusal(status_code, self._requests.fault, self.config.h11_max_incomplete_size)
        logger.info("request", status=error.status, error=error.code)
        body = error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", uuid.uuid4().hex.encode()),
            CLOSE,
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if self._requests.method != b"HEAD":
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class Requests(h11.Connection):
    """The requests that a client sends, without those that this server does not take."""

    def __init__(self, role: type[h11.SERVER], max_bytes: int) -> None:
        super().__init__(role, max_incomplete_event_size=max_bytes)
        self.method = b""
        self.fault = ""
        """Why the last bytes are not a request."""
        self._max_bytes = max_bytes
        self.is_ahead = False
        """Bytes of the next request came while this one is being answered."""
        self._is_too_large = False

    @property
    def is_far_ahead(self) -> bool:
        """Say whether those are more than a request's head may have."""
        return self.is_ahead and len(self.trailing_data[0]) > self._max_bytes

    @property
    def they_are_waiting_for_100_continue(self) -> bool:
        """As h11's, but a client with a body that is too large waits for the refusal."""
        return super().they_are_waiting_for_100_continue and not self._is_too_large

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's, but never PAUSED: Hypercorn would stop reading."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                event = self._taken(event)
        except h11.RemoteProtocolError as error:
            self.fault = str(error).partition(": b")[0]  # without the bytes
            raise
        self.is_ahead = event is h11.PAUSED
        return h11.NEED_DATA if self.is_ahead else event

    def _taken(self, request: h11.Request) -> h11.Request:
        """Return *request* as the application sees it. Raises RemoteProtocolError."""
        self.method = request.method
        if request.http_version not in _VERSIONS:
            raise h11.RemoteProtocolError("another version", error_status_hint=505)
        headers = dict(request.headers)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        self._is_too_large = int(headers.get(b"content-length", 0)) > MAX_BODY_BYTES
        target = _URL.sub(b"", request.target, count=1) or b"/"
        if not target.startswith(b"/") and target != b"*":
            raise h11.RemoteProtocolError("a path that does not begin with a slash")
        if target == request.target and b"upgrade" not in headers:
            return request
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        return h11.Request(method=request.method, headers=kept, target=target, http_version=request.http_version)


def _refusal(status: int, fault: str, max_bytes: int) -> RequestError:
    message, code = {
        431: (f"The request line and headers are larger than {max_bytes} bytes.", "headers_too_large"),
        501: ("Transfer-Encoding: this server takes `chunked`, or a Content-Length.", "not_implemented"),
        505: ("This server speaks HTTP/1.1; send that.", "http_version_not_supported"),
    }.get(status, (f"Malformed HTTP/1.1: {fault}.", "invalid_http"))
    return RequestError(message, code=code, status=status)
