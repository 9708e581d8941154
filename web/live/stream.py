"""The answer to one client as a stream of frames. It takes replies as they come, or what their history supplied."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

from pipeline.errors import RequestError
from pipeline.names import parse_id
from pipeline.process.failpoints import failpoint
from web.http.asgi import Outlet
from web.http.turns import Turns
from web.live.client import Client
from web.wire.frames import ClientEvent, Frames

FRAMED_AT_ONCE: Final = 64
"""Most events whose frames are made in one turn of the loop. A frame takes up to 0.1 ms."""


class Stream:
    """Makes and sends the frames of one answer.

    The tail gives a reply to its listener, which checks the order; then `push` sends the frame. If the client does not
    read fast enough, or a history has to be read, the task of `pieces` sends it.
    """

    def __init__(self, client: Client, frames: Frames, turns: Turns, outlet: Outlet | None, *, after: str = "") -> None:
        """The client has the frames of all events up to the id *after*. Without an *outlet*, all goes through Quart."""
        self._client = client
        self._frames = frames
        self._turns = turns
        self._outlet = outlet
        self._position = parse_id(after) if after else None
        self._has_begun = False
        """Something was sent."""
        self._has_failed = False
        client.push_to(self.push)

    def push(self) -> bool:
        """Send the frames of the new events at once. Return False if that would have to wait; then nothing is sent."""
        events = self._client.came
        if not events or self._frames.are_long or self._outlet is None or not self._outlet.takes_piece():
            return False
        if data := self._framed(events):
            self._outlet.write_piece(data)
        self._client.take()
        failpoint("web.mid_stream")
        return True

    async def pieces(self, first: Sequence[ClientEvent] | None = None) -> AsyncIterator[bytes]:
        """Send the frames of all events, and what ends the stream. Yield what the outlet does not take. *first*: events
        that came already."""
        async with aclosing(self._made(first)) as made:
            async for data in made:
                self._has_begun = True
                if self._outlet is None or not await self._outlet.send_piece(data):
                    yield data

    async def _made(self, first: Sequence[ClientEvent] | None) -> AsyncGenerator[bytes, None]:
        """Yield the frames of events that came together in one piece. Long ones are made in turns."""
        client, frames = self._client, self._frames
        try:
            events = await client.next() if first is None else first
            while True:
                done = client.done
                if frames.are_long:
                    for event in events:
                        async for piece in self._turns.each(frames.pieces(event)):
                            if piece and self._is_news(event):
                                yield piece
                        if client.has_failed_with(event):
                            break
                    written = b""
                else:
                    if len(events) > FRAMED_AT_ONCE:  # a history of the archive comes at once
                        some = [events[at : at + FRAMED_AT_ONCE] for at in range(0, len(events), FRAMED_AT_ONCE)]
                        async for piece in self._turns.each(map(self._framed, some[:-1])):
                            if piece:
                                yield piece
                        events = some[-1]
                    written = self._framed(events)
                if data := written + frames.done * done if events else frames.keep_alive:
                    yield data
                if done:
                    return
                if events:
                    failpoint("web.mid_stream")
                events = await client.next()
        except RequestError as error:
            client.refuse(error)
            if not self._has_begun:
                raise
            yield frames.error(error) + frames.done
        except Exception:  # the status was sent long ago: a frame that says what happened is better than a cut stream
            yield frames.error(client.break_off()) + frames.done

    def _framed(self, events: Sequence[ClientEvent]) -> bytes:
        if self._position is None and len(events) == 1:
            return self._frames.of(events[0])
        written = []
        for event in events:
            if self._has_failed:  # else events of siblings would come after the end
                break
            frame = self._frames.of(event)
            if self._is_news(event):
                written.append(frame)
            self._has_failed = self._client.has_failed_with(event)
        return b"".join(written)

    def _is_news(self, event: ClientEvent) -> bool:
        return self._position is None or not event.entry_id or parse_id(event.entry_id) > self._position
