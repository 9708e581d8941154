"""The connections of clients: how they are accepted, wait and end. `web.protocol` has their requests.

while a request is answered  its client is read on, so that a disconnect is noticed at once
an early answer              the rest of the body is read and dropped, for LINGER_S: closing would lose the answer
no place                     see `web.crowd`; a probe is answered all the same

A half-closed connection counts as a disconnect: a client that was killed sends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, Final

from quart import Quart

from pipeline.errors import RequestError
from web.app import BODY_TIMEOUT_S, spread_s
from web.asgi import ASGIWrapper, HttpConfig, TaskGroup, WorkerContext
from web.crowd import Queue, address_of
from web.listener import BACKLOG
from web.protocol import RECEIVED_BYTES, Protocol, written

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
UNREAD_BYTES: Final = 4 << 10
"""A socket with twice as much that nobody looked at is not read."""


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
                self.writer.write(written(self.no_place, self.config))
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
            self.no_place = None  # its traceback leads back here, and so does the protocol:
            self.__dict__.pop("protocol", None)  # only a full collection would free them
            self.__dict__.pop("_tasks", None)

    # as the crowd sees it

    @property
    def is_exempt(self) -> bool:
        """As Member.is_exempt."""
        return self.is_local or self.is_proxy

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

    async def close(self, *, lingers: bool) -> None:
        """Close it, once what was sent is gone, and if it *lingers*, the client has sent what it was about to."""
        self.config.crowd.waits(self)
        await (self._linger() if lingers else self._close())

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
            self._tasks.spawn(self.protocol.refuse_late_head, HEAD_TIMEOUT_S)

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
