"""A stream is a fold: events of the log go in one by one, frames come out. This module has what all endpoints share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pipeline.errors import RequestError
from pipeline.events import AnyEvent, Failed
from web.wire import sse
from web.wire.openai.errors import error_body, error_of

EVENT_IDS: Final = "x-minisgl-event-ids"
"""The header of a POST whose client wants ids in the stream. Without it there are none: several clients take every line
for data."""
EVENT_IDS_SCHEMA: Final[Mapping[str, Any]] = {
    "description": "1: frames of the stream have ids, after which a client can resume.",
    "enum": ["0", "1"],
}


def wants_ids(given: str | None) -> bool:
    """Return whether a client wants ids in its stream. *given* is its header.

    Raises:
        RequestError: The header is neither 0 nor 1.
    """
    if given not in (None, "0", "1"):
        raise RequestError(f"{EVENT_IDS}: should be 1 or 0, or left out", param=EVENT_IDS, code="invalid_value")
    return given == "1"


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
    """The index of its sibling."""


class Frames:
    """A fold of histories into frames. The same events always give the same bytes."""

    done = sse.DONE
    """What comes after the last frame."""
    keep_alive = sse.KEEP_ALIVE
    """What is sent while there is nothing to say."""

    def __init__(self, *, ids: bool) -> None:
        """With *ids*, the frames of each event have its id, so that clients can resume."""
        self._says_ids = ids

    def of(self, event: ClientEvent) -> bytes:
        """Return the frames of the next event; the last one has its id, where the stream has ids."""
        raise NotImplementedError

    @property
    def are_long(self) -> bool:
        """Return whether the next frames may be long. Then call `pieces` instead of `of`."""
        return False

    def pieces(self, event: ClientEvent) -> Iterator[bytes]:
        """Yield the bytes of `of` in pieces; each takes little time."""
        yield self.of(event)

    def id_of(self, event: ClientEvent) -> str:
        """Return the id that the last frame of *event* has; empty if the stream has no ids."""
        return event.entry_id if self._says_ids else ""

    def error(self, error: RequestError, entry_id: str = "") -> bytes:
        """Return the frame of an end that is no success."""
        return sse.frame(error_body(error), entry_id)


class EventFrames(Frames):
    """The events themselves, as they are stored, one frame each."""

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        if not event.entry_id and isinstance(event.event, Failed):  # not in the log: only this process says it
            return self.error(error_of(event.event))
        return sse.frame(orjson.dumps(event.event.model_dump(mode="json", exclude_unset=True)), self.id_of(event))
