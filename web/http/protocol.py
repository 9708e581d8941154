"""The requests of one connection, one after the other: from bytes to an application, and its answers back.

a malformed request      gets the usual error body, an id, and a line in the log
HTTP/2, websockets       the answer is HTTP/1.1, which every such client speaks, too
whatever comes           is looked at in a turn of its client's, see `RoundRobin`
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import h11
import structlog

from pipeline.errors import RequestError
from web.http.asgi import (
    OUTLET,
    PICTURES,
    PLACE,
    Body,
    ConnectionState,
    EndBody,
    Event,
    HttpConfig,
    HTTPStream,
    Request,
    Response,
    StreamClosed,
    TaskGroup,
)
from web.http.connection_limit import address_of
from web.http.http1 import MOST_AHEAD_BYTES, Requests, refusal
from web.http.keys import keys_in
from web.wire.openai.errors import error_body

if TYPE_CHECKING:
    from web.http.connections import Connection

logger = structlog.get_logger()

RECEIVED_BYTES: Final = 32 << 10
"""Most bytes that one read of a socket takes. They may lie unused for a while, so they are few."""
PROBES: Final = (b"/health", b"/ready", b"/metrics")
"""What a connection without a place may GET."""
VIEWS: Final = (PICTURES.encode(),)
"""Paths whose answer to a GET has no end of its own."""
CLOSE: Final = (b"connection", b"close")
STREAM_ID: Final = 1


class Protocol:
    """The requests of one connection, one after the other."""

    def __init__(self, connection: Connection, tasks: TaskGroup) -> None:
        self._connection, self._tasks, self._config = connection, tasks, connection.config
        self._requests = Requests(self._config.max_body_bytes)
        self._stream: HTTPStream | None = None
        self._in_turn = asyncio.Lock()
        self._has_room = asyncio.Event()
        self._num_body_bytes = 0
        """Bytes of the current body that the application was given and has not read."""
        self._drops_body = False
        self._most_viewers = 0
        """As ConnectionLimit.views takes it, of the current request."""
        self._is_over = False

    @property
    def expects_more(self) -> bool:
        """Return whether the client may be in the middle of a body."""
        return self._requests.expects_more

    @property
    def has_begun_head(self) -> bool:
        """Return whether the client is in the middle of the head of a request."""
        return self._requests.has_begun_head

    @property
    def can_refuse(self) -> bool:
        """Return whether the answer to the current request has not begun."""
        return not self._is_over and self._requests.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of requests that it holds."""
        return self._num_body_bytes + self._requests.num_waiting

    @property
    def wanted_bytes(self) -> int:
        """Most bytes that it takes next."""
        if self._requests.their_state is h11.SEND_BODY:
            return RECEIVED_BYTES
        is_ahead = self._requests.is_ahead
        return max(MOST_AHEAD_BYTES - self._requests.num_waiting, 1) if is_ahead else MOST_AHEAD_BYTES

    async def turn(self) -> None:
        """Wait for a turn to parse what the client sent."""
        if self._requests.their_state is h11.IDLE:
            self._config.connection_limit.works(self._connection)  # so the connection limit does not close it meanwhile
        await self._connection.turn()

    async def receive(self, data: bytes) -> None:
        """Take what the client has sent, b"" at its end; wait while it is far ahead of its answers."""
        if self._is_over:
            return
        self._requests.receive_data(data)
        await self._handle_events()
        self._connection.note_bytes()
        while self._is_far_ahead:
            self._has_room.clear()
            await self._has_room.wait()

    def stop(self) -> None:
        """Answer nothing more, and forget what came."""
        self._is_over = True
        self._requests = Requests(self._config.max_body_bytes)
        self._has_room.set()

    async def end(self) -> None:
        """Do as `stop`, and tell the application that the client has left."""
        self.stop()
        await self._close_stream()

    async def refuse_late_head(self, patience_s: float) -> None:
        """End a connection on which no request came within *patience_s*."""
        if self.has_begun_head:
            error = RequestError(
                f"The request line and headers did not arrive within {patience_s:g} s.",
                code="request_timeout",
                status=408,
            )
            await self.refuse(error)
        else:
            await self._connection.close(lingers=False)

    async def refuse(self, error: RequestError, *, is_logged: bool = True) -> None:
        """Answer the current request with *error*, if it has no answer yet, and end the connection."""
        connection, requests = self._connection, self._requests
        is_whole = requests.their_state is h11.DONE and not (requests.num_waiting or connection.has_unread)
        if self.can_refuse:
            if is_logged:
                logger.info("request", status=error.status, error=error.code)
            answer = refused(error, self._config, has_body=requests.method != b"HEAD")
            await self.end()
            await connection.write(answer)
        await connection.close(lingers=not is_whole)

    # called by the application

    def views(self) -> None:
        """As Place.views."""
        self._config.connection_limit.views(self._connection, self._most_viewers)

    def has_read(self) -> None:
        """As Place.has_read."""
        self._num_body_bytes = 0
        self._connection.note_bytes()

    async def send_piece(self, data: bytes) -> bool:
        """As Outlet.send_piece, as h11 would (RFC 9112, 7.1)."""
        if self._requests.our_state is not h11.SEND_BODY:
            return False
        await self._connection.write(_chunk(data))
        return True

    def takes_piece(self) -> bool:
        """As Outlet.takes_piece."""
        return self._connection.is_free and self._requests.our_state is h11.SEND_BODY

    def write_piece(self, data: bytes) -> None:
        """As Outlet.write_piece."""
        self._connection.writer.transport.write(_chunk(data))

    # one request

    async def _handle_events(self) -> None:
        async with self._in_turn:
            while not self._is_over:
                if self._requests.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                try:
                    event = self._requests.next_event()
                except h11.RemoteProtocolError as fault:
                    await self.refuse(refusal(fault.error_status_hint, self._requests.fault))
                    break
                if isinstance(event, h11.Request):
                    await self._begin(event)
                elif event is h11.NEED_DATA and self.has_begun_head:
                    self._config.connection_limit.waits(self._connection)
                    break
                elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA or self._stream is None:
                    break
                elif isinstance(event, h11.Data) and not self._drops_body:
                    self._num_body_bytes += len(event.data)
                    await self._stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    self._connection.works()
                    await self._stream.handle(EndBody(stream_id=STREAM_ID))
        if not self._is_far_ahead:
            self._has_room.set()

    async def _begin(self, request: h11.Request) -> None:
        connection = self._connection
        connection.works()
        self._drops_body, holder = False, connection.holder
        try:
            self._take_place(request)
        except RequestError as error:
            await self.refuse(error, is_logged=False)  # there may be many: the connection limit has written one line
            return
        if connection.holder != holder:  # many may have come from this address, or proxy
            await connection.turn()
        if self._is_over:
            return
        state = ConnectionState({PLACE: self})
        if request.http_version == b"1.1" and request.method != b"HEAD":
            state[OUTLET] = self
        self._stream = HTTPStream(
            connection.app,
            self._config,
            connection.context,
            self._tasks,
            False,
            connection.client,
            connection.server,
            self._stream_send,
            STREAM_ID,
        )
        await self._stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=state,
            )
        )

    def _take_place(self, request: h11.Request) -> None:
        """Count the connection for whom *request* comes from. Raises RequestError if there is no place for it: an
        application would need ten times as long to say so."""
        connection = self._connection
        path = request.target.partition(b"?")[0] if request.method == b"GET" else b""
        if connection.no_place is not None:
            if path in PROBES:
                return
            raise connection.no_place
        connection_limit, keys = self._config.connection_limit, self._config.keys
        caller = keys.find(keys_in(request.headers)) if keys.exist else None
        self._most_viewers = caller.viewers if caller is not None else 0
        if caller is not None and caller.scope:
            connection_limit.belongs(connection, f"key {caller.scope}", connection_limit.key_share)
        elif connection.is_proxy and connection.client is not None:
            forwarded = [value.decode("latin1") for name, value in request.headers if name == b"x-forwarded-for"]
            client = self._config.proxies.client_of(connection.client[0], forwarded)
            connection_limit.belongs(connection, address_of(client), connection_limit.share)
        if path in VIEWS:
            self.views()
        if self.expects_more:
            connection_limit.receives(connection)

    async def _stream_send(self, event: Event) -> None:
        """Send what the application answers. An answer that comes before the end of its request closes the connection,
        and so does one to somebody who has no place."""
        if isinstance(event, Response):
            self._drops_body = True
            self.has_read()
            headers = [*event.headers, *self._config.response_headers("h11")]
            if self.expects_more or self._connection.no_place is not None:
                headers.append(CLOSE)
            await self._send(h11.Response(status_code=event.status_code, headers=headers))
        elif isinstance(event, Body):
            await self._send(h11.Data(data=event.data))
        elif isinstance(event, EndBody):
            await self._send(h11.EndOfMessage())
        elif isinstance(event, StreamClosed):
            await self._recycle()

    async def _send(self, event: h11.Event) -> None:
        if self._is_over:
            return
        try:
            data = self._requests.send(event)
        except h11.LocalProtocolError:
            if self._requests.their_state is not h11.ERROR and not self._requests.is_broken:
                raise
        else:
            await self._connection.write(data or b"")

    async def _recycle(self) -> None:
        """Wait for the next request, which may be here already."""
        await self._close_stream()
        if self._is_over:
            return
        requests, connection = self._requests, self._connection
        if connection.context.terminated.is_set() or (requests.our_state, requests.their_state) != (h11.DONE, h11.DONE):
            self._has_room.set()
            await connection.close(lingers=self.expects_more)
            return
        requests.start_next_cycle()
        connection.waits()
        if requests.num_waiting:
            self._tasks.spawn(self._go_on)
        self._has_room.set()

    async def _go_on(self) -> None:
        await self.turn()
        await self._handle_events()

    async def _close_stream(self) -> None:
        self._num_body_bytes = 0
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.handle(StreamClosed(stream_id=STREAM_ID))

    @property
    def _is_far_ahead(self) -> bool:
        """Return whether the client has sent as much of its next requests as the server takes."""
        requests = self._requests
        return not self._is_over and requests.is_ahead and requests.num_waiting >= MOST_AHEAD_BYTES


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def refused(error: RequestError, config: HttpConfig, *, has_body: bool = True) -> bytes:
    """Return *error* as an answer that no application gives."""
    retry = [(b"retry-after", b"1")] if error.status in (429, 503) else []
    return written(error.status, error_body(error), config, retry, has_body=has_body)


def written(
    status: int,
    body: bytes,
    config: HttpConfig,
    more_headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    has_body: bool = True,
) -> bytes:
    """Return an answer with a JSON *body*, the last one of its connection."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", uuid.uuid4().hex.encode()),
        *more_headers,
        CLOSE,
        *config.response_headers("h11"),
    ]
    lines = [b"HTTP/1.1 %d " % status, *(b"%b: %b" % header for header in headers)]
    return b"\r\n".join([*lines, b"", body if has_body else b""])
