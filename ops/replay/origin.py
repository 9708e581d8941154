"""Where an imported request came from: what its label says of that, and how it gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from pipeline.errors import UndecodableEvent
from pipeline.events import Submitted, decode
from pipeline.log.protocol import Entry
from pipeline.recording import Recording
from pipeline.walk import PROMPT, walk

IMPORTED_FROM: Final = "imported_from"
"""The label of an imported request: its file, what the header of that says, and what the file says of the request."""
CUSTOM_ID: Final = "custom_id"
"""The label of a request of a batch: its name in there."""


def about_of(history: Sequence[Entry]) -> Mapping[str, Any]:
    """Return what the file said of a request that was imported; nothing of others."""
    labels = history[0].fields.get("labels", "") if history else ""
    if IMPORTED_FROM not in labels:
        return {}
    try:
        about = orjson.loads(labels)[IMPORTED_FROM]["about"]
    except (orjson.JSONDecodeError, KeyError, TypeError):  # a label that a client sent
        return {}
    return about if isinstance(about, dict) else {}


def incoming(recording: Recording, origin: Mapping[str, Any], *, keep_owner: bool) -> list[Entry]:
    """Return the entries of *recording* as they are imported: with *origin* as a label, which tells where it came from
    first, and without an owner, unless *keep_owner*.

    Raises:
        UndecodableEvent: They are no history that the tools can read.
    """
    for _ in walk(recording.entries, over_holes=True):
        """Every event decodes."""
    first, *others = recording.entries
    event = decode(first.fields, without=PROMPT)
    if not isinstance(event, Submitted):
        raise UndecodableEvent(f"it begins with an event of the kind {event.kind}, expected submitted")
    told = dict(origin) | ({"about": dict(recording.about)} if recording.about else {})
    fields = dict(first.fields) | {"labels": orjson.dumps({IMPORTED_FROM: told} | event.labels).decode()}
    if not keep_owner:
        fields.pop("owner", None)
    return [Entry(first.id, fields), *others]
