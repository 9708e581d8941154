"""Quart responses: from bodies, from errors, and from the frames of a stream as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final
from urllib.parse import quote

import orjson
from quart import Response

from pipeline.errors import RequestError
from pipeline.names import parse_id
from pipeline.process.failpoints import failpoint
from web.live.client import Client
from web.wire import sse
from web.wire.frames import ClientEvent, Frames
from web.wire.openai.errors import NotNow, error_body

UNKNOWN_SHOWN: Final = 32
"""Most unknown fields that the header names, and most characters of each."""


def json_response(value: object, status: int = 200) -> Response:
    """Return *value* as JSON; bytes are JSON already."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(body, status, content_type="application/json")


def stream_response(
    client: Client, frames: Frames, first: Sequence[ClientEvent] | None = None, *, after: str = ""
) -> Response:
    """Return server-sent events that no proxy buffers. *first*: events that came already. The client has the frames of
    all events up to the id *after*."""
    response = Response(_written(client, frames, first, after), content_type=sse.CONTENT_TYPE)
    response.headers["cache-control"] = "no-cache"
    response.headers["x-accel-buffering"] = "no"
    return response


async def _written(
    client: Client, frames: Frames, first: Sequence[ClientEvent] | None, after: str
) -> AsyncIterator[bytes]:
    """Yield what goes to the socket: the frames of all events that came together in one piece, and [DONE] after the
    end."""
    position = parse_id(after or "0-0")
    try:
        events = await client.next() if first is None else first
        while True:
            written = []
            for event in events:
                frame = frames.of(event)
                if not event.entry_id or parse_id(event.entry_id) > position:
                    written.append(frame)
                if client.has_failed_with(event):  # events of siblings would come after the end
                    break
            if client.done:
                written.append(sse.DONE)
            data = b"".join(written) if events else frames.waiting
            if data:
                yield data
            if client.done:
                return
            if events:
                failpoint("web.mid_stream")
            events = await client.next()
    except Exception:  # the status was sent long ago: a frame that says what happened is better than a cut connection
        yield frames.error(client.break_off()) + sse.DONE


def name_unknown(response: Response, names: Sequence[str]) -> None:
    """List in a header the fields of the request that this server does not know."""
    if names:
        shown = (quote(name, safe="$[]")[:UNKNOWN_SHOWN] for name in names[:UNKNOWN_SHOWN])
        response.headers["x-minisgl-unknown-fields"] = ", ".join(shown)


def error_response(error: RequestError) -> Response:
    """Return the nested OpenAI body, and the headers that say how, or when, to try again."""
    response = json_response(error_body(error), error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(error.retry_after_s if isinstance(error, NotNow) else 1)
    return response
