"""Quart responses from the bodies that `web.wire.openai` makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final
from urllib.parse import quote

import orjson
from quart import Response

from pipeline.errors import RequestError
from web.wire import sse
from web.wire.openai.errors import NotNow, error_body

UNKNOWN_SHOWN: Final = 32
"""Unknown fields that the header names, each with so many characters at most."""


def json_response(value: object, status: int = 200) -> Response:
    """Return *value* as JSON; bytes are JSON already."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(body, status, content_type="application/json")


def stream_response(frames: AsyncIterator[bytes]) -> Response:
    """Return server-sent events that no proxy holds back."""
    response = Response(frames, content_type=sse.CONTENT_TYPE)
    response.headers["cache-control"] = "no-cache"
    response.headers["x-accel-buffering"] = "no"
    return response


def name_unknown(response: Response, names: Sequence[str]) -> None:
    """Say in a header which fields of the request mean nothing to us."""
    if names:
        shown = (quote(name, safe="$[]")[:UNKNOWN_SHOWN] for name in names[:UNKNOWN_SHOWN])
        response.headers["x-minisgl-unknown-fields"] = ", ".join(shown)


def error_response(error: RequestError) -> Response:
    """Return the nested OpenAI body, and what to come again with, or when, where that helps."""
    response = json_response(error_body(error), error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(error.retry_after_s if isinstance(error, NotNow) else 1)
    return response
