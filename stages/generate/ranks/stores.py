"""Stores where the ranks of a start find each other: a file in rank 0's memory, or a port of its machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch.distributed as dist

from pipeline.errors import RankLost
from stages.generate.collectives import told
from stages.generate.ranks.channel import PATIENCE_S

_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's stubs do not export it
REACH_S: Final = 5.0
"""Timeout of a rank's connection to the port."""


@contextlib.contextmanager
def opened_store(size: int, address: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of a store where *size* ranks find each other, and rank 0's connection to it.

    With an *address* of this machine, other machines can reach the store there, and only there, until the block ends.

    Raises:
        OSError: The store cannot be made.
    """
    if address:
        with _port(address) as name:
            yield name, reached_store(name, size)
        return
    yield memory_store(size)


def memory_store(size: int) -> tuple[str, Any]:
    """Return the name of a store where *size* ranks of this machine find each other, and rank 0's connection to it.

    It is a file in memory that only this user's processes can open. It ends with this process, however that ends. Until
    then it stays open: stores write to it by name when they are freed, so the name must not become another file's.

    Raises:
        OSError: The store cannot be made.
    """
    name = f"/proc/{os.getpid()}/fd/{os.memfd_create('minisgl-ranks')}"
    return name, reached_store(name, size)


@contextlib.contextmanager
def _port(address: str) -> Iterator[str]:
    """Listen at *address* until the block ends. By itself, TCPStore would listen at all addresses."""
    is_ipv6 = ":" in address
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    port = listener.getsockname()[1]
    # The store closes the socket in the end. Rank 0's gloo keeps a connection to it, which is another object.
    store = _TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield f"tcp://[{address}]:{port}" if is_ipv6 else f"tcp://{address}:{port}"
    finally:
        del store


def reached_store(name: str, size: int) -> Any:
    """Return a connection to the store *name*, which rank 0 of *size* ranks has opened.

    Raises:
        RankLost: The store is gone, or cannot be reached.
    """
    place = urlsplit(name)
    if place.scheme != "tcp":
        if not Path(name).exists():
            raise RankLost(f"there is no file {name}; rank 0 has ended, or is on another machine")
        return dist.FileStore(name, size)  # type: ignore[attr-defined]
    host, port = place.hostname or "", place.port or 0
    try:
        socket.create_connection((host, port), REACH_S).close()  # TCPStore would try for long, with many lines
        return _TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))
    except (OSError, RuntimeError) as error:
        why = told(error) if isinstance(error, RuntimeError) else error
        raise RankLost(
            f"rank 0 cannot be reached at {host}:{port}: {why}; it has ended, or the network is closed"
        ) from error
