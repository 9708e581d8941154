"""Errors in the shape of Anthropic's API: https://docs.anthropic.com/en/api/errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import orjson

from pipeline.errors import RequestError

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOO_LONG: Final = re.compile(
    r"This model's maximum context length is (\d+) tokens\. .*?the prompt has \D*(\d+) tokens"
)


def error_body(error: RequestError, request_id: str) -> bytes:
    """Return the JSON body of *error*. Clients recognize Anthropic's words for a prompt that is too long."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    numbers = _TOO_LONG.match(error.message)
    message = "prompt is too long: {1} tokens > {0} maximum".format(*numbers.groups()) if numbers else error.message
    told = {"type": kind, "message": message}
    return orjson.dumps({"type": "error", "error": told, "request_id": request_id})
