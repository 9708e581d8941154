"""How requests are submitted, and what becomes of that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Submission(Enum):
    """What became of a submit."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"
    """The uid was submitted before: an earlier try had got through."""
    BUSY = "BUSY"
    """Not all of them may wait beside those that wait already: --max-queued-requests."""
    FULL = "FULL"
    """The log would hold more bytes than it may: --max-log-bytes. The frontend knows that, the log does not."""
    ATTACH = "ATTACH"
    """Another request has the idempotency key: the client means that one."""
    MISMATCH = "MISMATCH"
    """Another request has the idempotency key, but its body is another."""
    GONE = "GONE"
    """The dead letter that it sends again is not there: somebody else has sent it again, or dropped it."""
    TOO_FAST = "TOO_FAST"
    """The API key has used up its requests of this minute."""
    TOO_MANY = "TOO_MANY"
    """As many requests of the API key run as may."""
    TOO_MUCH = "TOO_MUCH"
    """The API key has used up its share of the log."""


@dataclass(frozen=True, slots=True)
class Once:
    """An idempotency key. Submits with the same key and the same body are one request."""

    key: str
    """The hash of the client's key and its scope."""
    digest: str
    """The hash of the body; without a colon."""
    instead_of: str = ""
    """The uid that may lose the key, because its request is gone or ended in vain; the base uid of siblings."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How much an API key may submit; 0 is no limit."""

    key: str
    """The hash of an API key."""
    requests_per_minute: int = 0
    """Accepted submits in each minute of the log's clock; siblings count as one."""
    concurrent_requests: int = 0
    """Accepted requests that have not ended; siblings count each. Siblings are accepted where one request would be,
    because more than may run at once could never be accepted otherwise."""
    log_bytes: int = 0
    """Bytes of accepted requests within the retention, as `shared.submitted_bytes` counts them. The submit that reaches
    the limit is still accepted, because one above it could never be accepted otherwise."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """What became of a submit, and of which request it says so."""

    submission: Submission
    uid: str
    """The request that has the idempotency key, else the submitted one; the base uid of siblings."""
    again_ms: int = 0
    """With TOO_FAST: how long the minute still lasts. With TOO_MUCH: how long until the key is below its share."""
    used_bytes: int = 0
    """With TOO_MUCH: how much of the log the key has used."""
