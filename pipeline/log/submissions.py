"""Arguments and results of a submit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Submission(Enum):
    """Outcome of a submit."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"
    """The uid was submitted before: an earlier try had succeeded."""
    BUSY = "BUSY"
    """Too many requests would wait with these: --max-queued-requests."""
    FULL = "FULL"
    """The log would hold more bytes than allowed: --max-log-bytes. The frontend checks that, not the log."""
    ATTACH = "ATTACH"
    """Another request has the idempotency key and the same body: the client means that one."""
    MISMATCH = "MISMATCH"
    """Another request has the idempotency key, but another body."""
    GONE = "GONE"
    """The dead letter to send again does not exist: another client has sent it again, or dropped it."""
    TOO_FAST = "TOO_FAST"
    """The API key has used up its requests of this minute."""
    TOO_MANY = "TOO_MANY"
    """The API key has as many running requests as it may."""
    TOO_MUCH = "TOO_MUCH"
    """The API key has used up its share of the log."""


@dataclass(frozen=True, slots=True)
class Once:
    """An idempotency key. Submits with the same key and the same body are one request."""

    key: str
    """Hash of the client's key and its scope."""
    digest: str
    """Hash of the body; without a colon."""
    instead_of: str = ""
    """Uid that may lose the key, because its request is gone or failed; the base uid of siblings."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of what an API key may submit; 0: no limit."""

    key: str
    """Hash of an API key."""
    requests_per_minute: int = 0
    """Largest number of accepted submits in each minute of the log's clock; siblings count as one."""
    concurrent_requests: int = 0
    """Largest number of accepted requests that have not ended; siblings count each. Siblings are accepted where one
    request would be, because more than may run at once could never be accepted otherwise."""
    log_bytes: int = 0
    """Largest size of accepted requests within the retention, as `shared.submitted_bytes` counts it. The submit that
    reaches the limit is still accepted, because one above it could never be accepted otherwise."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """Outcome of a submit, and its request."""

    submission: Submission
    uid: str
    """Request that has the idempotency key, else the submitted one; the base uid of siblings."""
    again_ms: int = 0
    """With TOO_FAST: time left of the minute. With TOO_MUCH: time until the key is below its share."""
    used_bytes: int = 0
    """With TOO_MUCH: size of the key's part of the log."""
