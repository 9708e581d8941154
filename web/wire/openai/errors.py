"""The one shape that every error has, in a body as in a frame: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import orjson

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed

CLIENT_CLOSED: Final = 499
"""Status of a request that somebody cancelled; no client library retries it."""

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}
CODES: Final[Mapping[int, str]] = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
}
"""The codes of errors that have no other than their status."""


class NotNow(RequestError):
    """Nothing is wrong with the request, but it is not taken now: it says when to send it again."""

    def __init__(self, message: str, *, status: int, code: str | None = None, retry_after_s: int) -> None:
        super().__init__(message, code=code or CODES.get(status), status=status)
        self.retry_after_s = retry_after_s


def error_body(error: RequestError) -> bytes:
    """Return the JSON body of *error*."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    code = error.code or CODES.get(error.status)
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": code}})


def error_of(event: Failed | Cancelled) -> RequestError:
    """Return what a client is told of an end that is no success."""
    if isinstance(event, Failed):
        return RequestError(event.message, code=event.code, param=event.param or None, status=event.status)
    return RequestError(f"The request was cancelled by {event.by}.", code="cancelled", status=CLIENT_CLOSED)
