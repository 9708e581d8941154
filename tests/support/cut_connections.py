"""A relay before a server: it passes bytes on, and a test can cut all connections and refuse new ones for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Passes connections to *to*, a port of this machine, on."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open = True
        self._ends: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Cut all connections. New ones are cut, too, until `open`."""
        with self._lock:
            self._open = False
            ends = set(self._ends)
        for end in ends:
            _cut(end)

    def open(self) -> None:
        """Pass new connections on again."""
        with self._lock:
            self._open = True

    def end(self) -> None:
        """Stop for good."""
        self.close()
        _cut(self._listener)
        self._accepting.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                server = socket.create_connection(("127.0.0.1", self._to))
                with self._lock:
                    self._ends |= {client, server}
                    is_open = self._open
                if not is_open:
                    _cut(client)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while read := source.recv(65536):
                sink.sendall(read)
        _cut(source)
        _cut(sink)
        with self._lock:
            self._ends.discard(source)
        source.close()


def _cut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cutting(to: int) -> Iterator[Relay]:
    """Run a relay to a port of this machine until the block ends."""
    relay = Relay(to)
    try:
        yield relay
    finally:
        relay.end()
