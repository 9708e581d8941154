"""HTTP/1.1 connections: how they read or refuse requests, and how they end.

Hypercorn 0.18                                            here
refuses a malformed request with an empty body            the usual error body, an id, a line in the log
stops reading while it answers, once more has come        reads on, so that it notices a disconnect at once
closes while a body is coming: the answer may be lost     reads and drops the rest, for LINGER_S at most
keeps a connection that its client closed for two minutes ends it
switches to HTTP/2 or a websocket when asked              answers in HTTP/1.1, which every such client speaks too
says `100 Continue` to any request                        not if the body is too large
takes connections until no file is left                   closes those that wait longest for their client
waits for the head of a request for two minutes           for HEAD_TIMEOUT_S from its first byte on
takes a body in chunks of any size                        refuses very many tiny ones, which take time, not space

A half-closed connection counts as a disconnect: a client that was killed sends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
import uuid
from collections.abc import Callable
from typing import Any, Final

import h11
import hypercorn.protocol.events
import structlog
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.config import Config, Sockets
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ConnectionState

from pipeline.errors import RequestError
from web.app import BODY_TIMEOUT_S, spread_s
from web.listener import BACKLOG
from web.routes.answers import SEND, WRITE
from web.seldom import Seldom
from web.wire.openai.errors import error_body

logger = structlog.get_logger()

LINGER_S: Final = float(BODY_TIMEOUT_S)
"""How long a client may go on sending a body that is dropped; then the connection is cut."""
HEAD_TIMEOUT_S: Final = 20.0
"""How long the first request of a connection may take to begin, and how long the head of any may take to come."""
IDLE_TIMEOUT_S: Final = 120.0
"""How long a connection may wait for its next request. Hypercorn's 5 s races with clients that reuse a connection."""
ACCEPTED_AT_ONCE: Final = 16
"""Connections that are accepted before other tasks have a turn. Three times as many may be open beyond the most."""
MOST_CHUNKS: Final = 1024
"""A body in more chunks than this needs chunks of LEAST_CHUNK bytes on average: each takes 30 us."""
LEAST_CHUNK: Final = 64
CLOSE: Final = (b"connection", b"close")
FREE_TRANSPORT: Final = "minisgl.free_transport"
"""Where the state of a connection has the method of this name, until its protocol takes it out."""
_URL: Final = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
_VERSIONS: Final = (b"1.0", b"1.1")


class HttpConfig(Config):
    """Hypercorn's configuration, and what connections need besides."""

    def __init__(self, max_body_bytes: int, most_connections: int, seldom: Seldom) -> None:
        super().__init__()
        self.backlog = ACCEPTED_AT_ONCE
        self.max_body_bytes = max_body_bytes
        self.crowd = Crowd(most_connections, seldom)

    def create_sockets(self) -> Sockets:
        """As Config.create_sockets."""
        sockets = super().create_sockets()
        return Sockets([], [_Listener(fileno=one.detach()) for one in sockets.insecure_sockets], [])


class _Listener(socket.socket):
    """A socket on which many clients may wait, though few are accepted at once: asyncio has one number for both."""

    def listen(self, backlog: int = 0, /) -> None:
        super().listen(BACKLOG)


class Crowd:
    """The open connections of a process, of which there are never too many.

    A new one takes the place of the one that waits longest for its client: for a request, or else for the rest of a
    body. If all are being answered, the new one is refused.
    """

    def __init__(self, most: int, seldom: Seldom) -> None:
        self._most = most
        self._seldom = seldom
        self._open: dict[Connection, None] = {}
        """The oldest first."""
        self._idle: dict[Connection, None] = {}
        """Those that wait for a request, the one that waits longest first."""

    def enter(self, connection: Connection) -> bool:
        """Take *connection* in, and close another if there are too many; say whether there is room."""
        if len(self._open) >= self._most:
            longest = next(iter(self._idle), None) or next((one for one in self._open if one.awaits_body), None)
            if times := self._seldom.times(f"too_many_connections {longest is None}"):
                logger.warning("too_many_connections", most=self._most, refused=longest is None, times=times)
            if longest is None:
                return False
            self.leave(longest)
            longest.cut()
        self._open[connection] = None
        self.waits(connection)
        return True

    def waits(self, connection: Connection) -> None:
        """Note that *connection* waits for a request from now on."""
        if connection in self._open:
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def works(self, connection: Connection) -> None:
        """Note that *connection* has a request."""
        self._idle.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Forget *connection*."""
        self._open.pop(connection, None)
        self._idle.pop(connection, None)


class Connection(TCPServer):
    """A connection that ends when its client closes it, and not before the client could read its last answer."""

    config: HttpConfig
    _lingering: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _is_cut = False

    async def run(self) -> None:
        """As TCPServer.run."""
        if not self.config.crowd.enter(self):
            with contextlib.suppress(OSError):
                self.writer.write(_FULL)
                self.writer.close()
            return
        self.state = {**self.state, FREE_TRANSPORT: self.free_transport}
        try:
            self._head_timer = self.loop.call_later(spread_s(HEAD_TIMEOUT_S), self._head_is_late)
            await super().run()
        finally:
            self._head_came()
            self.config.crowd.leave(self)
            self.__dict__.pop("protocol", None)  # it leads back here: only a full collection would free the two
            self.state.pop(FREE_TRANSPORT, None)

    @property
    def awaits_body(self) -> bool:
        """Say whether the client may be in the middle of a body."""
        http = self._http
        return http is not None and http.expects_more

    @property
    def _http(self) -> Protocol | None:
        http = self.protocol.protocol if hasattr(self, "protocol") else None
        return http if isinstance(http, Protocol) else None

    def cut(self) -> None:
        """Close it at once, whatever it has sent."""
        self._is_cut = True
        self.writer.transport.abort()

    async def protocol_send(self, event: Event) -> None:
        """As TCPServer.protocol_send."""
        if isinstance(event, RawData):
            await self._write(event)
            return
        if isinstance(event, Closed) and self.awaits_body:
            await self._linger()
            return
        if isinstance(event, Updated):
            self._head_came()
            if event.idle:
                self.config.crowd.waits(self)
                self._await_head()
            else:
                self.config.crowd.works(self)
        await super().protocol_send(event)

    async def _write(self, event: RawData) -> None:
        """As TCPServer.protocol_send, but without its lock where nobody waits for the client."""
        try:
            if (transport := self.free_transport()) is not None:
                transport.write(event.data)
                if not transport.get_write_buffer_size():
                    return
                event = RawData(b"")
            await super().protocol_send(event)
        except (OSError, RuntimeError):  # the client has not read for long (TimeoutError), or `_linger` has begun
            await self.protocol.handle(Closed())

    def free_transport(self) -> asyncio.WriteTransport | None:
        """Return what takes bytes at once; None if somebody has to wait for the client, or it takes none any more."""
        transport = self.writer.transport
        is_free = not (self.send_lock.locked() or transport.is_closing() or transport.get_write_buffer_size())
        return transport if is_free and self._lingering is None else None

    def _await_head(self) -> None:
        """Once a head has begun to come, give it some time to come whole."""
        if self._head_timer is None and self._http is not None and self._http.has_begun_head:
            self._head_timer = self.loop.call_later(spread_s(HEAD_TIMEOUT_S), self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._lingering is None and self._http is not None:
            self._task_group.spawn(self._http.refuse_late_head)

    async def _idle_timeout(self) -> None:
        """As TCPServer._idle_timeout, with a spread, and without a second task for each connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(spread_s(IDLE_TIMEOUT_S)):
                await self.context.terminated.wait()
        await asyncio.shield(self._initiate_server_close())

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
            if self._lingering is None and not self._is_cut:
                await self.protocol.handle(RawData(data))
                self._await_head()
        if self._lingering is not None:
            self._lingering.cancel()
        await self.protocol.handle(Closed())
        await self.idle_task.stop()


class Protocol(H11Protocol):
    """The requests of one connection, one after the other."""

    config: HttpConfig

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        sizes = self.config.h11_max_incomplete_size, self.config.max_body_bytes
        self.connection = self._requests = Requests(h11.SERVER, *sizes)
        self._in_turn = asyncio.Lock()
        self._is_over = False
        self._free_transport: Callable[[], asyncio.WriteTransport | None] = self.connection_state.pop(FREE_TRANSPORT)

    @property
    def expects_more(self) -> bool:
        """Say whether the client may be in the middle of a body."""
        return self._requests.their_state in (h11.SEND_BODY, h11.ERROR)

    @property
    def has_begun_head(self) -> bool:
        """Say whether the client is in the middle of the head of a request."""
        return self._requests.their_state is h11.IDLE and bool(self._requests.trailing_data[0])

    async def refuse_late_head(self) -> None:
        """End a connection on which no request came in time."""
        if self.has_begun_head:
            await self._send_error_response(408)
        await self.send(Closed())

    async def handle(self, event: Event) -> None:
        """As H11Protocol.handle; stop reading only if the client is far ahead of its answers."""
        if isinstance(event, Closed):
            self._is_over = True
            await self.can_read.set()
        await super().handle(event)
        if isinstance(event, RawData) and self._requests.is_far_ahead and not self._is_over:
            await self.can_read.clear()
            await self.can_read.wait()

    async def send_piece(self, data: bytes) -> bool:
        """Send a piece of an answer of unknown length, as h11 would (RFC 9112, 7.1), unless its head was not sent yet
        or its end was. Return whether it was sent."""
        if self._requests.our_state is not h11.SEND_BODY:
            return False
        await self.send(RawData(_chunk(data)))
        return True

    def write_piece(self, make: Callable[[], bytes]) -> bool:
        """As `send_piece`, with what *make* returns, unless somebody has to wait for the client."""
        transport = self._free_transport()
        if transport is None or self._requests.our_state is not h11.SEND_BODY:
            return False
        if data := make():
            transport.write(_chunk(data))
        return True

    async def _create_stream(self, request: h11.Request) -> None:
        """As H11Protocol._create_stream; if pieces can be sent past it, the scope of the request says how."""
        shared = self.connection_state
        if request.http_version == b"1.1" and request.method != b"HEAD":
            self.connection_state = ConnectionState({**shared, SEND: self.send_piece, WRITE: self.write_piece})
        await super()._create_stream(request)
        self.connection_state = shared  # not for longer: it leads back here

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

    def __init__(self, role: type[h11.SERVER], max_bytes: int, max_body_bytes: int) -> None:
        super().__init__(role, max_incomplete_event_size=max_bytes)
        self.method = b""
        self.fault = ""
        """Why the last bytes are not a request."""
        self._max_bytes = max_bytes
        self._max_body_bytes = max_body_bytes
        self._num_chunks = self._num_body_bytes = 0
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
            elif isinstance(event, h11.Data):
                self._check_chunk(len(event.data))
        except h11.RemoteProtocolError as error:
            self.fault = str(error).partition(": b")[0]  # without the bytes
            raise
        self.is_ahead = event is h11.PAUSED
        return h11.NEED_DATA if self.is_ahead else event

    def _taken(self, request: h11.Request) -> h11.Request:
        """Return *request* as the application sees it. Raises RemoteProtocolError."""
        self.method = request.method
        self._num_chunks = self._num_body_bytes = 0
        if request.http_version not in _VERSIONS:
            raise h11.RemoteProtocolError("another version", error_status_hint=505)
        headers = dict(request.headers)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        self._is_too_large = int(headers.get(b"content-length", 0)) > self._max_body_bytes
        target = _URL.sub(b"", request.target, count=1) or b"/"
        if not target.startswith(b"/") and target != b"*":
            raise h11.RemoteProtocolError("a path that does not begin with a slash")
        if target == request.target and b"upgrade" not in headers:
            return request
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        return h11.Request(method=request.method, headers=kept, target=target, http_version=request.http_version)

    def _check_chunk(self, num_bytes: int) -> None:
        """Count a piece of a body. Raises RemoteProtocolError."""
        self._num_chunks += 1
        self._num_body_bytes += num_bytes
        if self._num_chunks > MOST_CHUNKS and self._num_body_bytes < LEAST_CHUNK * self._num_chunks:
            raise h11.RemoteProtocolError(f"more than {MOST_CHUNKS} chunks of less than {LEAST_CHUNK} bytes on average")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _refusal(status: int, fault: str, max_bytes: int) -> RequestError:
    message, code = {
        408: (f"The request line and headers did not arrive within {HEAD_TIMEOUT_S:g} s.", "request_timeout"),
        431: (f"The request line and headers are larger than {max_bytes} bytes.", "headers_too_large"),
        501: ("Transfer-Encoding: this server takes `chunked`, or a Content-Length.", "not_implemented"),
        505: ("This server speaks HTTP/1.1; send that.", "http_version_not_supported"),
    }.get(status, (f"Malformed HTTP/1.1: {fault}.", "invalid_http"))
    return RequestError(message, code=code, status=status)


_BUSY_BODY: Final = error_body(
    RequestError("The server has too many connections; send it again later.", code="overloaded", status=503)
)
_FULL: Final = (
    b"HTTP/1.1 503 \r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(_BUSY_BODY)
    + b"retry-after: 1\r\nconnection: close\r\n\r\n"
    + _BUSY_BODY
)
