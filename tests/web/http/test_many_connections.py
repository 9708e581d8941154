"""Many clients at once, most of which ask for nothing: the others are served, and the log stays short."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.raw_client import Client, connect, head, request
from support.redis_servers import Servers, running_server, until
from support.selection import rest_at_night
from support.stand_in_stages import StandIn
from support.web_process import Server, serving
from support.web_site import CHAT, chat

from web.http.files import MOST_CONNECTIONS, MOST_FILES, OTHER_FILES, most_connections, raise_file_limit
from web.http.log_limiter import EVERY_S, MOST_KINDS, LogLimiter

slow = pytest.mark.slow

FILES = 256
HEAD_TIMEOUT_S = 1.0
NUM_IDLE = 200


@dataclass
class Scene:
    server: Server
    stand_in: StandIn
    printed: Path

    @contextmanager
    def clients(self, num: int) -> Iterator[list[Client]]:
        with ExitStack() as stack:
            yield [stack.enter_context(closing(connect(self.server.port))) for _ in range(num)]

    def num_connections(self) -> int:
        connections = psutil.Process(self.server.process.pid).net_connections("tcp")
        return sum(bool(one.raddr) and one.laddr.port == self.server.port for one in connections)

    def lines(self, event: str) -> list[str]:
        return [line for line in self.printed.read_text().splitlines() if f" {event} " in line]


@pytest.fixture(scope="module", params=[20.0])
def running(
    redis_servers: Servers, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    """A server that may open few files. The parameter is how long a head may take."""
    folder = tmp_path_factory.mktemp("scene")
    printed = folder / "printed.log"
    with ExitStack() as stack:
        redis_url = stack.enter_context(running_server(redis_servers.binary("embedded"), folder)).url
        stand_in = stack.enter_context(closing(StandIn(redis_url, renews=True)))
        server = stack.enter_context(
            serving(redis_url, output=printed, files=(FILES // 2, FILES), head_timeout_s=request.param)
        )
        yield Scene(server, stand_in, printed)


@pytest.fixture
def scene(running: Scene) -> Iterator[Scene]:
    """The server; after the test it has no connection."""
    running.stand_in.released.clear()
    yield running
    until(lambda: running.num_connections() == 0)


def is_closed(client: Client) -> bool:
    """Return whether the server has closed a connection, once what it had sent is read."""
    client.connection.settimeout(0.1)
    try:
        while client.connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@slow
@pytest.mark.parametrize(
    "sent", rest_at_night([b"", b"GET /health HT", request(path="/health")]), ids=["nothing", "half", "one"]
)
def test_idle_connections_lock_nobody_out_and_streams_go_on(scene: Scene, sent: bytes) -> None:
    port, before = scene.server.port, scene.printed.read_text()
    with closing(connect(port)) as stream, ExitStack() as stack:
        stream.send(request(chat("held", stream=True)))
        assert stream.head().status == 200
        chunks = stream.chunks()
        while b"Hel" not in next(chunks):
            pass
        clients = []
        for _ in range(NUM_IDLE):
            clients.append(stack.enter_context(closing(connect(port))))
            clients[-1].send(sent)
        until(lambda: scene.server.status("/v1/models") == 200)  # until each had its turn, they are not idle
        while not is_closed(clients[0]):  # the oldest; some of the others were refused
            clients.append(stack.enter_context(closing(connect(port))))
            clients[-1].send(sent)
            assert len(clients) < 2 * NUM_IDLE
        assert psutil.Process(scene.server.process.pid).num_fds() < FILES
        scene.stand_in.released.set()
        assert b"[DONE]" in b"".join(chunks)
        assert "invalid_http" not in scene.printed.read_text().removeprefix(before)  # the half of a head that was cut
    line, *_ = scene.lines("too_many_connections")
    assert "refused=False" in line and not scene.lines("connection_broke")
    assert scene.printed.stat().st_size < 200_000


@slow
def test_a_client_that_keeps_its_connection_busy_keeps_it(scene: Scene) -> None:
    with closing(connect(scene.server.port)) as busy, ExitStack() as stack:
        for _ in range(NUM_IDLE // 40):
            busy.send(request(path="/health"))
            assert busy.answer().status == 200
            for _ in range(40):
                stack.enter_context(closing(connect(scene.server.port)))
            assert scene.server.status("/v1/models") == 200  # until each had its turn, they are not idle
        busy.send(request(path="/health"))
        assert busy.answer().status == 200


@slow
def test_when_an_address_has_its_share_a_new_connection_is_refused_and_probes_and_others_are_served(
    scene: Scene,
) -> None:
    share, before = most_connections(FILES, 1024) * 3 // 4, len(scene.stand_in.requests())
    with scene.clients(share) as clients:
        for client in clients:
            client.send(request(chat("silent", stream=True)))
        until(lambda: len(scene.stand_in.requests()) == before + share)
        with closing(connect(scene.server.port)) as other:
            other.send(request(path="/v1/models"))
            answer = other.answer()
            assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (429, "1", "close")
            assert answer.error["code"] == "too_many_connections"
        assert scene.server.status("/health") == 200
        with closing(connect(scene.server.port, address="127.0.0.2")) as other:
            other.send(request(path="/v1/models"))
            assert other.answer().status == 200
        clients[0].leave("closes")
        until(lambda: scene.server.status("/v1/models") == 200)


@slow
def test_clients_that_never_end_their_bodies_make_room_for_others(scene: Scene) -> None:
    with scene.clients(NUM_IDLE) as clients:
        for client in clients:
            client.send(head(f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Length: 100"))
        until(lambda: scene.server.status("/health") == 200)


@slow
@pytest.mark.parametrize("running", [HEAD_TIMEOUT_S], indirect=True)
@pytest.mark.parametrize("before", rest_at_night([b"", request(path="/health")]), ids=["the first", "a later one"])
def test_a_head_that_does_not_come_whole_in_time_gets_408(scene: Scene, before: bytes) -> None:
    with closing(connect(scene.server.port)) as client:
        if before:
            client.send(before)
            assert client.answer().status == 200
        began_s = time.monotonic()
        client.send(b"GET /health HTTP/1.1\r\nHost:")
        error = client.refusal(408)
        assert error["code"] == "request_timeout" and "did not arrive" in error["message"]
        assert time.monotonic() - began_s > HEAD_TIMEOUT_S / 2


@slow
@pytest.mark.parametrize("running", [HEAD_TIMEOUT_S], indirect=True)
def test_a_connection_without_a_request_is_closed_and_one_that_had_one_is_kept(scene: Scene) -> None:
    with scene.clients(2) as (silent, kept):
        kept.send(request(path="/health"))
        assert kept.answer().status == 200
        began_s = time.monotonic()
        silent.sees_the_end()
        assert time.monotonic() - began_s > HEAD_TIMEOUT_S / 2
        kept.send(request(path="/health"))
        assert kept.answer().status == 200


@slow
def test_the_soft_limit_on_files_is_raised_to_the_hard_one(scene: Scene) -> None:
    assert psutil.Process(scene.server.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (FILES, FILES)


def test_most_connections_leave_files_for_what_is_no_client() -> None:
    assert most_connections(1024, 1024) == 1024 - OTHER_FILES
    assert most_connections(100, 1024) == 50
    assert most_connections(MOST_FILES, 1024) == MOST_CONNECTIONS
    assert most_connections(MOST_FILES, 10_000) == 20_000


def test_a_limit_that_is_high_enough_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert raise_file_limit() == min(before[1], MOST_FILES) or before[0] > MOST_FILES
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raise_file_limit() == raised[0] and raised[1] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_of_equal_lines_one_is_written_in_ten_seconds_and_says_how_many_there_were() -> None:
    now_s = 0.0
    log_limiter = LogLimiter(lambda: now_s)
    assert [log_limiter.times("a") for _ in range(1000)] == [1, *[0] * 999]
    assert log_limiter.times("b") == 1
    now_s = EVERY_S
    assert log_limiter.times("a") == 1000
    assert log_limiter.times("a") == 0
    for kind in range(2 * MOST_KINDS):
        assert log_limiter.times(str(kind)) == 1
