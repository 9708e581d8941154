"""Server-sent events as a browser reads them (WHATWG HTML, 9.2.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One that a page would be told of."""

    data: str
    name: str = "message"
    last_id: str = ""


def events_in(stream: bytes) -> list[StreamEvent]:
    """Return the events of a whole stream; what is not closed by a blank line is none."""
    events: list[StreamEvent] = []
    data: list[str] = []
    name = last_id = ""
    for line in re.split("\r\n|\r|\n", stream.decode()):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append(StreamEvent("\n".join(data), name or "message", last_id))
            data, name = [], ""
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id":
            last_id = value
    return events
