"""The listening socket. A supervisor opens it and hands it down, so that a restarted server keeps the same socket.

Its options let the server notice dead clients. Imports no server.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from typing import Final

from pipeline.errors import ConfigError

BACKLOG: Final = 2048
ANY_ADDRESS: Final[Mapping[str, str]] = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address to listen on -> the address at which a client on the same machine finds the server."""
USER_TIMEOUT_MS: Final = 30_000
"""A client that acknowledges nothing for this long counts as disconnected."""


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on *host*:*port*; accepted sockets inherit its options.

    Raises:
        ConfigError: The address is not available.
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


def url_here(host: str, port: int) -> str:
    """Return the URL at which a client on this machine finds a server that listens on *host*."""
    return url_to(ANY_ADDRESS.get(host, host), port)


def url_to(host: str, port: int) -> str:
    """Return the URL of a host, which may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
