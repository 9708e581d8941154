"""HTTP over plain sockets, for clients that measure and clients that attack. Knows neither."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
HOST: Final = "127.0.0.1"
INNOCENT, ATTACKER, ADMIN = "innocent", "attacker", "admin"
"""API keys of the server."""
ATTACKERS_HOST: Final = "127.0.0.2"
"""Attackers connect from here: a server may have a limit for each address. Linux has all of 127.0.0.0/8."""
ANSWER_TIMEOUT_S: Final = 60.0
NO_ANSWER: Final = "none"
"""Counted as a status where the server closed without an answer."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request(path: str, body: bytes | None = None, *, key: str = ATTACKER, stays: bool = False) -> bytes:
    """Return a POST of *body*, or a GET without one. Unless the connection *stays*, it ends after the answer."""
    method = "GET" if body is None else "POST"
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if not stays:
        lines.append("Connection: close")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@contextlib.asynccontextmanager
async def connected(port: int, host: str = HOST) -> AsyncIterator[Connection]:
    """Connect to the server as a client with the address *host*."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24, local_addr=(host, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(port: int, data: bytes, timeout_s: float = ANSWER_TIMEOUT_S, host: str = HOST) -> str:
    """Return the status that answers *data*, once the answer is whole. The server may answer before it has all."""
    try:
        async with asyncio.timeout(timeout_s), connected(port, host) as (reader, writer):
            writer.write(data)
            line = await reader.readline()
            while await reader.read(1 << 20):
                pass
    except TimeoutError:
        return "timeout"
    except OSError:
        return NO_ANSWER
    return status_in(line)


def status_in(line: bytes) -> str:
    """Return the status of the first line of an answer."""
    return line.split()[1].decode() if line.count(b" ") > 1 else NO_ANSWER
