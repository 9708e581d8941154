"""What the streams of all endpoints have in common: a fold of events into frames."""

from __future__ import annotations

from pipeline.errors import RequestError
from web.wire import sse
from web.wire.client_event import ClientEvent
from web.wire.openai.errors import error_body


class Frames:
    """A fold of histories into frames. The same events give the same bytes, whoever folds them, and when."""

    waiting: bytes = sse.WAITING
    """What is sent while there is nothing to say, so that nobody takes the connection for dead."""

    def of(self, heard: ClientEvent) -> bytes:
        """Return the frames of the next event; the last one has its id, where ids are said."""
        raise NotImplementedError

    def error(self, error: RequestError, entry_id: str = "") -> bytes:
        """Return the frame of an end that is no success."""
        return sse.frame(error_body(error), entry_id)
