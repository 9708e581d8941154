"""What goes to the socket of a streaming client: the frames of a request, folded from its events as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import orjson

from pipeline.events import AnyEvent, Failed, Submitted
from pipeline.failpoints import failpoint
from pipeline.names import parse_id
from web import sse
from web.frontend import Client
from web.openai.errors import error_body, error_of
from web.openai.responses import ChatFrames
from web.submit import CHAT_ENDPOINT
from web.tail import Heard
from web.uids import drawn_ms


class Frames(Protocol):
    """A fold of a history into frames. The same events give the same bytes, whoever folds them, and when."""

    def of(self, entry_id: str, event: AnyEvent) -> bytes:
        """Return the frames of the next event; the last one has its id."""
        ...


class EventFrames:
    """Every event as it is stored, a frame each."""

    def of(self, entry_id: str, event: AnyEvent) -> bytes:
        """As Frames.of."""
        if not entry_id and isinstance(event, Failed):  # no event: this process alone says so
            return sse.frame(error_body(error_of(event)))
        return sse.frame(orjson.dumps(event.model_dump(mode="json", exclude_unset=True)), entry_id)


def frames_for(uid: str, submitted: Submitted) -> Frames | None:
    """Return the frames that the endpoint of a request sends; None for an endpoint that sends none."""
    if submitted.endpoint != CHAT_ENDPOINT:
        return None
    include_usage = bool(submitted.labels.get("include_usage"))
    return ChatFrames(uid, drawn_ms(uid) // 1000, submitted.model, include_usage=include_usage)


async def written(
    client: Client, frames: Frames, first: Sequence[Heard] | None = None, *, after: str = ""
) -> AsyncIterator[bytes]:
    """Yield what goes to the socket: all frames that there are at a time in one piece, and [DONE] after the end.

    *first* is what was heard already. Of the events up to the id *after* the client has the frames.
    """
    position = parse_id(after or "0-0")
    try:
        heard = await client.next() if first is None else first
        while True:
            pieces = []
            for each in heard:
                piece = frames.of(each.entry_id, each.event)
                if not each.entry_id or parse_id(each.entry_id) > position:
                    pieces.append(piece)
            if client.ended:
                pieces.append(sse.DONE)
            piece = b"".join(pieces) if heard else sse.WAITING
            if piece:
                yield piece
            if client.ended:
                return
            if heard:
                failpoint("web.mid_stream")
            heard = await client.next()
    except Exception:  # the status is long sent: a cut connection would be worse than a frame that says so
        yield sse.frame(error_body(client.break_off())) + sse.DONE
