"""Places, bytes and turns on a real server in the process of the test, which has few of each."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.http_server import Server, say_hello, serving
from support.raw_client import chunk, head, request
from support.stand_in_stages import StandIn
from support.web_site import Site, site, until

from pipeline.errors import RequestError
from web.http.asgi import PLACE
from web.http.connection_limit import KEPT, read_proxies
from web.http.http1 import MOST_AHEAD_BYTES, MOST_HEAD_BYTES, MOST_HEADERS
from web.http.keys import Caller, Keys, hash_of, read_keys

MOST = 16
ANN, BOB, ADMIN = "sk-ann", "sk-bob", "sk-admin"
PICTURES = "/v1/pipeline/events"


class Client:
    """A connection of a test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, data: bytes) -> int:
        """Send *data*; return the status of the answer, whose head is read; 0 if none came."""
        self.writer.write(data)
        return await self.status()

    async def status(self) -> int:
        self.head = b""
        try:
            self.head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, OSError):
            return 0
        return int(self.head.split()[1])

    async def error(self) -> dict[str, Any]:
        """Return the error after a head, which is the last answer."""
        found: dict[str, Any] = json.loads(await self.reader.read())["error"]
        return found

    async def is_closed(self) -> bool:
        try:
            return await self.reader.read() == b""
        except OSError:
            return True


class Clients:
    """Connections of a test, which are closed at its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.all: list[Client] = []

    async def one(self, address: str = "127.0.0.1") -> Client:
        opened = await asyncio.open_connection("127.0.0.1", self._server.port, local_addr=(address, 0))
        self.all.append(Client(*opened))
        return self.all[-1]

    async def several(self, num: int, address: str = "127.0.0.1") -> list[Client]:
        return [await self.one(address) for _ in range(num)]


@asynccontextmanager
async def clients_of(answer: Any, **more: Any) -> AsyncIterator[tuple[Server, Clients]]:
    async with asyncio.timeout(20), serving(answer, **{"most": MOST, **more}) as server:
        clients = Clients(server)
        try:
            yield server, clients
        finally:
            for each in clients.all:
                each.writer.close()


async def serve_paths(scope: Any, receive: Any, send: Any) -> None:
    """As an application: /stream never ends, /view does not either and is a viewer's."""
    path = scope["path"]
    try:
        if path == "/view":
            scope["state"][PLACE].views()
    except RequestError as error:
        text = error.message.encode()
        await send({"type": "http.response.start", "status": error.status, "headers": []})
        await send({"type": "http.response.body", "body": text})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello", "more_body": path in ("/stream", "/view")})
    while path in ("/stream", "/view") and (await receive())["type"] != "http.disconnect":
        pass


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}"


def get(path: str, *headers: str) -> bytes:
    return request(None, *headers, path=path)


STREAM = get("/stream")


async def test_when_an_address_has_its_share_others_are_served_and_it_can_still_ask_for_probes() -> None:
    async with clients_of(serve_paths) as (server, clients):
        for each in await clients.several(12):
            assert await each.ask(STREAM) == 200
        for path in ("/health", "/ready", "/metrics?x=1"):
            probe = await clients.one()
            assert await probe.ask(get(path)) == 200
            assert b"connection: close" in probe.head and b"hello" in await probe.reader.read()
        for asked in (
            STREAM,
            get("/healthy"),
            request(b"{}", path="/health"),
            head("HEAD /health HTTP/1.1", "Host: x"),
        ):
            refused = await clients.one()
            assert await refused.ask(asked) == 429
            if b"HEAD" not in asked:
                error = await refused.error()
                assert error["code"] == "too_many_connections" and "12 of 16" in error["message"]
        other = await clients.one("127.0.0.2")
        assert await other.ask(STREAM) == 200
        clients.all[0].writer.close()
        await until(lambda: server.config.connection_limit.num_open == 12)
        assert await (await clients.one()).ask(STREAM) == 200


async def test_when_every_place_is_taken_probes_are_answered_and_who_waits_there_is_cut_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("web.http.connections.KEPT_S", 60)
    async with clients_of(serve_paths) as (server, clients):
        for each in [*await clients.several(12), *await clients.several(4, "127.0.0.2")]:
            assert await each.ask(STREAM) == 200
        refused = await clients.one("127.0.0.3")
        assert await refused.ask(STREAM) == 503
        assert (await refused.error())["code"] == "overloaded" and b"retry-after: 1" in refused.head
        refused.writer.close()
        await until(lambda: server.connections[-1]() is None)
        silent = await clients.several(KEPT, "127.0.0.3")
        await until(lambda: len(server.connections) == MOST + KEPT + 1)
        at_once = await clients.one("127.0.0.3")
        assert await at_once.status() == 503  # nothing was read
        for each in silent:
            each.writer.close()
        await until(lambda: all(of() is None for of in server.connections[-KEPT - 1 :]))
        monkeypatch.setattr("web.http.connections.KEPT_S", 0.1)
        for each in await clients.several(KEPT, "127.0.0.3"):
            assert await each.is_closed()
        assert await (await clients.one("127.0.0.3")).ask(get("/health")) == 200


async def test_a_key_may_have_more_viewers_or_fewer_than_others() -> None:
    keys = Keys([Caller.of(hash_of(ANN), viewers=6), Caller.of(hash_of(BOB), viewers=1)])
    async with clients_of(serve_paths, keys=keys) as (_, clients):
        for key, most in ((ANN, 6), (BOB, 1)):
            statuses = [await (await clients.one()).ask(get("/view", bearer(key))) for _ in range(most + 1)]
            assert statuses == [200] * most + [429]


async def test_of_several_keys_one_has_half_and_the_rest_of_its_connections_are_refused_and_closed() -> None:
    async with clients_of(serve_paths, keys=read_keys([ANN, BOB], "")) as (server, clients):
        for each in await clients.several(8):
            assert await each.ask(get("/stream", bearer(ANN))) == 200
        more = await clients.one()
        assert await more.ask(get("/stream", bearer(ANN))) == 429
        assert b"connection: close" in more.head and b"8 of 16" in await more.reader.read()
        for each in await clients.several(8):
            assert await each.ask(get("/stream", bearer(BOB))) == 200
        clients.all[0].writer.close()
        await until(lambda: server.config.connection_limit.num_open == MOST - 1)
        assert await (await clients.one()).ask(get("/stream", bearer(ANN))) == 200


async def test_a_quarter_may_view_and_a_viewer_makes_room_for_who_holds_less() -> None:
    async with clients_of(serve_paths) as (_, clients):
        viewers = await clients.several(4)
        for each in viewers:
            assert await each.ask(get("/view")) == 200
        fifth = await clients.one()
        assert await fifth.ask(get("/view")) == 429
        assert b"4 open streams" in await fifth.reader.readuntil(b"\r\n0\r\n\r\n")
        assert await fifth.ask(STREAM) == 200  # the connection went on
        for each in [*await clients.several(7), *await clients.several(4, "127.0.0.2")]:
            assert await each.ask(STREAM) == 200
        assert await (await clients.one("127.0.0.3")).ask(STREAM) == 200
        assert b"hello" in await viewers[0].reader.read()  # and then the end


async def test_behind_a_trusted_proxy_each_client_has_a_share_and_from_others_the_header_counts_for_nothing() -> None:
    async with clients_of(serve_paths, proxies=read_proxies(["127.0.0.9"])) as (server, clients):
        for each in await clients.several(12, "127.0.0.9"):
            assert await each.ask(get("/stream", "X-Forwarded-For: 6.6.6.6, 1.2.3.4")) == 200
        more = await clients.one("127.0.0.9")
        assert await more.ask(get("/stream", "X-Forwarded-For: 7.7.7.7, 1.2.3.4")) == 429
        assert "1.2.3.4 has 12 open connections" in (await more.error())["message"]
        other = await clients.one("127.0.0.9")
        assert await other.ask(get("/x", "X-Forwarded-For: 1.2.3.5")) == 200
        await until(lambda: server.connections[-1]().holder == "address 127.0.0.9")  # type: ignore[union-attr]
        untrusted = await clients.one("127.0.0.2")
        assert await untrusted.ask(get("/stream", "X-Forwarded-For: 1.2.3.4")) == 200


async def test_a_socket_in_the_file_system_is_served_and_has_no_share(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with asyncio.timeout(20), serving(serve_paths, most=4, path=path):
        opened = [Client(*await asyncio.open_unix_connection(str(path))) for _ in range(4)]
        for each in opened:
            assert await each.ask(STREAM) == 200
        for each in opened:
            each.writer.close()


# with keys, on the application itself


async def test_one_key_that_opens_all_the_streams_it_can_locks_nobody_out(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, keys=read_keys([ANN, BOB], "", ADMIN)) as here:
        async with clients_of(here.app, keys=read_keys([ANN, BOB], "", ADMIN)) as (server, clients):
            connection_limit = server.config.connection_limit
            several = await clients.several(3 * MOST)
            statuses = [await each.ask(get(PICTURES, bearer(ANN))) for each in several]
            assert statuses.count(200) == connection_limit.viewers_share == 4 and set(statuses) <= {0, 200, 429}
            for key in (BOB, ADMIN):
                client = await clients.one()
                assert await client.ask(get("/v1/models", bearer(key))) == 200
                assert await (await clients.one()).ask(get(PICTURES, bearer(key))) == 200
            for path in ("/health", "/ready", "/metrics"):
                assert await (await clients.one()).ask(get(path)) == 200
        lines = [line for line in here.said if line]
        assert lines


async def test_many_readers_of_one_request_are_viewers_and_the_first_is_none(here: Site) -> None:
    async with clients_of(here.app) as (_, clients):
        sender = await clients.one()
        said = json.dumps({"messages": [{"role": "user", "content": "endless"}], "stream": True}).encode()
        json_type = "Content-Type: application/json"
        assert await sender.ask(request(said, json_type, "Idempotency-Key: once")) == 200
        uid = next(line.split()[1] for line in sender.head.lower().splitlines() if line.startswith(b"x-minisgl-uid"))
        path = f"/v1/requests/{uid.decode()}/events"
        readers = await clients.several(6)
        statuses = [await each.ask(get(path)) for each in readers]
        assert statuses == [200] * 5 + [429]
        again = await clients.one()
        assert await again.ask(request(said, json_type, "Idempotency-Key: once")) == 429
        assert b"too_many_connections" in await again.reader.readuntil(b"}}")


# bytes


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    """As an application: answer with the length of the body, and hold it until then."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    text = b"%d" % len(body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


UNFINISHED: dict[str, Callable[[int], bytes]] = {
    "a body": lambda num: request(b"x" * num, length=num + 1),
    "a body in chunks": lambda num: (
        head("POST / HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + chunk(b"x" * num)
    ),
    "a head": lambda num: b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * num,
}


@pytest.mark.parametrize("kind", UNFINISHED)
async def test_requests_that_never_end_hold_no_more_than_the_budget_and_small_ones_of_others_stay(kind: str) -> None:
    num_bytes, budget = (60_000, 400_000) if kind == "a head" else (100_000, 1_000_000)
    async with clients_of(read_all, most=100) as (server, clients):
        connection_limit = server.config.connection_limit
        connection_limit.most_bytes = budget
        small = await clients.one("127.0.0.2")
        small.writer.write(request(b"abc", length=6))
        large = await clients.several(15)
        for each in large:
            each.writer.write(UNFINISHED[kind](num_bytes))
        answers = {asyncio.create_task(each.status()): each for each in large}
        await until(lambda: sum(task.done() for task in answers) >= 15 - budget // num_bytes)
        refused = [each for task, each in answers.items() if task.done()]
        assert {task.result() for task in answers if task.done()} == {503} and connection_limit.num_bytes <= budget
        assert await small.ask(b"def") == 200
        for each in refused:
            each.writer.write_eof()
            assert (await each.error())["code"] == "overloaded"
        for each in large:
            each.writer.close()
        await until(lambda: connection_limit.num_bytes == 0)


async def test_a_body_that_the_application_has_not_read_counts_also_once_it_is_whole() -> None:
    read = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await read.wait()
        scope["state"][PLACE].has_read()
        assert server.config.connection_limit.num_bytes == 0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with clients_of(waits) as (server, clients):
        client = await clients.one()
        client.writer.write(request(b"x" * 100_000))
        await until(lambda: server.config.connection_limit.num_bytes == 100_000)
        read.set()
        assert await client.status() == 200


async def test_a_body_behind_an_answer_is_dropped_and_holds_nothing() -> None:
    async with clients_of(serve_paths) as (server, clients):
        client = await clients.one()
        assert await client.ask(request(b"x" * 200_000, path="/stream", length=10**6)) == 200
        assert b"connection: close" in client.head
        client.writer.write(b"x" * 200_000)
        await client.writer.drain()
        await until(lambda: server.config.connection_limit.num_bytes == 0)


async def test_answers_that_nobody_reads_count_and_the_largest_is_cut() -> None:
    large = b"x" * (16 << 20)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": large})

    async with clients_of(answer) as (server, clients):
        connection_limit = server.config.connection_limit
        connection_limit.most_bytes = 20 << 20
        for each in await clients.several(6):
            each.writer.write(get("/"))
        await until(lambda: len(server.connections) == 6 and connection_limit.num_open <= 3)
        assert connection_limit.num_bytes <= connection_limit.most_bytes


async def test_of_a_client_that_nobody_reads_little_is_taken() -> None:
    async with clients_of(serve_paths) as (server, clients):
        client = await clients.one()
        assert await client.ask(STREAM + get("/x")) == 200
        client.writer.write(b"GET /" + b"x" * 10_000_000)
        await until(lambda: server.config.connection_limit.num_bytes >= MOST_AHEAD_BYTES)
        assert server.config.connection_limit.num_bytes == MOST_AHEAD_BYTES


# turns


async def test_of_requests_that_came_ahead_one_begins_in_a_turn_of_the_loop() -> None:
    loop, num_turns, begun = asyncio.get_running_loop(), 0, list[int]()

    def count() -> None:
        nonlocal num_turns
        num_turns += 1
        loop.call_soon(count)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/later":
            begun.append(num_turns)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with clients_of(answer, most=100) as (_, clients):
        count()
        for each in await clients.several(30):
            each.writer.write(get("/") + 20 * get("/later", "X: " + "x" * 400))  # more than is taken at once
        await until(lambda: len(begun) == 600)
    # Those that were not even taken while the one before was answered may begin with the bytes that bring them.
    assert sum(now == before for before, now in itertools.pairwise(begun)) < 60


async def test_a_request_begins_before_hundreds_of_another_client_that_came_first() -> None:
    begun = list[str]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await say_hello(scope, receive, send)

    async with clients_of(answer, most=1000) as (_, clients):
        for _ in range(2):  # new connections, and then such as are there
            begun.clear()
            first = await clients.several(300) if not clients.all else clients.all[:300]
            other = await clients.one("127.0.0.2") if len(clients.all) == 300 else clients.all[300]
            for each in first:
                each.writer.write(get("/much"))
            other.writer.write(get("/little"))
            await until(lambda: len(begun) == 301)
            assert begun.index("/little") < 150
            for each in clients.all:
                assert b"hello" in await each.reader.readuntil(b"hello")


async def test_of_connections_that_are_cut_while_they_wait_for_their_turn_nothing_stays() -> None:
    begun = 0

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        begun += 1
        await say_hello(scope, receive, send)

    async with clients_of(answer, most=100) as (server, clients):
        several = await clients.several(60)
        await until(lambda: server.config.connection_limit.num_open == len(several))
        for client in several:
            client.writer.write(3 * get("/"))
        await until(lambda: begun > 3)
        assert begun < 2 * len(several), "some still wait"
        for each in server.connections:
            if (one := each()) is not None:
                one.cut()
        before = begun
        await until(lambda: not server.config.connection_limit.num_open)
        assert begun <= before + len(server.connections) // 10


# heads

HOST = b"GET / HTTP/1.1\r\nHost: x\r\n"
LONG = {
    "one large header": HOST + b"X: " + b"x" * 70_000 + b"\r\n\r\n",
    "a long target": b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a little more than the limit": HOST + b"X: " + b"x" * (MOST_HEAD_BYTES - len(HOST) - 6) + b"\r\n\r\n",
    "many small headers": HOST + b"".join(b"X%d: y\r\n" % number for number in range(MOST_HEADERS)) + b"\r\n",
    "only newlines": (HOST + b"X: " + b"x" * 70_000 + b"\r\n\r\n").replace(b"\r", b""),
    "trailers": request(None, "Transfer-Encoding: chunked", path="/") + b"0\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    "an extension of a chunk": request(None, "Transfer-Encoding: chunked", path="/") + b"1;" + b"x" * 70_000 + b"\r\na",
}


@pytest.mark.parametrize("piece_bytes", [10**6, 30_000, 1000])
@pytest.mark.parametrize("kind", LONG)
async def test_a_long_head_gets_431_however_it_comes(kind: str, piece_bytes: int) -> None:
    async with clients_of(read_all) as (_, clients):
        client, data = await clients.one(), LONG[kind]
        for begin in range(0, len(data), piece_bytes):
            client.writer.write(data[begin : begin + piece_bytes])
            await asyncio.sleep(0)
        assert await client.status() == 431
        error = await client.error()
        assert error["code"] == "headers_too_large"
        assert str(MOST_HEADERS if "small" in kind else MOST_HEAD_BYTES) in error["message"]


async def test_a_head_of_the_largest_size_with_the_most_headers_is_taken() -> None:
    lines = HOST + b"".join(b"X%d: y\r\n" % number for number in range(MOST_HEADERS - 2)) + b"X: "
    async with clients_of(read_all) as (_, clients):
        client = await clients.one()
        data = lines + b"x" * (MOST_HEAD_BYTES - len(lines) - 4) + b"\r\n\r\n"
        assert len(data) == MOST_HEAD_BYTES
        for _ in range(2):
            assert await client.ask(data) == 200
            assert await client.reader.readexactly(1) == b"0"
