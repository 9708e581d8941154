"""Every error has one shape, in bodies and in frames: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import orjson

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed

CLIENT_CLOSED: Final = 499
"""Status of a cancelled request; no client library retries it."""

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
"""The codes of errors that have none of their own."""


REVOKED: Final = "revoked"
"""Who cancels the requests of API keys that were removed, as events name it."""


class NotNow(RequestError):
    """The request is fine but is not taken now: the error says when to send it again."""

    def __init__(self, message: str, *, status: int, code: str | None = None, retry_after_s: int) -> None:
        super().__init__(message, code=code or CODES.get(status), status=status)
        self.retry_after_s = retry_after_s


def error_body(error: RequestError) -> bytes:
    """Return the JSON body of *error*."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    code = error.code or CODES.get(error.status)
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": code}})


def error_of(event: Failed | Cancelled) -> RequestError:
    """Return the error that a client is told when its request fails or is cancelled."""
    if isinstance(event, Failed):
        return RequestError(event.message, code=event.code, param=event.param or None, status=event.status)
    if event.by == REVOKED:
        return RequestError("The API key of this request was revoked.", code="cancelled", status=CLIENT_CLOSED)
    return RequestError(f"The request was cancelled by {event.by}.", code="cancelled", status=CLIENT_CLOSED)
