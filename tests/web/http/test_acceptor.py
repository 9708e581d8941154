"""A thread accepts connections: who asks whether the process is alive never waits for the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.http_server import serving

from web.http import acceptor
from web.http.acceptor import MANY_AHEAD, Acceptor, is_probe

PROBE = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
"""As a kubelet or urllib sends it."""


def asked(port: int, data: bytes, timeout_s: float = 10) -> bytes:
    """Return all that is answered to *data*, until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize(
    "head",
    [
        PROBE,
        b"GET /health HTTP/1.1\r\nHOST:a\r\nconnection:Close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a:1\r\nUser-Agent: kube-probe/1.30\r\nAccept: */*\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: a\r\nAuthorization: Bearer wrong\r\n\r\n",
    ],
)
def test_a_plain_probe_is_one(head: bytes) -> None:
    assert is_probe(head)


@pytest.mark.parametrize(
    "head",
    [
        PROBE[:-1],
        PROBE + PROBE,
        PROBE + b"x",
        PROBE.replace(b"GET", b"HEAD"),
        PROBE.replace(b"GET", b"get"),
        PROBE.replace(b"/health", b"/healthy"),
        PROBE.replace(b"/health", b"/ready"),
        PROBE.replace(b"close", b"keep-alive"),
        PROBE.replace(b"close", b"close, upgrade"),
        PROBE.replace(b"Host: a\r\n", b""),
        PROBE.replace(b"Host: a\r\n", b"Host: a\r\nHost: b\r\n"),
        PROBE.replace(b"Host: a", b"Host: a\x00"),
        PROBE.replace(b"Host: a", b"Host: a\r\n b"),
        PROBE.replace(b"Connection", b"X"),
        *(PROBE.replace(b"Host: a", b"Host: a\r\n" + more) for more in (
            b"Origin: http://b", b"Sec-Fetch-Site: cross-site", b"X-Request-Id: 1", b"Content-Length: 1",
            b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Connection: close", b"X-Forwarded-For: b",
        )),
        b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"",
    ],
)  # fmt: skip
def test_what_could_have_another_answer_goes_to_the_application(head: bytes) -> None:
    assert not is_probe(head)


def test_a_probe_is_answered_while_the_loop_is_busy() -> None:
    """The loop does nothing but wait for the answer, in one turn."""
    probed: list[None] = []

    async def scene() -> bytes:
        async with serving(answered_probe=lambda: probed.append(None)) as server:
            await asyncio.sleep(0)
            answers: list[bytes] = []
            asking = threading.Thread(target=lambda: answers.append(asked(server.port, PROBE)))
            asking.start()
            asking.join()  # blocks the loop
            return answers[0]

    assert asyncio.run(scene()).startswith(b"HTTP/1.1 200 ")
    assert len(probed) == 1


@contextmanager
def accepting(taken: list[socket.socket], loop: asyncio.AbstractEventLoop, most_ahead: int = 64) -> Iterator[int]:
    """Run an acceptor in *loop*, which the caller runs; yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    async def made() -> Acceptor:
        return Acceptor(listener, lambda client, _: taken.append(client), lambda: b"alive", most_ahead)

    one = loop.run_until_complete(made())
    one.open()
    try:
        yield listener.getsockname()[1]
    finally:
        one.close()
        listener.close()
        for client in taken:
            client.close()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def until(loop: asyncio.AbstractEventLoop, condition: Any) -> None:
    ends_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends_s
        loop.run_until_complete(asyncio.sleep(0.002))


def test_the_loop_gets_who_says_something_else_and_who_says_nothing(loop: asyncio.AbstractEventLoop) -> None:
    taken: list[socket.socket] = []
    with accepting(taken, loop) as port, socket.create_connection(("127.0.0.1", port)) as silent:
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(b"POST / HTTP/1.1\r\n")
            until(loop, lambda: len(taken) == 1)
            assert taken[0].getpeername() == other.getsockname()
            assert taken[0].recv(100) == b"POST / HTTP/1.1\r\n"  # nothing of it was read
        until(loop, lambda: len(taken) == 2)
        assert taken[1].getpeername() == silent.getsockname()


def test_of_many_silent_connections_the_loop_gets_the_oldest_at_once(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "SILENT_S", 1000.0)
    monkeypatch.setattr(acceptor, "MOST_SILENT", 3)
    taken: list[socket.socket] = []
    with accepting(taken, loop) as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        until(loop, lambda: len(taken) == 2)
        assert [each.getpeername() for each in taken] == [each.getsockname() for each in clients[:2]]
        assert asked(port, PROBE) == b"alive"
    assert len(taken) == 5  # the end handed the others over
    for client in clients:
        client.close()


def test_a_process_that_is_behind_leaves_connections_to_another_one(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "BEHIND_S", 1000.0)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * MANY_AHEAD)
    taken: dict[str, list[socket.socket]] = {"behind": [], "free": []}

    async def made(who: str) -> Acceptor:
        return Acceptor(listener, lambda client, _: taken[who].append(client), lambda: b"alive", 1000)

    behind, free = (loop.run_until_complete(made(who)) for who in taken)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(MANY_AHEAD + 4)]
    for client in clients:
        client.sendall(b"x")
    behind.open()
    while len(behind._ahead) < MANY_AHEAD:  # the loop does not run
        time.sleep(0.002)
    free.open()
    until(loop, lambda: len(taken["free"]) == 4)
    for one in (behind, free):
        one.close()
    assert len(taken["behind"]) == MANY_AHEAD
    for each in (listener, *clients, *taken["behind"], *taken["free"]):
        each.close()


def test_no_more_are_accepted_than_the_loop_takes(loop: asyncio.AbstractEventLoop) -> None:
    taken: list[socket.socket] = []
    with accepting(taken, loop, most_ahead=4) as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
        for client in clients:
            client.sendall(b"x")
        time.sleep(0.05)  # the loop does not run
        assert not taken
        until(loop, lambda: len(taken) == 12)
    for client in clients:
        client.close()
