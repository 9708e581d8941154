"""What goes to the socket of a streaming client: the frames of a request, folded from its events as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import orjson

from pipeline.events import Failed, Submitted
from pipeline.names import parse_id
from pipeline.process.failpoints import failpoint
from web.live.frontend import Client
from web.wire import sse
from web.wire.client_event import ClientEvent
from web.wire.endpoints import ENDPOINTS
from web.wire.frames import Frames
from web.wire.openai.errors import error_of


class EventFrames(Frames):
    """Every event as it is stored, a frame each."""

    def of(self, heard: ClientEvent) -> bytes:
        """As Frames.of."""
        if not heard.entry_id and isinstance(heard.event, Failed):  # no event: this process alone says so
            return self.error(error_of(heard.event))
        return sse.frame(orjson.dumps(heard.event.model_dump(mode="json", exclude_unset=True)), heard.entry_id)


def frames_for(uid: str, events: Sequence[Submitted]) -> Frames | None:
    """Return the frames that the endpoint of a request, or of its siblings, sends; None where it sends none."""
    endpoint = ENDPOINTS.get(events[0].endpoint)
    return None if endpoint is None else endpoint.frames(uid, events)


async def written(
    client: Client, frames: Frames, first: Sequence[ClientEvent] | None = None, *, after: str = ""
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
                piece = frames.of(each)
                if not each.entry_id or parse_id(each.entry_id) > position:
                    pieces.append(piece)
                if client.has_failed_with(each):  # what siblings say after it would come behind the end
                    break
            if client.done:
                pieces.append(sse.DONE)
            piece = b"".join(pieces) if heard else frames.waiting
            if piece:
                yield piece
            if client.done:
                return
            if heard:
                failpoint("web.mid_stream")
            heard = await client.next()
    except Exception:  # the status is long sent: a cut connection would be worse than a frame that says so
        yield frames.error(client.break_off()) + sse.DONE
