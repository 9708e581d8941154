"""How a connection ends, within the process of the test: nothing of it is left, and not all end together."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.http_server import serving
from support.raw_client import chunked, request
from support.web_site import until

from web.http.asgi import OUTLET
from web.http.connections import HEAD_TIMEOUT_S, IDLE_TIMEOUT_S

NUM = 50


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ends", ["by the client", "by the server"])
async def test_a_connection_that_has_ended_is_freed_without_a_collection(without_collections: None, ends: str) -> None:
    async with asyncio.timeout(10), serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(None, *(["Connection: close"] if ends == "by the server" else []), path="/"))
        await reader.readuntil(b"hello")
        writer.close()
        await until(lambda: server.connections[0]() is None)


async def test_connections_that_opened_together_do_not_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, patience_s = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def noting(when_s: float, *more: Any, **options: Any) -> asyncio.TimerHandle:
        patience_s.append(when_s - loop.time())
        return call_at(when_s, *more, **options)

    def about(timeout_s: float) -> list[float]:
        return [each for each in patience_s if timeout_s / 2 < each <= 1.25 * timeout_s]

    monkeypatch.setattr(loop, "call_at", noting)
    async with asyncio.timeout(10), serving() as server:
        with ExitStack() as stack:
            for _ in range(NUM):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            await until(lambda: len(about(HEAD_TIMEOUT_S)) == len(about(IDLE_TIMEOUT_S)) == NUM)
    for timeout_s in (HEAD_TIMEOUT_S, IDLE_TIMEOUT_S):
        ends_s = about(timeout_s)
        assert min(ends_s) > 0.99 * timeout_s  # the clock went on a little
        assert max(ends_s) - min(ends_s) > 0.1 * timeout_s


async def test_a_piece_of_a_stream_goes_nowhere_once_its_request_turned_out_malformed() -> None:
    pieces: list[bool] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        pieces.append(await scope["state"][OUTLET].send_piece(b"late"))

    async with asyncio.timeout(10), serving(stream) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(chunked())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"no length of a chunk\r\n")
        assert await reader.read() == b""
        await until(lambda: len(pieces) == 1)
        writer.close()


async def test_a_piece_of_a_stream_is_not_taken_before_the_head_nor_after_the_end() -> None:
    pieces: list[bool] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        async def piece(data: bytes) -> None:
            pieces.append(await scope["state"][OUTLET].send_piece(data))

        await piece(b"early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await piece(b"hello")
        await send({"type": "http.response.body", "body": b""})
        await piece(b"late")

    async with asyncio.timeout(10), serving(stream) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(None, path="/"))
        answer = await reader.readuntil(b"0\r\n\r\n")
        await until(lambda: len(pieces) == 3)
        writer.close()
    assert pieces == [False, True, False]
    assert answer.partition(b"\r\n\r\n")[2] == b"5\r\nhello\r\n0\r\n\r\n"


async def test_a_piece_is_written_at_once_between_the_head_and_the_end_and_only_while_the_client_reads() -> None:
    pieces: list[bool] = []
    reads, large = asyncio.Event(), b"x" * (16 << 20)

    def is_sent() -> bool:
        connection = server.connections[0]()
        return connection is not None and not connection.writer.transport.get_write_buffer_size()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        def write(data: bytes) -> None:
            pieces.append(scope["state"][OUTLET].takes_piece())
            if pieces[-1]:
                scope["state"][OUTLET].write_piece(data)

        write(b"early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        write(b"hello")
        write(large)
        write(b"while the client does not read")
        reads.set()
        assert await scope["state"][OUTLET].send_piece(b"waits")
        await until(is_sent)  # the one before goes on while a little is left
        write(b"again")
        await send({"type": "http.response.body", "body": b""})
        write(b"late")

    async with asyncio.timeout(10), serving(stream) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(None, path="/"))
        await reads.wait()
        answer = bytearray()
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += await reader.read(1 << 20)
        await until(lambda: len(pieces) == 6)
        writer.close()
    assert pieces == [False, True, True, False, True, False]
    body = bytes(answer).partition(b"\r\n\r\n")[2]
    assert body == b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (b"hello", large, b"waits", b"again", b""))
