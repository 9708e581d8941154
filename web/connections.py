"""HTTP/1.1 connections: how they read or refuse requests, how they end, and the server that accepts them.

a malformed request          gets the usual error body, an id, and a line in the log
while a request is answered  its client is read on, so that a disconnect is noticed at once
an early answer              the rest of the body is read and dropped, for LINGER_S: closing would lose the answer
HTTP/2, websockets           the answer is HTTP/1.1, which every such client speaks, too
requests that came ahead     begin one in a turn of the loop, whichever connection they came on
no place                     see `web.crowd`; a probe is answered all the same

A half-closed connection counts as a disconnect: a client that was killed sends nothing else.

Only this file uses Hypercorn: what is between a request and its ASGI application, no server and no protocol.
`tests/web/test_hypercorn.py` has the names, with what they take.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import Callable
from typing import Any, Final

import h11
import structlog
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.protocol.events import Body, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import ConnectionState
from quart import Quart

from pipeline.errors import RequestError
from web.app import BODY_TIMEOUT_S, spread_s
from web.crowd import BODIES_BYTES, LEAST_BYTES, Crowd, Proxies, Queue, address_of
from web.http1 import MOST_AHEAD_BYTES, Requests, refusal
from web.listener import BACKLOG
from web.routes.access import PLACE
from web.routes.answers import SEND, WRITE
from web.seldom import Seldom
from web.wire.openai.errors import error_body

logger = structlog.get_logger()

LINGER_S: Final = float(BODY_TIMEOUT_S)
"""How long a client may go on sending a body that is dropped; then the connection is cut."""
HEAD_TIMEOUT_S: Final = 20.0
"""How long the first request of a connection may take to begin, and how long the head of any may take to come."""
IDLE_TIMEOUT_S: Final = 120.0
"""How long a connection may wait for its next request. Few seconds would race with clients that reuse a connection."""
KEPT_S: Final = 2.0
"""How long a connection without a place may take for its probe and the answer."""
GRACE_S: Final = 1.0
"""How long connections have to end when the server stops."""
ACCEPTED_AT_ONCE: Final = 16
"""Connections that are accepted before other tasks have a turn. Three times as many may be open beyond the most."""
RECEIVED_BYTES: Final = 32 << 10
"""Most that one read of a socket takes. Nobody may look at it for a while, so it is little."""
UNREAD_BYTES: Final = 4 << 10
"""A socket with twice as much that nobody looked at is not read."""
PROBES: Final = (b"/health", b"/ready", b"/metrics")
"""What a connection without a place may GET."""
CLOSE: Final = (b"connection", b"close")
STREAM_ID: Final = 1
_LATE: Final = "The request line and headers did not arrive within {:g} s."
_NO_LOGGER: Final = "hypercorn.error"


class HttpConfig(Config):
    """Hypercorn's configuration, and what connections need besides."""

    def __init__(
        self,
        max_body_bytes: int,
        most_connections: int,
        seldom: Seldom,
        *,
        several_keys: bool = False,
        proxies: Proxies | None = None,
    ) -> None:
        super().__init__()
        self.include_server_header = False
        self.accesslog = None
        self.errorlog = logging.getLogger(_NO_LOGGER)
        self.max_app_queue_size = 0  # a piece of a body never waits for its application: it may be gone
        self.max_body_bytes = max_body_bytes
        self.proxies = proxies or Proxies()
        most_bytes = max(BODIES_BYTES * max_body_bytes, LEAST_BYTES)
        self.crowd = Crowd(most_connections, seldom, several_keys=several_keys, most_bytes=most_bytes)


async def serve(app: Quart, listener: socket.socket, config: HttpConfig, stop: asyncio.Event) -> None:
    """Answer the clients of *listener* until *stop* is set; then connections have GRACE_S to end. Closes *listener*."""
    loop, context = asyncio.get_running_loop(), WorkerContext(None)
    answer, queue, received = ASGIWrapper(app), Queue(loop.call_soon), bytearray(RECEIVED_BYTES)
    tasks = dict[asyncio.Task[None], Connection]()

    def accept() -> _Receiver:
        return _Receiver(received, asyncio.StreamReader(limit=UNREAD_BYTES, loop=loop), run)

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks[task] = connection = Connection(answer, config, context, queue, reader, writer)
        task.add_done_callback(tasks.pop)
        await connection.run()

    await app.startup()
    server = await loop.create_server(accept, sock=listener, backlog=ACCEPTED_AT_ONCE)
    listener.listen(BACKLOG)  # asyncio has one number for how many are accepted at once and how many may wait
    try:
        await stop.wait()
    finally:
        server.close()
        await context.terminated.set()
        for connection in tasks.values():
            connection.close_if_idle()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        for connection in tasks.values():
            connection.cut()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        await app.shutdown()


class _Receiver(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Reads RECEIVED_BYTES at once: without a buffer of ours, asyncio reads up to 256 KiB."""

    def __init__(self, received: bytearray, reader: asyncio.StreamReader, run: Callable[..., Any]) -> None:
        super().__init__(reader, run)
        self._received = received
        self.num_received = 0

    def get_buffer(self, sizehint: int) -> bytearray:
        """As BufferedProtocol.get_buffer. All connections share it: `buffer_updated` follows at once."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """As BufferedProtocol.buffer_updated."""
        self.num_received += nbytes
        self.data_received(bytes(memoryview(self._received)[:nbytes]))


class Connection:
    """A connection that ends when its client closes it, and not before the client could read its last answer."""

    def __init__(
        self,
        app: ASGIWrapper,
        config: HttpConfig,
        context: WorkerContext,
        queue: Queue,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.config, self.context, self.queue = config, context, queue
        self.app, self.reader, self.writer = app, reader, writer
        self._receiver, self._num_read = writer.transport.get_protocol(), 0
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._lingering: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_cut = False
        self.is_local = writer.get_extra_info("socket").family not in (socket.AF_INET, socket.AF_INET6)
        peer, own = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        self.client = None if self.is_local or not peer else (str(peer[0]), int(peer[1]))
        self.server = None if self.is_local or not own else (str(own[0]), int(own[1]))
        self._peer = address_of(self.client[0]) if self.client else "socket"
        self.is_proxy = self.client is not None and config.proxies.trust(self.client[0])
        self.holder = self._peer
        self.no_place: RequestError | None = None
        """Why it may only ask for a probe, if so."""

    async def run(self) -> None:
        """Answer its requests until it has ended."""
        if self.client is None and not self.is_local:  # it is closed already
            self.writer.close()
            return
        crowd = self.config.crowd
        self.no_place = crowd.enter(self)
        if self.no_place is not None and not crowd.keep(self):
            with contextlib.suppress(OSError):
                self.writer.write(_written(self.no_place))
                self.writer.close()
            return
        try:
            if self.no_place is None:
                self._head_timer = self._loop.call_later(spread_s(HEAD_TIMEOUT_S), self._head_is_late)
                self._idle_timer = self._loop.call_later(spread_s(IDLE_TIMEOUT_S), self._close_idle)
            else:
                self._head_timer = self._loop.call_later(KEPT_S, self.cut)
            async with TaskGroup(self._loop) as self._tasks:
                self.protocol = Protocol(self, self._tasks)
                await self._read()
        except OSError:
            pass
        finally:
            self._head_came()
            self._stop_idle_timer()
            crowd.waits(self)  # it may have to wait until the client has read its last answer
            await self._close()
            crowd.leave(self)
            self.__dict__.pop("protocol", None)  # it leads back here: only a full collection would free the two
            self.__dict__.pop("_tasks", None)

    # as the crowd sees it

    @property
    def is_exempt(self) -> bool:
        """As Member.is_exempt."""
        return self.is_local or self.is_proxy

    @property
    def awaits_body(self) -> bool:
        """As Member.awaits_body."""
        return self._lingering is not None or (hasattr(self, "protocol") and self.protocol.expects_more)

    def cut(self) -> None:
        """As Member.cut: close it at once, whatever it has sent."""
        self._is_cut = True
        self.writer.transport.abort()
        if hasattr(self, "protocol"):
            self.protocol.stop()

    def let_go(self, error: RequestError) -> None:
        """As Member.let_go."""
        if self._lingering is None and hasattr(self, "protocol") and self.protocol.can_refuse:
            self._tasks.spawn(self.protocol.refuse, error)
        else:
            self.cut()

    def note_bytes(self) -> None:
        """Tell the crowd how much it holds."""
        num_bytes = self.protocol.num_bytes if self._lingering is None else 0
        self.config.crowd.hold(self, num_bytes + self.writer.transport.get_write_buffer_size())

    # as its protocol sees it

    @property
    def has_unread(self) -> bool:
        """Say whether bytes have come that the protocol has not got."""
        return isinstance(self._receiver, _Receiver) and self._receiver.num_received > self._num_read

    def waits(self) -> None:
        """Wait for a request from now on."""
        self._head_came()
        if self.is_proxy:
            self.config.crowd.belongs(self, self._peer, self.config.crowd.most)
        self.config.crowd.waits(self)
        self._stop_idle_timer()
        self._idle_timer = self._loop.call_later(spread_s(IDLE_TIMEOUT_S), self._close_idle)
        self._await_head()

    def works(self) -> None:
        """Answer a request from now on."""
        if self.no_place is None:
            self._head_came()
        self._stop_idle_timer()
        self.config.crowd.works(self)

    async def write(self, data: bytes) -> None:
        """Send *data*, and wait until the client has read most of it; without a lock where nobody waits for that."""
        try:
            if (transport := self.free_transport()) is not None:
                transport.write(data)
                if not transport.get_write_buffer_size():
                    return
                data = b""
            async with self._sending:
                self.writer.write(data)
                self.note_bytes()
                await self.writer.drain()
                self.note_bytes()
        except (OSError, RuntimeError):  # the client has not read for long (TimeoutError), or `_linger` has begun
            await self.protocol.end()

    def free_transport(self) -> asyncio.WriteTransport | None:
        """Return what takes bytes at once; None if somebody has to wait for the client, or it takes none any more."""
        transport = self.writer.transport
        is_free = not (self._sending.locked() or transport.is_closing() or transport.get_write_buffer_size())
        return transport if is_free and self._lingering is None else None

    async def close(self) -> None:
        """Close it, once what was sent is gone, and the client has sent what it was about to."""
        await (self._linger() if self.awaits_body else self._close())

    # its end

    def close_if_idle(self) -> None:
        """Close it if it waits for a request."""
        if self._idle_timer is not None:
            self._close_idle()

    def _close_idle(self) -> None:
        self._is_cut = True
        self.writer.close()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _await_head(self) -> None:
        """Once a head has begun to come, give it some time to come whole."""
        if self._head_timer is None and self.protocol.has_begun_head:
            self._head_timer = self._loop.call_later(spread_s(HEAD_TIMEOUT_S), self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._lingering is None and hasattr(self, "protocol"):
            self._tasks.spawn(self.protocol.refuse_late_head)

    async def _linger(self) -> None:
        """Send nothing more, and drop what comes. With unread data, closing would make TCP discard the answer."""
        if self._lingering is None:
            self._lingering = self._loop.call_later(LINGER_S, self.writer.close)
            with contextlib.suppress(OSError, RuntimeError):  # it is closed already
                self.writer.write_eof()
            await self.protocol.end()
            self.note_bytes()

    async def _close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write_eof()
        self.writer.close()
        with contextlib.suppress(OSError, RuntimeError):
            await self.writer.wait_closed()

    async def _read(self) -> None:
        data = b"anything"
        while data:
            wanted = self.protocol.wanted_bytes if self._lingering is None else RECEIVED_BYTES
            try:
                data = await self.reader.read(wanted)
            except OSError:  # reset
                break
            self._num_read += len(data)
            if self._lingering is None and not self._is_cut:
                await self.protocol.receive(data)
                if self._lingering is None:
                    self._await_head()
        if self._lingering is not None:
            self._lingering.cancel()
        await self.protocol.end()
        self._stop_idle_timer()


class Protocol:
    """The requests of one connection, one after the other."""

    def __init__(self, connection: Connection, tasks: TaskGroup) -> None:
        self._connection, self._tasks, self._config = connection, tasks, connection.config
        self._requests = Requests(self._config.max_body_bytes)
        self._stream: HTTPStream | None = None
        self._in_turn = asyncio.Lock()
        self._has_room = asyncio.Event()
        self._num_body_bytes = 0
        """What the application has of the body of the current request, and has not read."""
        self._drops_body = False
        self._closes = False
        """The connection ends after the current answer."""
        self._is_queued = False
        """The next request waits for its turn."""
        self._is_over = False

    @property
    def expects_more(self) -> bool:
        """Say whether the client may be in the middle of a body."""
        return self._requests.expects_more

    @property
    def has_begun_head(self) -> bool:
        """Say whether the client is in the middle of the head of a request."""
        return self._requests.has_begun_head

    @property
    def can_refuse(self) -> bool:
        """Say whether the answer to the current request has not begun."""
        return not self._is_over and self._requests.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def num_bytes(self) -> int:
        """How many bytes of requests it holds."""
        return self._num_body_bytes + self._requests.num_waiting

    @property
    def wanted_bytes(self) -> int:
        """How many bytes it takes next, at most."""
        if self._requests.their_state is h11.SEND_BODY:
            return RECEIVED_BYTES
        is_ahead = self._is_queued or self._requests.is_ahead
        return max(MOST_AHEAD_BYTES - self._requests.num_waiting, 1) if is_ahead else MOST_AHEAD_BYTES

    async def receive(self, data: bytes) -> None:
        """Take what the client has sent, b"" at its end; wait while it is far ahead of its answers."""
        self._requests.receive_data(data)
        if not self._is_queued:
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
        """As `stop`, and tell the application."""
        self.stop()
        await self._close_stream()

    async def refuse_late_head(self) -> None:
        """End a connection on which no request came in time."""
        if self.has_begun_head:
            error = RequestError(_LATE.format(HEAD_TIMEOUT_S), code="request_timeout", status=408)
            await self._send_error(error)
        await self._connection.close()

    async def refuse(self, error: RequestError) -> None:
        """Answer the current request with *error*, if it has no answer yet, and end the connection."""
        if self.can_refuse:
            self._requests.is_broken = True  # its rest may come
            await self._send_error(error)
        await self._connection.close()

    # what an application may call

    def belongs_to(self, key: str) -> None:
        """As Place.belongs_to."""
        crowd = self._config.crowd
        try:
            crowd.belongs(self._connection, f"key {key}", crowd.key_share)
        except RequestError:
            self._closes = True
            raise

    def views(self) -> None:
        """As Place.views."""
        self._config.crowd.views(self._connection)

    def has_read(self) -> None:
        """As Place.has_read."""
        self._num_body_bytes = 0
        self._connection.note_bytes()

    async def send_piece(self, data: bytes) -> bool:
        """Send a piece of an answer of unknown length, as h11 would (RFC 9112, 7.1), unless its head was not sent yet
        or its end was. Return whether it was sent."""
        if self._requests.our_state is not h11.SEND_BODY:
            return False
        await self._connection.write(_chunk(data))
        return True

    def write_piece(self, make: Callable[[], bytes]) -> bool:
        """As `send_piece`, with what *make* returns, unless somebody has to wait for the client."""
        transport = self._connection.free_transport()
        if transport is None or self._requests.our_state is not h11.SEND_BODY:
            return False
        if data := make():
            transport.write(_chunk(data))
        return True

    # one request

    async def _handle_events(self) -> None:
        async with self._in_turn:
            while not (self._is_over or self._is_queued):
                if self._requests.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                try:
                    event = self._requests.next_event()
                except h11.RemoteProtocolError as fault:
                    await self.refuse(refusal(fault.error_status_hint, self._requests.fault))
                    break
                if isinstance(event, h11.Request):
                    await self._begin(event)
                elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA or self._stream is None:
                    break
                elif isinstance(event, h11.Data) and not self._drops_body:
                    self._num_body_bytes += len(event.data)
                    await self._stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    await self._stream.handle(EndBody(stream_id=STREAM_ID))
        if not self._is_far_ahead:
            self._has_room.set()

    async def _begin(self, request: h11.Request) -> None:
        connection = self._connection
        connection.works()
        self._drops_body = False
        if error := self._refusal_of(request):
            await self.refuse(error)
            return
        state = ConnectionState({PLACE: self})
        if request.http_version == b"1.1" and request.method != b"HEAD":
            state.update({SEND: self.send_piece, WRITE: self.write_piece})
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

    def _refusal_of(self, request: h11.Request) -> RequestError | None:
        """Return the error for a request of somebody who has no place, if there is none."""
        connection = self._connection
        if connection.no_place is not None:
            is_probe = request.method == b"GET" and request.target.partition(b"?")[0] in PROBES
            return None if is_probe else connection.no_place
        if connection.is_proxy and connection.client is not None:
            said = [value.decode("latin1") for name, value in request.headers if name == b"x-forwarded-for"]
            client = self._config.proxies.client_of(connection.client[0], said)
            try:
                self._config.crowd.belongs(connection, address_of(client), self._config.crowd.share)
            except RequestError as error:
                return error
        return None

    async def _stream_send(self, event: Event) -> None:
        """Send what the application answers. An answer that comes before the end of its request closes the connection,
        and so does one to somebody who has no place."""
        if isinstance(event, Response):
            self._drops_body = True
            self.has_read()
            headers = [*event.headers, *self._config.response_headers("h11")]
            if self.expects_more or self._closes or self._connection.no_place is not None:
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
        """Wait for the next request; if it came ahead already, wait for its turn."""
        await self._close_stream()
        if self._is_over:
            return
        requests, connection = self._requests, self._connection
        if connection.context.terminated.is_set() or (requests.our_state, requests.their_state) != (h11.DONE, h11.DONE):
            self._has_room.set()
            await connection.close()
            return
        requests.start_next_cycle()
        self._is_queued = requests.num_waiting > 0 or connection.has_unread
        connection.waits()
        if self._is_queued:
            connection.queue.add(self._begin_next)
        self._has_room.set()

    def _begin_next(self) -> None:
        self._is_queued = False
        if not self._is_over:
            self._tasks.spawn(self._handle_events)

    async def _close_stream(self) -> None:
        self._num_body_bytes = 0
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.handle(StreamClosed(stream_id=STREAM_ID))

    @property
    def _is_far_ahead(self) -> bool:
        """Say whether the client has sent as much of its next requests as is taken."""
        is_waiting = self._is_queued or self._requests.is_ahead
        return not self._is_over and is_waiting and self._requests.num_waiting >= MOST_AHEAD_BYTES

    async def _send_error(self, error: RequestError) -> None:
        """Answer bytes that are not a request, or one that no application gets."""
        logger.info("request", status=error.status, error=error.code)
        body = error_body(error)
        headers = [*_headers_of(error, body), *self._config.response_headers("h11")]
        await self._send(h11.Response(status_code=error.status, headers=headers))
        if self._requests.method != b"HEAD":
            await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _headers_of(error: RequestError, body: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", uuid.uuid4().hex.encode()),
        *([(b"retry-after", b"1")] if error.status in (429, 503) else []),
        CLOSE,
    ]


def _written(error: RequestError) -> bytes:
    """Return the whole answer to somebody whose request is not read."""
    body = error_body(error)
    lines = [b"HTTP/1.1 %d " % error.status, *(b"%b: %b" % header for header in _headers_of(error, body))]
    return b"\r\n".join([*lines, b"", body])
