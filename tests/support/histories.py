"""Histories that tests write down as pairs of id and event, and what a fold is given of them."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.events import AnyEvent, encode
from pipeline.log.protocol import Entry
from pipeline.walk import Moment, walk


def entries_of(pairs: Iterable[tuple[str, AnyEvent]]) -> list[Entry]:
    """Return the entries that a stream would hold."""
    return [Entry(entry_id, {"ms": str(event.ms), **encode(event)}) for entry_id, event in pairs]


def moments_of(pairs: Iterable[tuple[str, AnyEvent]]) -> list[Moment]:
    """Return what a walk over the history gives."""
    return list(walk(entries_of(pairs), over_holes=True))
