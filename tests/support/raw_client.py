"""HTTP over a plain socket, with every freedom to do it wrong; what comes back has to be right, and to come whole."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from support.web_site import CHAT


def request(
    body: bytes | dict[str, Any] | None = None,
    *headers: str,
    path: str = CHAT,
    version: str = "1.1",
    length: int | None = None,
) -> bytes:
    """Return the bytes of a request: a POST of *body*, or a GET without one."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/{version}", "Host: localhost", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(content) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def head(*lines: str) -> bytes:
    """Return the head of a request."""
    return "\r\n".join([*lines, "", ""]).encode()


def chunked(*chunks: bytes) -> bytes:
    """Return the head of a request and its body in *chunks*, which may say wrong things of themselves."""
    return head(f"POST {CHAT} HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked") + b"".join(chunks)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, which came whole."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def error(self) -> dict[str, Any]:
        """The error in a body of the one shape that there is."""
        assert self.headers["content-type"] == "application/json", self
        assert self.headers["x-request-id"]
        body = json.loads(self.body)
        assert list(body) == ["error"]
        error: dict[str, Any] = body["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error

    @property
    def text(self) -> str:
        """What was generated, whether streamed or not."""
        assert self.status == 200, self
        if self.headers["content-type"] == "application/json":
            return str(json.loads(self.body)["choices"][0]["message"]["content"])
        *frames, done, rest = self.body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        chunks = [json.loads(frame.partition(b"data: ")[2]) for frame in frames]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@dataclass
class Client:
    """One connection, on which any bytes can be sent, and answers are read."""

    connection: socket.socket
    file: Any = field(init=False)

    def __post_init__(self) -> None:
        self.connection.settimeout(30)
        self.file = self.connection.makefile("rb")

    def send(self, data: bytes | memoryview) -> None:
        self.connection.sendall(data)

    def leave(self, how: str) -> None:
        """Close, reset, or close the half that is sent on: `closes`, `resets`, `half-closes`."""
        if how == "half-closes":
            self.connection.shutdown(socket.SHUT_WR)
            return
        if how == "resets":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.file.close()
        self.connection.close()

    def head(self) -> Answer:
        """Return the beginning of the next answer."""
        line = self.file.readline()
        assert line.startswith(b"HTTP/1.1 ") and line.endswith(b"\r\n"), line
        headers: dict[str, str] = {}
        while (header := self.file.readline()) != b"\r\n":
            assert header.endswith(b"\r\n"), f"cut off after {headers}"
            name, _, value = header.decode().partition(":")
            assert name.lower() not in headers
            headers[name.lower()] = value.strip()
        return Answer(int(line.split()[1]), headers)

    def chunks(self) -> Iterator[bytes]:
        """Yield the chunks of an answer, to the one that ends it."""
        while True:
            line = self.file.readline()
            assert line.endswith(b"\r\n"), "the stream was cut off"
            data = self.file.read(int(line, 16) + 2)
            assert data.endswith(b"\r\n")
            if data == b"\r\n":
                return
            yield data[:-2]

    def answer(self, *, has_body: bool = True) -> Answer:
        """Return the next answer, which must come whole."""
        answer = self.head()
        if not has_body or answer.status < 200:
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            body = b"".join(self.chunks())
        elif "content-length" in answer.headers:
            body = self.file.read(int(answer.headers["content-length"]))
            assert len(body) == int(answer.headers["content-length"])
        else:
            assert answer.headers["connection"] == "close"
            body = self.file.read()
        return Answer(answer.status, answer.headers, body)

    def refusal(self, status: int) -> dict[str, Any]:
        """Return the error of the next answer, the last one."""
        answer = self.answer()
        assert answer.status == status, answer
        assert answer.headers["connection"] == "close"
        self.sees_the_end()
        return answer.error

    def sees_the_end(self) -> None:
        """Wait until the server has closed, and fail when it says something before."""
        assert self.file.read() == b""


def connect(port: int, *, receive_bytes: int | None = None, address: str = "") -> Client:
    """Connect to a server of this machine; with *receive_bytes*, as one that takes little before it reads.

    *address*: from this one of 127.0.0.0/8.
    """
    connection = socket.socket()
    if address:
        connection.bind((address, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", port))
    return Client(connection)
