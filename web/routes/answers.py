"""Quart responses: from bodies, from errors, and from the frames of a stream as they come."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeAlias
from urllib.parse import quote

import orjson
from quart import Response, request

from pipeline.errors import RequestError
from pipeline.names import parse_id
from pipeline.process.failpoints import failpoint
from web.http.asgi import SEND, WRITE
from web.http.turns import Turns
from web.live.client import Client
from web.wire import sse
from web.wire.fields import MOST_SHOWN
from web.wire.frames import ClientEvent, Frames
from web.wire.openai.errors import NotNow, error_body

Send: TypeAlias = Callable[[bytes], Awaitable[bool]]
Write: TypeAlias = Callable[[Callable[[], bytes]], bool]
FRAMED_AT_ONCE: Final = 64
"""Events whose frames are made in one turn; each takes up to 0.1 ms."""


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
    client: Client, frames: Frames, turns: Turns, first: Sequence[ClientEvent] | None = None, *, after: str = ""
) -> Response:
    """Return server-sent events that no proxy buffers. *first*: events that came already. The client has the frames of
    all events up to the id *after*."""
    return event_stream(_pieces(client, frames, turns, first, after))


async def checked_response(client: Client, frames: Frames, turns: Turns) -> Response:
    """As `stream_response`, of *frames* that may refuse the request while they pass what the client has. The status
    waits for the first frame, or for 10 s.

    Raises:
        RequestError: They did, before anything was sent.
    """
    written = _pieces(client, frames, turns)
    first = await anext(written)

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in written:
            yield piece

    return event_stream(all_pieces())


def _pieces(
    client: Client, frames: Frames, turns: Turns, first: Sequence[ClientEvent] | None = None, after: str = ""
) -> AsyncIterator[bytes]:
    """Return what `_written` yields, in the context of the current HTTP request: that ends before its answer does."""
    state = request.scope.get("state", {})
    return _written(client, frames, turns, first, after, state.get(SEND), state.get(WRITE))


def event_stream(written: AsyncIterator[bytes]) -> Response:
    """Return server-sent events that no proxy buffers."""
    response = Response(written, content_type=sse.CONTENT_TYPE)
    response.headers["cache-control"] = "no-cache"
    response.headers["x-accel-buffering"] = "no"
    return response


async def _written(
    client: Client,
    frames: Frames,
    turns: Turns,
    first: Sequence[ClientEvent] | None,
    after: str,
    send: Send | None,
    write: Write | None = None,
) -> AsyncIterator[bytes]:
    """Yield what goes to the socket: the frames of all events that came together in one piece, and [DONE] after the
    end. What *send* or *write* takes is sent instead: past Quart, Hypercorn and h11, which take longer than all else
    here."""
    position, has_begun, has_failed = parse_id(after) if after else None, False, False

    def framed(events: Sequence[ClientEvent]) -> bytes:
        nonlocal has_failed
        if position is None and len(events) == 1:
            return frames.of(events[0])
        written = []
        for event in events:
            if has_failed:  # else events of siblings would come after the end
                break
            frame = frames.of(event)
            if is_news(event):
                written.append(frame)
            has_failed = client.has_failed_with(event)
        return b"".join(written)

    def is_news(event: ClientEvent) -> bool:
        return position is None or not event.entry_id or parse_id(event.entry_id) > position

    def pass_on(events: Sequence[ClientEvent]) -> bool:
        if frames.are_long or write is None or not write(functools.partial(framed, events)):
            return False
        failpoint("web.mid_stream")
        return True

    try:
        events = await client.next() if first is None else first
        while True:
            done, began_long = client.done, frames.are_long
            for event in events if began_long else ():
                async for piece in turns.each(frames.pieces(event)):
                    if is_news(event) and piece and not (send is not None and await send(piece)):
                        yield piece
                if client.has_failed_with(event):
                    break
            if not began_long and len(events) > FRAMED_AT_ONCE:  # a history of the archive comes at once
                some = [events[at : at + FRAMED_AT_ONCE] for at in range(0, len(events), FRAMED_AT_ONCE)]
                async for piece in turns.each(map(framed, some[:-1])):
                    has_begun = has_begun or bool(piece)
                    if piece and not (send is not None and await send(piece)):
                        yield piece
                events = some[-1]
            written = b"" if began_long else framed(events)
            data = written + sse.DONE * done if events else sse.KEEP_ALIVE
            has_begun = has_begun or bool(data)
            if data and not (send is not None and await send(data)):
                yield data
            if done:
                return
            if events:
                failpoint("web.mid_stream")
            events = await client.next(pass_on)
    except RequestError as error:
        client.refuse(error)
        if not has_begun:
            raise
        yield frames.error(error) + sse.DONE
    except Exception:  # the status was sent long ago: a frame that says what happened is better than a cut connection
        yield frames.error(client.break_off()) + sse.DONE


def name_unknown(response: Response, names: Sequence[str]) -> None:
    """List in a header the fields of the request that this server does not know."""
    if names:
        shown = (quote(name, safe="$[]")[:MOST_SHOWN] for name in names[:MOST_SHOWN])
        response.headers["x-minisgl-unknown-fields"] = ", ".join(shown)


def error_response(error: RequestError) -> Response:
    """Return the nested OpenAI body, and the headers that tell how or when to try again."""
    response = json_response(error_body(error), error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(error.retry_after_s if isinstance(error, NotNow) else 1)
    return response
