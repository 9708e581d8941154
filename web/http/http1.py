"""The requests that one client sends, as h11 reads them, without those that this server does not take.

Knows no connection and no application.
"""

from __future__ import annotations

import re
from typing import Final

import h11

from pipeline.errors import RequestError

MOST_HEAD_BYTES: Final = 64 << 10
MOST_HEADERS: Final = 256
"""Most headers of a request. Each lookup of one goes through all of them."""
MOST_CHUNKS: Final = 1024
"""A body in more chunks than this needs chunks of LEAST_CHUNK bytes on average: each takes 30 us."""
LEAST_CHUNK: Final = 64
MOST_AHEAD_BYTES: Final = 4 << 10
"""Most bytes of the next requests that are taken while one is being answered: enough for a few small ones."""
_URL: Final = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
_SLASHES: Final = re.compile(rb"//+")
_VERSIONS: Final = (b"1.0", b"1.1")
_ENDS: Final = (b"\n\r\n", b"\n\n")
"""What ends a head for h11."""


class Requests(h11.Connection):
    """The requests that a client sends. None has a head of more than MOST_HEAD_BYTES, however it comes."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        self.method = b""
        self.fault = ""
        """Why the last bytes are not a request."""
        self.is_broken = False
        self.is_ahead = False
        """Whether bytes of the next request came while this one is being answered."""
        self._max_body_bytes = max_body_bytes
        self._num_chunks = self._num_body_bytes = 0
        self._is_too_large = False

    @property
    def num_waiting(self) -> int:
        """Number of bytes that came and do not make an event yet."""
        return len(self.trailing_data[0])

    @property
    def expects_more(self) -> bool:
        """Return whether the client may be in the middle of a body, or of what is not a request."""
        return self.is_broken or self.their_state in (h11.SEND_BODY, h11.ERROR)

    @property
    def has_begun_head(self) -> bool:
        """Return whether the client is in the middle of the head of a request."""
        return self.their_state is h11.IDLE and self.num_waiting > 0

    @property
    def they_are_waiting_for_100_continue(self) -> bool:
        """As h11's, but also false if the body is too large: then the client waits for the refusal."""
        return super().they_are_waiting_for_100_continue and not self._is_too_large

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's, but returns NEED_DATA and sets `is_ahead` where h11 returns PAUSED."""
        try:
            before = self.trailing_data[0]
            if self.their_state is h11.IDLE:
                _check_head(before)
            event = super().next_event()
            if isinstance(event, h11.Request):
                event = self._taken(event)
            elif isinstance(event, h11.Data | h11.EndOfMessage):
                num_bytes = len(event.data) if isinstance(event, h11.Data) else 0
                if len(before) - self.num_waiting - num_bytes > MOST_HEAD_BYTES:  # trailers, or extensions of a chunk
                    raise _too_large()
                if isinstance(event, h11.Data):
                    self._check_chunk(num_bytes)
        except h11.RemoteProtocolError as error:
            self.is_broken = True
            self.fault = str(error).partition(": b")[0]  # without the bytes
            raise
        self.is_ahead = event is h11.PAUSED
        return h11.NEED_DATA if self.is_ahead else event

    def _taken(self, request: h11.Request) -> h11.Request:
        """Return *request* as the application sees it. Raises RemoteProtocolError."""
        self.method = request.method
        self._num_chunks = self._num_body_bytes = 0
        if request.http_version not in _VERSIONS:
            raise h11.RemoteProtocolError("another version", error_status_hint=505)
        headers = dict(request.headers)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        self._is_too_large = int(headers.get(b"content-length", 0)) > self._max_body_bytes
        path, mark, query = (_URL.sub(b"", request.target, count=1) or b"/").partition(b"?")
        target = _SLASHES.sub(b"/", path) + mark + query  # some clients join a base URL and a path like this
        if not target.startswith(b"/") and target != b"*":
            raise h11.RemoteProtocolError("a path that does not begin with a slash")
        if target == request.target and b"upgrade" not in headers:
            return request
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        return h11.Request(method=request.method, headers=kept, target=target, http_version=request.http_version)

    def _check_chunk(self, num_bytes: int) -> None:
        """Count a piece of a body. Raises RemoteProtocolError."""
        self._num_chunks += 1
        self._num_body_bytes += num_bytes
        if self._num_chunks > MOST_CHUNKS and self._num_body_bytes < LEAST_CHUNK * self._num_chunks:
            raise h11.RemoteProtocolError(f"more than {MOST_CHUNKS} chunks of less than {LEAST_CHUNK} bytes on average")


def refusal(status: int, fault: str) -> RequestError:
    """Return the error for bytes that are no request: h11's *status*, and its reason."""
    message, code = {
        431: (fault, "headers_too_large"),
        501: ("Transfer-Encoding: this server takes `chunked`, or a Content-Length.", "not_implemented"),
        505: ("This server speaks HTTP/1.1; send that.", "http_version_not_supported"),
    }.get(status, (f"Malformed HTTP/1.1: {fault}.", "invalid_http"))
    if status == 431 and not fault.startswith(_FAULT):  # h11's, which waited for the end
        message = _too_large().args[0]
    return RequestError(message, code=code, status=status)


_FAULT: Final = "The request line and headers"


def _check_head(data: bytes) -> None:
    """Raise RemoteProtocolError if *data* begins with a head that is too large, before h11 takes it apart."""
    ends = [place + len(end) for end in _ENDS if (place := data.find(end, 0, MOST_HEAD_BYTES + len(end))) >= 0]
    num_bytes = min(ends, default=len(data))
    if num_bytes > MOST_HEAD_BYTES:
        raise _too_large()
    num_headers = data.count(b"\n", 0, num_bytes) - 2
    if num_headers > MOST_HEADERS:
        message = f"{_FAULT} have more than {MOST_HEADERS} headers; send fewer."
        raise h11.RemoteProtocolError(message, error_status_hint=431)


def _too_large() -> h11.RemoteProtocolError:
    message = f"{_FAULT} are larger than {MOST_HEAD_BYTES} bytes; send shorter ones."
    return h11.RemoteProtocolError(message, error_status_hint=431)
