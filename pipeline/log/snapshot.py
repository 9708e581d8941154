"""What one look at the whole log brings, for who shows it: how it stands at one moment, and the ends of histories.

Shapes alone: `RedisLog.look` and `RedisLog.peek` fill them, `pipeline.views.pipeline` folds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.log.protocol import Entry, Lease, Occupancy


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What the server of the log says of itself."""

    name: str
    """Redis or Valkey."""
    version: str
    up_s: int
    used_bytes: int
    max_bytes: int
    """0: there is no limit."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot, as three keys tell."""

    owner: str
    """`<epoch>:<nonce>` of the last one that could write for it; empty where nobody has held it yet."""
    lease: Lease
    status: str
    """JSON; empty where its worker has not spoken for 10 s."""
    said_ms: int
    """When it spoke, by Redis' clock; 0 without a status."""


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """The log at one moment, but for the requests in it."""

    now_ms: int
    """Redis' clock."""
    redis: RedisFacts
    occupancy: Occupancy
    slots: Mapping[str, SlotState]
    """Every slot that was ever held, or whose worker speaks."""
    pending: Mapping[str, int]
    """Slot -> entries that its worker has read and not consumed."""
    living: tuple[str, ...]
    """Requests that have not ended; where they are many, those with the latest deadlines."""
    held: Mapping[str, str]
    """uid -> the slot of the tokenizer or of the engine that has the request, of the newest requests."""


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """What is wanted of a history."""

    after: str
    """Of what happened before the first token, what comes after this id; empty: all; `names.SEAL`: nothing."""
    last: bool
    """And its last entry."""


@dataclass(frozen=True, slots=True)
class HistoryEnds:
    """What a history was seen to hold."""

    exists: bool
    head: tuple[Entry, ...] = ()
    last: Entry | None = None
    """None where nothing happened yet after the prompt was tokenized."""
