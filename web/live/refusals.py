"""How a client is told that the log did not take its request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pipeline.errors import LogError, LogFull, RequestError
from pipeline.log.protocol import Quota, Submission, SubmitResult
from pipeline.metrics.families import REJECTIONS
from web.live.frontend import UNREACHABLE, Frontend
from web.wire.idempotency import HEADER
from web.wire.openai.errors import NotNow


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a client is told that the log did not take its request."""

    metric: str
    """A label of REJECTIONS; empty: not counted."""
    message: str
    """Formatted with `quota`, the one of the API key, `rate`, such as "60 requests a minute", and `used_bytes`,
    `again_s` and `acks`, as in SubmitResult."""
    status: int = 503
    code: str | None = "overloaded"
    param: str | None = None
    retry_after: Literal["estimate", "quota", "second"] = "second"
    """When to send it again: when there may be room, when the quota allows it, or in a second."""


REFUSALS: Final[Mapping[Submission | type[LogError], Refusal]] = {
    LogFull: Refusal("log_full", "The log is full until running requests end; send it again.", retry_after="estimate"),
    LogError: Refusal("log_unreachable", UNREACHABLE),
    Submission.BUSY: Refusal("queue_full", "Too many requests are waiting; send it again.", retry_after="estimate"),
    Submission.FULL: Refusal(
        "log_bytes",
        "The log may take no more memory (--max-log-bytes) until older requests expire; send it again.",
        retry_after="estimate",
    ),
    Submission.TOO_FAST: Refusal(
        "rate",
        "This API key may use {rate}; wait {again_s} s.",
        status=429,
        code=None,
        retry_after="quota",
    ),
    Submission.TOO_MANY_WAIT: Refusal(
        "queued_requests",
        "This API key may have {quota.queued_requests} requests waiting; send it again when one runs.",
        status=429,
        code=None,
    ),
    Submission.TOO_MANY: Refusal(
        "concurrent_requests",
        "This API key may have {quota.concurrent_requests} requests at once; send it again.",
        status=429,
        code=None,
    ),
    Submission.TOO_MANY_IN_BACKGROUND: Refusal(
        "max_background",
        "Too many responses of this API key run in the background (--max-background); send it again later.",
        status=429,
        code=None,
    ),
    Submission.TOO_MUCH: Refusal(
        "log_share",
        "This API key has submitted {used_bytes} bytes, and the log may keep {quota.log_bytes} bytes of it (log_bytes "
        "in --limits; without: half of --max-log-bytes). Wait {again_s} s until older requests expire, or send less.",
        status=429,
        code="log_share_exceeded",
        retry_after="quota",
    ),
    Submission.UNACKNOWLEDGED: Refusal(
        "unacknowledged",
        "Only {acks} have the request, so it was not accepted. Send it again; if this continues, look after the "
        "replicas of Redis.",
        code="not_replicated",
    ),
    Submission.MISMATCH: Refusal(
        "",
        f"{HEADER}: it was used with another body before; take a new one for a new request",
        status=400,
        code="idempotency_key_reused",
        param=HEADER,
    ),
    Submission.GONE: Refusal(
        "",
        "There is no such dead letter: it was sent again, dropped, or never there. GET /v1/dead lists them.",
        status=404,
        code="dead_letter_not_found",
    ),
}
"""Outcome of a submit -> the error for the client. Other outcomes are no refusals."""


def refusal(
    frontend: Frontend, outcome: SubmitResult | Submission | type[LogError], quota: Quota | None = None
) -> RequestError:
    """Count that a request was not taken, and return the error for its client."""
    again_s, used_bytes, limit, acks = 0, 0, "", ""
    if isinstance(outcome, SubmitResult):
        again_s, used_bytes, limit = math.ceil(outcome.again_ms / 1000), outcome.used_bytes, outcome.limit
        acks = outcome.acks
        outcome = outcome.submission
    found = REFUSALS[outcome]
    if found.metric:
        frontend.measures.add(REJECTIONS, limit or found.metric)
    rate = f"{getattr(quota, limit)} {limit.replace('_per_', ' a ')}" if limit else ""
    message = found.message.format(quota=quota, rate=rate, again_s=again_s, used_bytes=used_bytes, acks=acks)
    if found.status not in (429, 503):
        return RequestError(message, code=found.code, status=found.status, param=found.param)
    waits_s = {"estimate": frontend.retry_after.estimate_s(), "quota": again_s, "second": 1}
    return NotNow(message, code=found.code, status=found.status, retry_after_s=waits_s[found.retry_after])
