"""A stream is a fold: events of the log go in one by one, frames come out. Here is what all endpoints share of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from pipeline.errors import RequestError
from pipeline.events import AnyEvent, Failed
from web.wire import sse
from web.wire.openai.errors import error_body, error_of


@dataclass(slots=True)
class ClientEvent:
    """One event of a request, as the folds of bodies and frames take it.

    There is one for each token, and a frozen dataclass takes many times as long to make.
    """

    entry_id: str
    """Its id in the history; empty for an event that this process alone makes, from which no client can resume."""
    n: int
    event: AnyEvent
    index: int = 0
    """Which of the siblings it belongs to."""


class Frames:
    """A fold of histories into frames. The same events always give the same bytes."""

    waiting: bytes = sse.WAITING
    """A keep-alive, sent while there are no events."""

    def of(self, event: ClientEvent) -> bytes:
        """Return the frames of the next event; the last one has its id, where the stream has ids."""
        raise NotImplementedError

    @property
    def are_long(self) -> bool:
        """Say whether the next frames may be long, and so are better asked for in `pieces`."""
        return False

    def pieces(self, event: ClientEvent) -> Iterator[bytes]:
        """Yield the bytes of `of` one after the other, each in a short time."""
        yield self.of(event)

    def error(self, error: RequestError, entry_id: str = "") -> bytes:
        """Return the frame of an end that is no success."""
        return sse.frame(error_body(error), entry_id)


class EventFrames(Frames):
    """The events themselves, as they are stored, one frame each."""

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        if not event.entry_id and isinstance(event.event, Failed):  # not in the log: this process alone says it
            return self.error(error_of(event.event))
        return sse.frame(orjson.dumps(event.event.model_dump(mode="json", exclude_unset=True)), event.entry_id)
