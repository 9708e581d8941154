"""Server-sent events as bytes. Knows the format, not what is in it."""

from __future__ import annotations

from typing import Final

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
WAITING: Final = b": waiting\n\n"
"""A comment: keeps proxies and clients patient, and every client library skips it."""
DONE: Final = b"data: [DONE]\n\n"

_LINE_BREAKS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""JSON leaves these raw, but `iter_lines` of httpx and requests splits on them and so breaks the frame in two. UTF-8
synchronises itself, so the bytes match whole characters only; outside of strings JSON has none of them."""


def frame(data: bytes, event_id: str = "") -> bytes:
    """Return the frame of one JSON document; *event_id* is where a client can go on from."""
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    if event_id:
        return b"id: %s\ndata: %s\n\n" % (event_id.encode(), data)
    return b"data: %s\n\n" % data
