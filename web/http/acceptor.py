"""Accepts connections in a thread of its own, and answers there who only asks whether this process is alive.

Under load a turn of the event loop takes 10 to 50 ms, and a request on a new connection needs several. A probe that
waits so long takes a busy server for a dead one. A loop that is stuck gets no help: the watchdog ends its process.

Only the plainest probe is answered here: GET /health, with headers that change nothing, and no wish for another answer
on the same connection. All others go to the loop. Knows nothing of what happens there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import structlog

from web.http.listener import BACKLOG

logger = structlog.get_logger()

Taken = tuple[socket.socket, Any]
"""A connected socket that does not block, and the address of its client."""

ACCEPTED_AT_ONCE: Final = 16
"""Connections that the thread accepts, and the loop takes, before others have a turn."""
ALIVE: Final = {"status": "ok"}
"""What GET /health answers."""
MOST_SILENT: Final = 64
"""Connections that the thread holds because nothing has come on them; the loop gets the oldest of more."""
SILENT_S: Final = 0.5
"""How long it holds one."""
MANY_AHEAD: Final = 64
"""So many waiting for the loop are many: another process that listens here, too, may be free .."""
BEHIND_S: Final = 0.001
""".. so none is accepted for this long, after each ACCEPTED_AT_ONCE."""
FULL_S: Final = 0.005
"""The same while there may be no more of them."""
ACCEPTED_AGAIN_S: Final = 1.0
"""How long none is accepted when there were no files or memory for one."""
PROBE_BYTES: Final = 2 << 10
"""Probes are shorter."""

_PROBE: Final = re.compile(
    rb"GET /health HTTP/1\.([01])\r\n"
    rb"((?:(?i:host|user-agent|accept|accept-encoding|authorization|connection): ?[\x20-\x7e]*\r\n)*)\r\n"
)
_HOST: Final = re.compile(rb"^host:", re.IGNORECASE | re.MULTILINE)
_CONNECTION: Final = re.compile(rb"^connection: *(.*?) *\r$", re.IGNORECASE | re.MULTILINE)


class Acceptor:
    """The listening socket, from `open` to `close`."""

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket, Any], None],
        answer: Callable[[], bytes],
        most_ahead: int,
    ) -> None:
        """*take* gets each other connection, in the running loop. *answer* returns that to a probe; the thread calls
        it. *most_ahead*: how many connections may wait for the loop; with more, none is accepted. No limit of
        connections counts them yet.
        """
        self._listener, self._take, self._answer = listener, take, answer
        self._loop = asyncio.get_running_loop()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._most_ahead = most_ahead
        self._ahead: deque[Taken] = deque()
        """Those that wait for the loop."""
        self._is_told = False
        """The loop will look for them."""
        self._silent: dict[socket.socket, tuple[Any, float]] = {}
        """Socket -> address, and when the loop gets it at the latest; the oldest first."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="acceptor", daemon=True)

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._thread.start()

    def close(self) -> None:
        """Accept no more. The loop gets all that were accepted; the listening socket stays open."""
        self._is_closing = True
        self._waker.send(b"\0")
        self._thread.join()
        self._waker.close()
        self._woken.close()
        while self._ahead:
            self._take(*self._ahead.popleft())

    # in the thread

    def _run(self) -> None:
        with self._selector as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            accepts_at_s: float | None = None  # it does not listen before
            while not self._is_closing:
                if accepts_at_s is not None and time.monotonic() >= accepts_at_s:
                    selector.register(self._listener, selectors.EVENT_READ)
                    accepts_at_s = None
                for key, _ in selector.select(self._patience_s(accepts_at_s)):
                    client = key.fileobj
                    if client is self._listener and (pause_s := self._accept()):
                        selector.unregister(self._listener)
                        accepts_at_s = time.monotonic() + pause_s
                    elif isinstance(client, socket.socket) and client in self._silent:
                        self._dispatch(client, self._silent[client][0])
                self._hand_over_silent()
            for client, (address, _) in list(self._silent.items()):
                self._hand_over(client, address)

    def _patience_s(self, accepts_at_s: float | None) -> float | None:
        """Return how long the thread may wait for something to come; None: for ever."""
        times = [until_s for _, until_s in itertools.islice(self._silent.values(), 1)]
        times += [] if accepts_at_s is None else [accepts_at_s]
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _accept(self) -> float:
        """Accept some of those who wait. Return for how many seconds to accept no more."""
        for _ in range(ACCEPTED_AT_ONCE):
            if len(self._ahead) >= self._most_ahead:
                return FULL_S
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return 0.0
            except OSError as error:  # no files or memory are left
                logger.warning("not_accepted", error=str(error))
                return ACCEPTED_AGAIN_S
            client.setblocking(False)
            self._dispatch(client, address)
        return BEHIND_S if len(self._ahead) >= MANY_AHEAD else 0.0

    def _dispatch(self, client: socket.socket, address: Any) -> None:
        """Answer *client* if it sent a probe, wait if it sent nothing, and else hand it over."""
        try:
            head = client.recv(PROBE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            if client not in self._silent:
                self._silent[client] = address, time.monotonic() + SILENT_S
                self._selector.register(client, selectors.EVENT_READ)
            return
        except OSError:  # the loop will notice
            head = b""
        if not is_probe(head):
            self._hand_over(client, address)
            return
        self._forget(client)
        with contextlib.suppress(OSError), client:
            client.recv(len(head))  # with unread data, closing would make TCP discard the answer
            client.send(self._answer())

    def _hand_over_silent(self) -> None:
        """Hand over those that have been silent for long, and the oldest if they are many."""
        now_s = time.monotonic()
        for client, (address, until_s) in list(self._silent.items()):
            if until_s > now_s and len(self._silent) <= MOST_SILENT:
                break
            self._hand_over(client, address)

    def _forget(self, client: socket.socket) -> None:
        if self._silent.pop(client, None) is not None:
            self._selector.unregister(client)

    def _hand_over(self, client: socket.socket, address: Any) -> None:
        self._forget(client)
        self._ahead.append((client, address))
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take_some)

    # in the loop

    def _take_some(self) -> None:
        self._is_told = False  # before it looks: the thread may add one meanwhile
        for _ in range(min(len(self._ahead), ACCEPTED_AT_ONCE)):
            self._take(*self._ahead.popleft())
        if self._ahead and not self._is_told:
            self._is_told = True
            self._loop.call_soon(self._take_some)


def is_probe(head: bytes) -> bool:
    """Return whether *head* is a whole request, and the last of its connection, that GET /health answers alike whoever
    asks (RFC 9112, 9.3: a client of HTTP/1.0 that does not ask to keep the connection, or one that asks to close
    it)."""
    found = _PROBE.fullmatch(head)
    if found is None:
        return False
    wishes = [wish.lower() for wish in _CONNECTION.findall(found[2])]
    if found[1] == b"0":
        return wishes in ([], [b"close"])
    return wishes == [b"close"] and len(_HOST.findall(found[2])) == 1
