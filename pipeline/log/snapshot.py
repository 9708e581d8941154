"""The whole log at one moment, and the ends of histories, for the tools that show them.

Types only: `RedisLog.snapshot` and `RedisLog.peek` fill them, `pipeline.views.pipeline` folds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.log.protocol import Entry, Lease, Occupancy


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """The server of the log, as it reports itself."""

    name: str
    """Redis or Valkey."""
    version: str
    up_s: int
    used_bytes: int
    max_bytes: int
    """Memory limit; 0: there is none."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot, read from its three keys."""

    owner: str
    """`<epoch>:<nonce>` of its last owner; empty if it never had one."""
    lease: Lease
    status: str
    """JSON; empty if its worker published none in the last 10 s."""
    said_ms: int
    """Time when the status was published, by Redis' clock; 0 without a status."""


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """The log at one moment, without the histories."""

    now_ms: int
    """Time by Redis' clock."""
    redis: RedisFacts
    occupancy: Occupancy
    slots: Mapping[str, SlotState]
    """Every slot that was ever held, or that has a status."""
    pending: Mapping[str, int]
    """Slot -> number of entries that its worker has read and not consumed."""
    living: tuple[str, ...]
    """Requests that have not ended; if there are many, those with the latest deadlines."""
    held: Mapping[str, str]
    """uid -> slot of the tokenizer or engine that has the request, for the newest requests."""


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """The parts of a history to read."""

    after: str
    """Id after which the events before the first token are read; empty: all of them; `names.SEAL`: none."""
    last: bool
    """Whether to read the last entry, too."""


@dataclass(frozen=True, slots=True)
class HistoryEnds:
    """The parts of a history that were read."""

    exists: bool
    head: tuple[Entry, ...] = ()
    last: Entry | None = None
    """Last entry; None if nothing has happened since the prompt was tokenized."""
