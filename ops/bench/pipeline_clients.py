"""Cheap HTTP clients: they share their cores with the server that is measured.

`python pipeline_clients.py PORT CONNECTIONS` connects and reads orders, a line of JSON each: the requests of each
connection, one after the other. It prints "done" when all answers of an order are complete; otherwise it prints the
error and ends. It imports no other module of ours.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

DONE: Final = "done"
LARGEST_ANSWER: Final = 1 << 26
TIMEOUT_S: Final = 60.0
_LENGTH: Final = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Unanswered(Exception):
    """An answer is missing or wrong."""


async def carry_out(fields: Mapping[str, Any], num_requests: int, connections: Sequence[Connection]) -> None:
    """Send so many requests with the same *fields* on all *connections* at once. Raises Unanswered."""
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    timeout_s = TIMEOUT_S + fields["max_tokens"]
    asked = (_ask(head.encode() + body, num_requests, timeout_s, connection) for connection in connections)
    for failed in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(failed, OSError | EOFError):
            raise Unanswered(str(failed) or "it took too long")
        if failed is not None:
            raise failed


async def _ask(request: bytes, num_requests: int, timeout_s: float, connection: Connection) -> None:
    reader, writer = connection
    for _ in range(num_requests):
        writer.write(request)
        async with asyncio.timeout(timeout_s):
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
        if not head.startswith(b"HTTP/1.1 200") or b'"finish_reason":"length"' not in body:
            raise Unanswered(repr((head + body)[-300:]))


async def main(port: int, num_connections: int) -> int:
    """Carry out the orders of standard input until it ends; return the exit code."""
    connections = [
        await asyncio.open_connection("127.0.0.1", port, limit=LARGEST_ANSWER) for _ in range(num_connections)
    ]
    for line in sys.stdin:  # nothing else goes on meanwhile
        try:
            fields, num_requests = json.loads(line)
            await carry_out(fields, num_requests, connections)
        except Unanswered as error:
            print(error, flush=True)
            return 1
        print(DONE, flush=True)
    for _, writer in connections:
        writer.close()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends this process
    sys.exit(asyncio.run(main(*map(int, sys.argv[1:]))))
