"""The connections of clients: how they wait and end. `web.http.acceptor` accepts them, `web.http.protocol` has
their requests.

while a request is answered  its client is read on, so that a disconnect is noticed at once
an early answer              the rest of the body is read and dropped, for LINGER_S: closing would lose the answer
no place                     see `web.http.connection_limit`; a probe is answered all the same

A half-closed connection counts as a disconnect: a client that was killed sends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from typing import Any, Final

import orjson
from quart import Quart

from pipeline.errors import RequestError
from web.http.acceptor import ALIVE, Acceptor
from web.http.asgi import ASGIWrapper, HttpConfig, TaskGroup, WorkerContext
from web.http.connection_limit import address_of
from web.http.files import LEAST_AHEAD
from web.http.protocol import RECEIVED_BYTES, Protocol, refused, written
from web.http.turns import RoundRobin

BODY_TIMEOUT_S: Final = 30
LINGER_S: Final = float(BODY_TIMEOUT_S)
"""How long a client may go on sending a body that is dropped; then the connection is cut."""
HEAD_TIMEOUT_S: Final = 20.0
"""How long the first request of a connection may take to begin, and how long the head of any may take to come."""
IDLE_TIMEOUT_S: Final = 120.0
"""How long a connection may wait for its next request. Few seconds would race with clients that reuse a connection."""
KEPT_S: Final = 2.0
"""How long a connection without a place may take for its probe and the answer."""
GRACE_S: Final = 1.0
"""How long connections may take to end when the server stops."""
UNREAD_BYTES: Final = 4 << 10
"""A socket is not read while twice as many bytes wait to be parsed."""


async def serve(
    app: Quart,
    listener: socket.socket,
    config: HttpConfig,
    stop: asyncio.Event,
    *,
    most_ahead: int = LEAST_AHEAD,
    answered_probe: Callable[[], None] = lambda: None,
) -> None:
    """Answer the clients of *listener* until *stop* is set; then connections have GRACE_S to end. Closes *listener*.

    *most_ahead*: how many may be accepted before the loop takes them. A thread calls *answered_probe* for each probe
    that *app* does not see.
    """
    door = _Door(ASGIWrapper(app), config)

    def answer_probe() -> bytes:
        answered_probe()
        return written(200, orjson.dumps(ALIVE), config)

    await app.startup()
    acceptor = Acceptor(listener, door.take, answer_probe, most_ahead)
    acceptor.open()
    try:
        await stop.wait()
    finally:
        acceptor.close()
        listener.close()
        await door.context.terminated.set()
        for connection in door.tasks.values():
            connection.close_if_idle()
        if door.tasks:
            await asyncio.wait(door.tasks, timeout=GRACE_S)
        for connection in door.tasks.values():
            connection.cut()
        if door.tasks:
            await asyncio.wait(door.tasks, timeout=GRACE_S)
        await app.shutdown()


class _Door:
    """Takes connections in. To refuse one takes a few system calls and no transport: there may be thousands in a
    second."""

    def __init__(self, app: ASGIWrapper, config: HttpConfig) -> None:
        self.app, self.config, self.context = app, config, WorkerContext(None)
        self.loop = asyncio.get_running_loop()
        self.turns = RoundRobin(self.loop)
        self.received = bytearray(RECEIVED_BYTES)
        self.tasks: dict[asyncio.Task[None], Connection] = {}

    def take(self, client: socket.socket, address: Any) -> None:
        """Answer the requests of *client*, or refuse it."""
        connection = Connection(self, client, address)
        if connection.takes_place():
            task = self.loop.create_task(connection.run())
            self.tasks[task] = connection
            task.add_done_callback(self.tasks.pop)


class _Receiver(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Reads RECEIVED_BYTES at once: without a buffer of ours, asyncio reads up to 256 KiB."""

    def __init__(self, received: bytearray, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
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

    def __init__(self, door: _Door, client: socket.socket, address: Any) -> None:
        self.app, self.config, self.context, self._turns = door.app, door.config, door.context, door.turns
        self._door, self._socket = door, client
        self._loop = door.loop
        self._num_read = 0
        self._sending = asyncio.Lock()
        self._awaited: set[asyncio.Future[None]] = set()
        """The turns that it waits for."""
        self._lingering: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_cut = False
        self.is_local = client.family not in (socket.AF_INET, socket.AF_INET6)
        self.client: tuple[str, int] | None = None if self.is_local else (str(address[0]), int(address[1]))
        self.server: tuple[str, int] | None = None
        self._peer = address_of(self.client[0]) if self.client else "socket"
        self.is_proxy = self.client is not None and self.config.proxies.trust(self.client[0])
        self.holder = self._peer
        self.no_place: RequestError | None = None
        """Why it has no place and may only ask for a probe; None: it has a place."""

    def takes_place(self) -> bool:
        """Take a place in the connection_limit. If there is none, not even for a probe, refuse and close it."""
        self.no_place = self.config.connection_limit.enter(self)
        if self.no_place is None or self.config.connection_limit.keep(self):
            return True
        with contextlib.suppress(OSError):
            self._socket.send(refused(self.no_place, self.config))
            self._socket.recv(RECEIVED_BYTES)  # with unread data, closing would make TCP discard the answer
        self._socket.close()
        return False

    async def run(self) -> None:
        """Answer its requests until it has ended."""
        try:
            await self.turn()
            if not self._is_cut:
                await self._open()
                async with TaskGroup(self._loop) as self._tasks:
                    self.protocol = Protocol(self, self._tasks)
                    await self._read()
        except OSError:
            pass
        finally:
            self._head_came()
            self._stop_idle_timer()
            self.config.connection_limit.waits(self)  # it may have to wait until the client has read its last answer
            await self._close()
            self.config.connection_limit.leave(self)
            self.no_place = None  # its traceback leads back here, and so does the protocol:
            self.__dict__.pop("protocol", None)  # only a full collection would free them
            self.__dict__.pop("_tasks", None)

    async def _open(self) -> None:
        """Begin to read and to wait for a request."""
        loop = self._loop
        if not self.is_local:
            self.server = self._socket.getsockname()[:2]
        self.reader = asyncio.StreamReader(limit=UNREAD_BYTES, loop=loop)
        self._receiver = _Receiver(self._door.received, self.reader)
        transport, _ = await loop.connect_accepted_socket(lambda: self._receiver, self._socket)
        self.writer = asyncio.StreamWriter(transport, self._receiver, self.reader, loop)
        if self._is_cut:
            transport.abort()
        elif self.no_place is None:
            self.config.connection_limit.waits(self)
            self._head_timer = loop.call_later(spread_s(HEAD_TIMEOUT_S), self._head_is_late)
            self._idle_timer = loop.call_later(spread_s(IDLE_TIMEOUT_S), self._close_idle)
        else:
            self._head_timer = loop.call_later(KEPT_S, self.cut)

    # called by the connection limit

    @property
    def is_exempt(self) -> bool:
        """As Member.is_exempt."""
        return self.is_local or self.is_proxy

    def cut(self) -> None:
        """As Member.cut: close it at once, whatever it has sent."""
        self._is_cut = True
        for turn in self._awaited:
            if not turn.done():
                turn.set_result(None)
        if hasattr(self, "writer"):
            self.writer.transport.abort()
        if hasattr(self, "protocol"):
            self.protocol.stop()

    def released(self, error: RequestError) -> None:
        """As Member.released."""
        if self._lingering is None and hasattr(self, "protocol") and self.protocol.can_refuse:
            self._tasks.spawn(self.protocol.refuse, error)
        else:
            self.cut()

    def note_bytes(self) -> None:
        """Tell the connection limit how many bytes it holds."""
        num_bytes = self.protocol.num_bytes if self._lingering is None else 0
        self.config.connection_limit.hold(self, num_bytes + self.writer.transport.get_write_buffer_size())

    # called by its protocol

    @property
    def has_unread(self) -> bool:
        """Return whether bytes have come that the protocol did not get yet."""
        return self._receiver.num_received > self._num_read

    async def turn(self) -> None:
        """Wait for a turn of its holder, unless it is closed."""
        if not self._is_cut and (turn := self._turns.ask(self.holder)) is not None:
            self._awaited.add(turn)
            await turn
            self._awaited.discard(turn)

    def waits(self) -> None:
        """Wait for a request from now on."""
        self._head_came()
        if self.is_proxy:
            self.config.connection_limit.belongs(self, self._peer, self.config.connection_limit.most)
        self.config.connection_limit.waits(self)
        self._stop_idle_timer()
        self._idle_timer = self._loop.call_later(spread_s(IDLE_TIMEOUT_S), self._close_idle)
        self._await_head()

    def works(self) -> None:
        """Answer a request from now on."""
        if self.no_place is None:
            self._head_came()
        self._stop_idle_timer()
        self.config.connection_limit.works(self)

    async def write(self, data: bytes) -> None:
        """Send *data*, and wait until the client has read most of it; without a lock where nobody waits for that."""
        try:
            if self.is_free:
                self.writer.transport.write(data)
                if not self.writer.transport.get_write_buffer_size():
                    return
                data = b""
            async with self._sending:
                self.writer.write(data)
                self.note_bytes()
                await self.writer.drain()
                self.note_bytes()
        except (OSError, RuntimeError):  # the client has not read for long (TimeoutError), or `_linger` has begun
            await self.protocol.end()

    @property
    def is_free(self) -> bool:
        """Whether it takes bytes at once; else a write would wait, or it is closing."""
        transport = self.writer.transport
        is_busy = self._sending.locked() or transport.is_closing() or transport.get_write_buffer_size()
        return not is_busy and self._lingering is None

    async def close(self, *, lingers: bool) -> None:
        """Close it, once what was sent is gone, and if it *lingers*, the client has sent what it was about to."""
        self.config.connection_limit.waits(self)
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
        """Give a head that has begun some time to arrive completely."""
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
        if not hasattr(self, "writer"):
            self._socket.close()
            return
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
            if data:
                await self.protocol.turn()
            self._num_read += len(data)
            if self._lingering is None and not self._is_cut:
                await self.protocol.receive(data)
                if self._lingering is None:
                    self._await_head()
        if self._lingering is not None:
            self._lingering.cancel()
        await self.protocol.end()
        self._stop_idle_timer()


def spread_s(timeout_s: float) -> float:
    """Return a timeout that is up to a quarter longer, so that connections that began together do not end together."""
    return timeout_s * random.uniform(1, 1.25)
