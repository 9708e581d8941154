"""Quart responses: from bodies, from errors, and from the frames of a stream as they come."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final
from urllib.parse import quote

import orjson
from quart import Response, g, request

from pipeline.errors import RequestError
from web.http.asgi import OUTLET
from web.http.turns import Turns
from web.live.client import Client
from web.live.stream import Stream
from web.wire import sse
from web.wire.anthropic import errors as anthropic
from web.wire.endpoints import MESSAGES_ENDPOINT
from web.wire.fields import MOST_SHOWN
from web.wire.frames import ClientEvent, Frames
from web.wire.openai.errors import NotNow, error_body

REQUEST_ID: Final = re.compile(r"[\w.-]{1,128}", re.ASCII)


def json_response(value: object, status: int = 200) -> Response:
    """Return *value* as JSON; bytes are JSON already."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(body, status, content_type="application/json")


def json_pieces(pieces: Iterator[bytes], turns: Turns) -> Response:
    """Return *pieces* of JSON; several are made in *turns*, go out one after the other, and have no length."""
    first = tuple(itertools.islice(pieces, 2))
    if len(first) < 2:
        return json_response(b"".join(first))

    async def all_pieces() -> AsyncIterator[bytes]:
        for piece in first:
            yield piece
        async for piece in turns.each(pieces):
            yield piece

    return Response(all_pieces(), 200, content_type="application/json")


def stream_response(
    client: Client,
    frames: Frames,
    turns: Turns,
    first: Sequence[ClientEvent] | None = None,
    *,
    after: str = "",
    begun: bytes = b"",
) -> Response:
    """Return server-sent events that no proxy buffers. *first*: events that came already. The client has the frames of
    all events up to the id *after*. *begun*: what is sent at once."""
    written = _pieces(client, frames, turns, first, after)
    return event_stream(_after(begun, written) if begun else written)


async def _after(begun: bytes, written: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begun
    async for piece in written:
        yield piece


async def checked_response(client: Client, frames: Frames, turns: Turns) -> Response:
    """As `stream_response`, of *frames* that may refuse the request while they pass what the client has. The status
    waits for the first frame, or for 10 s.

    Raises:
        RequestError: They did, before anything was sent.
    """
    written = _pieces(client, frames, turns)
    return event_stream(_after(await anext(written), written))


def _pieces(
    client: Client, frames: Frames, turns: Turns, first: Sequence[ClientEvent] | None = None, after: str = ""
) -> AsyncIterator[bytes]:
    """Return `Stream.pieces`, in the context of the current HTTP request: that ends before its answer does."""
    outlet = request.scope.get("state", {}).get(OUTLET)
    return Stream(client, frames, turns, outlet, after=after).pieces(first)


def event_stream(written: AsyncIterator[bytes]) -> Response:
    """Return server-sent events that no proxy buffers."""
    response = Response(written, content_type=sse.CONTENT_TYPE)
    response.headers["cache-control"] = "no-cache"
    response.headers["x-accel-buffering"] = "no"
    return response


def request_id() -> str:
    """Return the id of the current HTTP request: the one that its client gave it, or a new one."""
    if not hasattr(g, "request_id"):
        given = request.headers.get("x-request-id", "")
        g.request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return str(g.request_id)


def is_anthropic() -> bool:
    """Return whether the client of the current HTTP request reads Anthropic's bodies and headers."""
    return request.path.startswith(MESSAGES_ENDPOINT)


def name_unknown(response: Response, names: Sequence[str]) -> None:
    """List in a header the fields of the request that this server does not know."""
    if names:
        shown = (quote(name, safe="$[]")[:MOST_SHOWN] for name in names[:MOST_SHOWN])
        response.headers["x-minisgl-unknown-fields"] = ", ".join(shown)


def error_response(error: RequestError) -> Response:
    """Return the body that the clients of this path read, and the headers that tell how or when to try again."""
    body = anthropic.error_body(error, request_id()) if is_anthropic() else error_body(error)
    response = json_response(body, error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(error.retry_after_s if isinstance(error, NotNow) else 1)
    return response
