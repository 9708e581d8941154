"""Server-sent events as bytes. Knows the format, not the content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b"\n"
"""A blank line, which every client skips. Some take any other line for data, comments included."""

_BREAK: Final = re.compile("\r\n|\r|\n")
_LINE_BREAKS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""JSON leaves these characters raw, but `iter_lines` of httpx and requests splits on them and breaks the frame in two.
The bytes match whole characters only, since UTF-8 is self-synchronising; JSON has none of them outside of strings."""


def text_frames(text: str, event_id: str = "") -> bytes:
    """Return the frames of plain text, a line of data for each of its lines; the last one has the id.

    A reader joins lines with a newline, so every line break arrives as a newline. A text that looks like the end of the
    stream is sent in two frames.
    """
    if text == "[DONE]":
        return text_frames(text[:-1]) + text_frames(text[-1], event_id)
    lines = b"\n".join(b"data: " + line.encode() for line in with_newlines(text).split("\n"))
    return (b"id: %s\n" % event_id.encode() if event_id else b"") + lines + b"\n\n"


def with_newlines(text: str) -> str:
    """Return a plain text as a client of the stream gets it."""
    return _BREAK.sub("\n", text)


def frame(data: bytes, event_id: str = "", *, kind: str = "") -> bytes:
    """Return the frame of one JSON document; a client can resume after *event_id*; *kind* is the event's name."""
    data = _in_one_line(data)
    if event_id and not kind:  # as the frame of every token
        return b"id: %s\ndata: %s\n\n" % (event_id.encode(), data)
    head = b"event: %s\n" % kind.encode() if kind else b""
    if event_id:
        head = b"id: %s\n" % event_id.encode() + head
    return head + b"data: " + data + b"\n\n"


def frame_pieces(pieces: Iterable[bytes], event_id: str = "") -> Iterator[bytes]:
    """Yield `frame` of the JSON document that *pieces* are. None of them ends within a character."""
    last = b"id: %s\ndata: " % event_id.encode() if event_id else b"data: "
    for index, piece in enumerate(pieces):
        if index:
            yield last
            last = b""
        last += _in_one_line(piece)
    yield last + b"\n\n"


def _in_one_line(data: bytes) -> bytes:
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data
