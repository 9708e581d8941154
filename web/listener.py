"""The listening socket: ours, so that a server that is restarted goes on with the same one, and a dead peer is noticed.

Imports no server: a supervisor opens the socket and hands it down.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from pipeline.errors import ConfigError

BACKLOG: Final = 2048
USER_TIMEOUT_MS: Final = 30_000
"""After so long without an acknowledgement a client is gone, though it never said so."""


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on *host*:*port*; accepted sockets inherit its options.

    Raises:
        ConfigError: The address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}; use 127.0.0.1, or 0.0.0.0 for all interfaces") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: another program listens on {host}:{port}; stop it, or take another --port"
            ) from error
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; take another address or port") from error
    return listener
