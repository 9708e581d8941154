"""What clients do to a socket that no library would: whatever it is, nothing of it is left, and others are served.

All tests but the one of the shutdown share one server, beside a stream that is open the whole time.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.raw_client import Answer, Client, chunk, chunked, connect, head, request
from support.redis_servers import Servers, command, running_server, until
from support.selection import by_night
from support.stand_in_stages import StandIn
from support.web_process import Server, serving
from support.web_site import CHAT, chat

from pipeline.names import SEAL, Names

pytestmark = pytest.mark.slow

BODY_TIMEOUT_S = 3.0
USER_TIMEOUT_S = 2.0
LONG_S = by_night(5.0, 62.0)
"""Quart cuts an answer at 60 s unless it is told otherwise."""
MEGABYTE = 1 << 20
MAX_BODY_BYTES = 32 * MEGABYTE
ALARMS = ("Traceback", "ASGI Framework", "loop_error", "request_broke", "handler_failed", "socket.send() raised")
"""What the server prints when something is wrong with it, not with a client."""


def large(megabytes: int) -> dict[str, Any]:
    """Return a good request of so many megabytes."""
    system = {"role": "system", "content": "x" * (megabytes * MEGABYTE)}
    return chat() | {"messages": [system, *chat()["messages"]]}


@dataclass
class Scene:
    """The server of these tests, and what it had when the test began."""

    server: Server
    stand_in: StandIn
    redis_url: str
    printed: Path
    long_stream: Client
    began_s: float
    num_open: int = 1
    """Streams that are to be open: the long one, until its test."""
    num_before: int = 0

    @contextmanager
    def client(self, **options: Any) -> Iterator[Client]:
        with closing(connect(self.server.port, **options)) as client:
            yield client

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Have the server see all that happens in the block at once."""
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)

    def uids(self) -> list[str]:
        """Return the requests that came to the stages in this test."""
        return [uid for uid, _ in self.stand_in.requests()[self.num_before :]]

    def uid(self) -> str:
        """Wait for the first of them."""
        until(self.uids)
        return self.uids()[0]

    def end_of(self, uid: str) -> dict[str, str]:
        """Return the fields that seal the history of a request, if it has ended."""
        found = command(self.redis_url, "XRANGE", Names().request(uid), SEAL, SEAL)
        fields = [word.decode() for word in found[0][1]] if found else []
        return dict(zip(fields[::2], fields[1::2], strict=True))

    def is_cancelled(self, uid: str) -> bool:
        end = self.end_of(uid)
        return (end.get("kind"), end.get("by")) == ("cancelled", "client")

    @contextmanager
    def endless(self, behind: bytes = b"") -> Iterator[tuple[Client, Iterator[bytes]]]:
        """Give a client whose endless stream is open, with another request behind it, and the chunks of that."""
        with self.client() as client:
            client.send(request(chat("endless", stream=True)) + behind)
            assert client.head().status == 200
            yield client, client.chunks()

    def get(self, path: str) -> Answer:
        with self.client() as client:
            client.send(request(path=path))
            return client.answer()

    def cancel(self, uid: str) -> None:
        with self.client() as client:
            client.send(head(f"DELETE /v1/requests/{uid} HTTP/1.1", "Host: localhost"))
            assert json.loads(client.answer().body)["cancelled"]

    def holds_nothing(self) -> bool:
        """Return whether the server has no socket, no connection and no listener but those of the long stream."""
        left = json.loads(self.get("/left").body)
        process = psutil.Process(self.server.process.pid)
        sockets = sum(one.laddr.port == self.server.port and bool(one.raddr) for one in process.net_connections("tcp"))
        own = 1  # the connection that asks, which is at its end
        return (sockets, left["connections"] - own, len(left["listeners"])) == 3 * (self.num_open,)


@pytest.fixture(scope="module")
def running(redis_servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("sockets")
    printed = folder / "printed.log"
    with ExitStack() as stack:
        redis_url = stack.enter_context(running_server(redis_servers.binary("embedded"), folder)).url
        stand_in = stack.enter_context(closing(StandIn(redis_url, renews=True)))
        patience: dict[str, Any] = {"body_timeout_s": BODY_TIMEOUT_S, "user_timeout_s": USER_TIMEOUT_S}
        server = stack.enter_context(
            serving(redis_url, "--max-body-bytes", str(MAX_BODY_BYTES), output=printed, **patience)
        )
        long_stream = stack.enter_context(closing(connect(server.port)))
        long_stream.send(request(chat("held", stream=True)))
        assert long_stream.head().status == 200
        yield Scene(server, stand_in, redis_url, printed, long_stream, time.monotonic())


@pytest.fixture
def scene(running: Scene) -> Iterator[Scene]:
    """The server; after the test it holds nothing but the long stream, and answers the next request as before."""
    running.num_before = len(running.stand_in.requests())
    yield running
    until(running.holds_nothing)
    until(lambda: all(running.end_of(uid) for uid in running.uids()))
    with running.client() as client:
        client.send(request(chat()))
        assert client.answer().text == "Hello\u2028!"
    assert running.server.process.poll() is None
    printed = running.printed.read_text(errors="replace")
    assert not [line for line in printed.splitlines() if any(alarm in line for alarm in ALARMS)], printed[-5000:]


@pytest.mark.parametrize("how", ["closes", "resets", "half-closes"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("words", ["silent", "endless"])
@pytest.mark.parametrize("behind", [0, 2], ids=["alone", "before others"])
def test_a_client_that_leaves_while_it_waits_cancels_its_request_and_those_behind_it_never_begin(
    scene: Scene, behind: int, words: str, stream: bool, how: str
) -> None:
    """Who half-closes has left: its FIN is all that a client sends that was killed, or whose user went away. It gets
    nothing more, though the other half is open: `nc -N` and the like have to wait for the answer before they close."""
    with scene.client() as client:
        client.send(request(chat(words, stream=stream)) + behind * request(chat()))
        uid = scene.uid()
        if words == "endless" and stream and not behind:
            assert client.head().status == 200
            assert b"assistant" in next(client.chunks())
        client.leave(how)
        until(lambda: scene.is_cancelled(uid))
        if how == "half-closes":
            assert b"[DONE]" not in client.file.read()
    until(scene.holds_nothing)
    assert scene.uids() == [uid]


@pytest.mark.parametrize("how", ["closes", "resets", "half-closes"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("words", ["silent", "endless"])
def test_a_client_that_has_left_before_it_is_heard_leaves_nothing_running(
    scene: Scene, words: str, stream: bool, how: str
) -> None:
    with scene.client() as client:
        with scene.suspended():
            client.send(request(chat(words, stream=stream)))
            client.leave(how)
        if how == "half-closes":
            client.sees_the_end()
    until(scene.holds_nothing)
    until(lambda: all(scene.is_cancelled(uid) for uid in scene.uids()))


@pytest.mark.parametrize("how", ["closes", "half-closes"])
def test_of_a_client_that_left_nothing_begins_though_the_answer_to_it_cannot_be_cancelled(
    scene: Scene, how: str
) -> None:
    with scene.client() as client:
        client.send(request(path="/deaf") + request(chat("silent")))
        until(lambda: json.loads(scene.get("/left").body)["deaf"] == 1)
        client.leave(how)
        until(scene.holds_nothing)
    assert not scene.uids()


@pytest.mark.parametrize("idle", [False, True], ids=["before a request", "after a request"])
def test_a_closed_connection_takes_no_socket(scene: Scene, idle: bool) -> None:
    with ExitStack() as stack:
        for client in [stack.enter_context(scene.client()) for _ in range(9)]:
            if idle:
                client.send(request(path="/health"))
                assert client.answer().status == 200
        assert not scene.holds_nothing()


def test_a_client_that_never_reads_is_cut_off_and_its_request_cancelled(scene: Scene) -> None:
    with scene.client(receive_bytes=1024) as client:
        client.send(request(chat("flood", stream=True)))
        uid = scene.uid()
        until(lambda: scene.is_cancelled(uid), timeout_s=10 * USER_TIMEOUT_S)


GARBAGE = {
    "no line of HTTP": (head("NONSENSE"), 400, "invalid_http"),
    "zeros": (b"\0" * 100 + b"\r\n\r\n", 400, "invalid_http"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 500, 400, "invalid_http"),
    "no host": (head("GET /health HTTP/1.1"), 400, "invalid_http"),
    "two hosts": (head("GET /health HTTP/1.1", "Host: x", "Host: y"), 400, "invalid_http"),
    "a header without a colon": (head("GET /health HTTP/1.1", "Host: x", "nothing"), 400, "invalid_http"),
    "a space in a header's name": (head("GET /health HTTP/1.1", "Host: x", "a b: c"), 400, "invalid_http"),
    "a path that is none": (head("GET ?x HTTP/1.1", "Host: x"), 400, "invalid_http"),
    "a path without a slash": (head("GET health HTTP/1.1", "Host: x"), 400, "invalid_http"),
    "a tunnel": (head("CONNECT a:80 HTTP/1.1", "Host: x"), 400, "invalid_http"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", 505, "http_version_not_supported"),
    "HTTP/9.9": (head("GET /health HTTP/9.9", "Host: x"), 505, "http_version_not_supported"),
    "an endless header": (head("GET /health HTTP/1.1", "Host: x")[:-2] + b"X: " + b"x" * (3 * MEGABYTE), 431, None),
    "endless headers": (head("GET / HTTP/1.1", "Host: x")[:-2] + b"X: y\r\n" * MEGABYTE, 431, None),
    "a chunk of ZZ bytes": (chunked(chunk(b"{"), b"ZZ\r\nabc"), 400, "invalid_http"),
    "a chunk of -1 bytes": (chunked(chunk(b"{"), b"-1\r\nabc"), 400, "invalid_http"),
    "a chunk that is longer than it says": (chunked(b"2\r\nhello\r\n0\r\n\r\n"), 400, "invalid_http"),
    "another coding": (head(f"POST {CHAT} HTTP/1.1", "Host: x", "Transfer-Encoding: gzip"), 501, "not_implemented"),
    "a negative length": (request(b"{}", length=-1), 400, "invalid_http"),
    "no number": (head(f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Length: two") + b"{}", 400, "invalid_http"),
    "a length of 24 digits": (request(b"{}", length=10**24), 400, "invalid_http"),
    "two lengths": (request(b"{} ", "Content-Length: 2"), 400, "invalid_http"),
    "two ways to end": (request(b"0\r\n\r\n", "Transfer-Encoding: chunked"), 400, "invalid_http"),
}


@pytest.mark.parametrize(("garbage", "status", "code"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_gets_an_error_of_the_one_shape(scene: Scene, garbage: bytes, status: int, code: str | None) -> None:
    with scene.client() as client:
        client.send(garbage)
        error = client.refusal(status)
        assert error["code"] == (code or "headers_too_large")
        assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
        assert "bytearray" not in error["message"]
    assert not scene.uids()


def test_whatever_is_sent_each_error_has_the_one_shape(scene: Scene) -> None:
    websocket = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    begun_well = (
        request(b'{"messages": 1}', "X-Request-Id: mine", "Expect: 100-continue"),
        request(b"{") + request(path="http://y/a%ff?b", version="1.0"),
        chunked(chunk(b'{"mess'), chunk(b'ages": 1}'), b"0\r\n\r\n"),
        request(None, *websocket, path="/%2e%2e//x;a=b?c"),
    )
    splinters = (b"\r\n", b" ", b":", b"[", b"%", b"?", b"\0", b"/", b"HTTP/1.1", b"")
    drawn = random.Random(7)
    for _ in range(300):
        said = bytearray(drawn.choice(begun_well))
        for _ in range(drawn.choice((1, 1, 2, 5, 50))):
            place = drawn.randrange(len(said))
            said[place : place + drawn.choice((0, 1, 3))] = drawn.choice((drawn.randbytes(1), *splinters))
        with scene.client() as client:
            client.send(bytes(said))
            client.leave("half-closes")
            while client.file.peek(1):
                answer = client.answer()
                assert answer.status in (100, 200) or answer.error, bytes(said)


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_who_asks_for_another_protocol_is_answered_in_this_one(scene: Scene, upgrade: str) -> None:
    asked = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
    with scene.client() as client:
        for _ in range(2):
            client.send(request(None, *asked, path="/v1/models"))
            assert client.answer().status == 200


def test_a_url_in_place_of_the_path_is_that_path(scene: Scene) -> None:
    with scene.client() as client:
        for url in ("http://[/health", "HTTP://y:1/health?x=1", "https://y"):
            client.send(request(path=url))
            answer = client.answer()
            assert answer.status == 200
            assert (b"<html" in answer.body) is (url == "https://y")  # the page at /


def test_several_slashes_in_a_path_are_one(scene: Scene) -> None:
    with scene.client() as client:
        for path in ("/v1//models", "//v1/models?x=//", "http://y///v1/models"):
            client.send(request(path=path))
            assert json.loads(client.answer().body)["object"] == "list"


def test_http_1_0_gets_its_answer_and_then_the_end(scene: Scene) -> None:
    for stream in (False, True):
        with scene.client() as client:
            client.send(request(chat(stream=stream), version="1.0"))
            answer = client.answer()
            assert "transfer-encoding" not in answer.headers and answer.headers["connection"] == "close"
            assert answer.text == "Hello\u2028!"
            client.sees_the_end()


PROBE = head("GET /health HTTP/1.1", "Host: localhost", "Connection: close")
PLAIN_PATHS = {"a thread": PROBE, "the application": PROBE.replace(b"Host", b"X-Other: 1\r\nHost")}
"""Who answers a probe -> one that it answers."""


def test_a_probe_gets_the_same_answer_from_the_thread_and_the_application(scene: Scene) -> None:
    answers = []
    for probe in PLAIN_PATHS.values():
        with scene.client() as client:
            client.send(probe)
            answer = client.answer()
            client.sees_the_end()
        assert answer.headers.pop("x-request-id") and answer.headers.pop("date")
        answers.append((answer.status, sorted(answer.headers.items()), answer.body))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("who", PLAIN_PATHS)
def test_each_probe_is_counted(scene: Scene, who: str) -> None:
    def counts() -> list[float]:
        lines = [line for line in scene.get("/metrics").body.decode().splitlines() if 'endpoint="/health"' in line]
        return [sum(float(line.split()[-1]) for line in lines if name in line) for name in ("_requests", "_responses")]

    before = counts()
    for _ in range(3):
        with scene.client() as client:
            client.send(PLAIN_PATHS[who])
            assert client.answer().status == 200
    until(lambda: [after - first for after, first in zip(counts(), before, strict=True)] == [3, 3])


def test_head_gets_the_headers_alone(scene: Scene) -> None:
    with scene.client() as client:
        for path, status in (("/health", 200), ("/nothing", 404), ("/health", 200)):
            client.send(head(f"HEAD {path} HTTP/1.1", "Host: localhost"))
            assert client.answer(has_body=False).status == status
        client.send(head("HEAD ?x HTTP/1.1", "Host: localhost"))
        assert client.answer(has_body=False).status == 400
        client.sees_the_end()


def test_a_request_may_come_byte_by_byte(scene: Scene) -> None:
    with scene.client() as client:
        for byte in request(chat()):
            client.send(bytes([byte]))
        assert client.answer().text == "Hello\u2028!"


def test_a_body_longer_than_its_length_is_no_second_request(scene: Scene) -> None:
    with scene.client() as client:
        client.send(request(json.dumps(chat()).encode() + b"\r\n\r\n", length=5))
        cut = client.answer()
        assert (cut.status, cut.error["code"]) == (400, "invalid_json")
        assert client.refusal(400)["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (request(b"{", length=50), 408, "request_timeout"),
        (request(b"", "Expect: 100-continue", length=MAX_BODY_BYTES + 1), 413, "request_too_large"),
    ],
    ids=["it does not come", "it is not sent before the server agrees"],
)
def test_a_body_that_is_not_taken_gets_its_refusal_whole(scene: Scene, sent: bytes, status: int, code: str) -> None:
    with scene.client() as client:
        client.send(sent)
        assert client.refusal(status)["code"] == code


def test_a_body_that_ends_too_early_gets_400(scene: Scene) -> None:
    for said in (request(b"{", length=50), chunked(chunk(b"{")), b"POST / HT"):
        with scene.client() as client:
            client.send(said)
            client.leave("half-closes")
            assert client.refusal(400)["code"] == "invalid_http"


@pytest.mark.parametrize("way", ["all at once", "in chunks", "and never sent whole"])
def test_a_body_over_the_limit_gets_its_413_whole(scene: Scene, way: str) -> None:
    too_large = 8 * MEGABYTE + MAX_BODY_BYTES
    with scene.client() as client:
        if way == "in chunks":
            client.send(chunked(chunk(b" " * too_large), b"0\r\n\r\n"))
        elif way == "all at once":
            client.send(request(b" " * too_large))  # it reads nothing before it has sent everything
        else:
            client.send(request(b" " * MEGABYTE, length=too_large))
        error = client.refusal(413)
        assert error["code"] == "request_too_large" and str(MAX_BODY_BYTES) in error["message"]


@pytest.mark.parametrize("way", ["all at once", "in chunks"])
def test_a_body_of_20_megabytes_is_answered_whole(scene: Scene, way: str) -> None:
    content = json.dumps(large(20)).encode()
    with scene.client() as client:
        if way == "in chunks":
            pieces = (content[begin : begin + 100_000] for begin in range(0, len(content), 100_000))
            client.send(chunked(*map(chunk, pieces), b"0\r\n\r\n"))
        else:
            client.send(request(content))
        assert client.answer().text == "Hello\u2028!"


def test_an_early_refusal_of_20_megabytes_arrives_whole(scene: Scene) -> None:
    with scene.client() as client:
        client.send(request(large(20), path="/nothing"))
        assert client.refusal(404)["code"] == "not_found"


def test_a_client_that_does_not_close_after_its_refusal_is_let_go_at_last(scene: Scene) -> None:
    with scene.client() as client:
        client.send(head("NONSENSE"))
        assert client.refusal(400)
        assert not scene.holds_nothing()
        until(scene.holds_nothing, timeout_s=10 * BODY_TIMEOUT_S)


def test_a_client_that_asks_first_is_told_to_go_on(scene: Scene) -> None:
    content = json.dumps(large(2)).encode()
    with scene.client() as client:
        for _ in range(2):
            client.send(request(b"", "Expect: 100-continue", length=len(content)))
            assert client.answer().status == 100
            client.send(content)
            assert client.answer().text == "Hello\u2028!"


def test_curl_has_20_megabytes_answered_and_40_refused(scene: Scene, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    for megabytes, status in ((20, "200"), (40, "413")):
        body.write_text(json.dumps(large(megabytes)))
        url = f"http://127.0.0.1:{scene.server.port}{CHAT}"
        flags = ["--silent", "--show-error", "--max-time", "60", "--write-out", "%{http_code}"]
        asked = ["--header", "Expect: 100-continue", "--data-binary", f"@{body}", url]
        done = subprocess.run(["curl", *flags, *asked], capture_output=True, text=True, check=True)
        assert done.stdout.endswith("}" + status) and json.loads(done.stdout.removesuffix(status))


@pytest.mark.parametrize("num", [2, 3])
def test_pipelined_requests_are_answered_in_their_order(scene: Scene, num: int) -> None:
    models = ["demo", "org/demo", "demo"][:num]
    with scene.client() as client:
        client.send(b"".join(request(chat(model=model, stream=model == "demo")) for model in models))
        for model in models:
            answer = client.answer()
            assert answer.text == "Hello\u2028!" and f'"model":"{model}"'.encode() in answer.body


def test_an_error_among_pipelined_requests_is_the_answer_of_its_own(scene: Scene) -> None:
    with scene.client() as client:
        client.send(request(b"{") + request(chat()) + request(path="/nothing") + request(chat()) + head("NONSENSE"))
        assert [client.answer().status for _ in range(4)] == [400, 200, 404, 200]
        assert client.refusal(400)["code"] == "invalid_http"


def test_a_request_behind_an_open_stream_waits_for_its_end(scene: Scene) -> None:
    with scene.endless(request(chat())) as (client, chunks):
        next(chunks)
        scene.cancel(scene.uid())
        *_, last = chunks
        assert b'"code":"cancelled"' in last and last.endswith(b"data: [DONE]\n\n")
        assert client.answer().text == "Hello\u2028!"


def what_is_not_taken(client: Client, data: bytes, chunks: Iterator[bytes]) -> memoryview:
    """Send *data* while a stream comes, until nothing more is taken; return the rest."""
    rest, num_in_vain = memoryview(data), 0
    while num_in_vain < 100:
        client.connection.setblocking(False)
        try:
            rest = rest[client.connection.send(rest) :]
            num_in_vain = 0
        except BlockingIOError:
            num_in_vain += 1
        client.connection.settimeout(30)
        next(chunks)
    return rest


def test_of_a_large_request_behind_an_open_stream_little_is_taken_before_its_end(scene: Scene) -> None:
    with scene.endless() as (client, chunks):
        rest = what_is_not_taken(client, request(large(30)), chunks)
        assert len(rest) > 10 * MEGABYTE  # the others are on their way, in the buffers of the two sockets
        scene.cancel(scene.uid())
        assert b'"code":"cancelled"' in list(chunks)[-1]
        client.send(rest)
        assert client.answer().text == "Hello\u2028!"


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_client_that_leaves_a_stream_with_a_large_request_behind_it_leaves_nothing(scene: Scene, how: str) -> None:
    with scene.endless() as (client, chunks):
        what_is_not_taken(client, request(large(30)), chunks)
        client.leave(how)
    until(lambda: scene.is_cancelled(scene.uid()))


def test_a_connection_goes_on_after_an_error(scene: Scene) -> None:
    with scene.client() as client:
        for said, status in (
            (request(b"{"), 400),
            (request(chat("refuse")), 400),
            (request(chat("break")), 500),
            (request(path="/v1/embeddings"), 404),
            (request(path="/nothing"), 404),
            (request(path="/v1/completions"), 405),
            (request(chat()), 200),
        ):
            client.send(said)
            answer = client.answer()
            assert answer.status == status and "connection" not in answer.headers
            assert status == 200 or answer.error


def test_line_separators_in_the_text_survive_iter_lines(scene: Scene) -> None:
    url = f"http://127.0.0.1:{scene.server.port}{CHAT}"
    with httpx.stream("POST", url, json=chat(stream=True), timeout=30) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in data]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello\u2028!"


def test_a_signal_ends_short_endless_and_unread_streams_in_time(redis_url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stand_in = stack.enter_context(closing(StandIn(redis_url)))
        server = stack.enter_context(serving(redis_url, patience_s=1.0, output=tmp_path / "printed.log"))
        idle, half, short, endless = (stack.enter_context(closing(connect(server.port))) for _ in range(4))
        unread = stack.enter_context(closing(connect(server.port, receive_bytes=1024)))
        idle.send(request(path="/health"))
        assert idle.answer().status == 200
        half.send(request(b"{", length=50))
        unread.send(request(chat("flood", stream=True)))
        until(stand_in.requests)
        ((flooded, _),) = stand_in.requests()
        until(lambda: command(redis_url, "XLEN", Names().request(flooded)) > 100)  # more than all buffers hold
        for client, words in ((short, "held"), (endless, "endless")):
            client.send(request(chat(words, stream=True)))
            assert client.head().status == 200
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.status("/ready") == 503)
        stand_in.released.set()
        *_, last = short.chunks()
        assert b'"finish_reason":"stop"' in last and last.endswith(b"data: [DONE]\n\n")
        *_, last = endless.chunks()
        assert b'"code":"shutting_down"' in last and last.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(10) == 0  # it did not wait for the one that never reads
        codes = sorted(ends_of(redis_url, [uid for uid, _ in stand_in.requests()]))
        assert codes == ["finished", "shutting_down", "shutting_down"]


def ends_of(redis_url: str, uids: Sequence[str]) -> list[str]:
    """Return how requests ended: the code of a failure, or the kind of the end."""
    found = []
    for uid in uids:
        ((_, words),) = command(redis_url, "XRANGE", Names().request(uid), SEAL, SEAL)
        fields = dict(zip(words[::2], words[1::2], strict=True))
        found.append((fields.get(b"code") or fields[b"kind"]).decode())
    return found


def test_a_stream_as_long_as_nobody_ends_it_survives(scene: Scene) -> None:
    said = scene.long_stream.chunks()
    assert b'"content":"Hel"' in next(said)
    while time.monotonic() - scene.began_s < LONG_S:
        assert next(said) == b"\n"
    scene.stand_in.released.set()
    rest = b"".join(said)
    assert b'"content":"lo!"' in rest and rest.endswith(b"data: [DONE]\n\n")
    scene.long_stream.close()
    scene.num_open = 0
