"""Permissions: a key may use its own requests, the admin key everything. `web.http.keys` knows the keys."""

from __future__ import annotations

from typing import Protocol, cast

import structlog
from quart import g, request

from pipeline.errors import RequestError
from web.http.asgi import PLACE
from web.http.keys import Caller

logger = structlog.get_logger()


class Place(Protocol):
    """The connection of a request, for the limit on the connections of its client."""

    def views(self) -> None:
        """Count it as a viewer: its answer has no end of its own. Raises RequestError if its client has too many."""

    def has_read(self) -> None:
        """Note that the body of the request takes no memory any more."""


class _Nowhere:
    """The place of a request without a connection."""

    def views(self) -> None: ...
    def has_read(self) -> None: ...


def place() -> Place:
    """Return the connection of the current HTTP request."""
    return cast(Place, request.scope.get("state", {}).get(PLACE) or _Nowhere())


def caller() -> Caller:
    """Return the caller of the current HTTP request."""
    found: Caller = g.caller
    return found


def known_caller() -> Caller:
    """Return who has sent the current HTTP request; refuse a caller without a key, who owns nothing, with a log line.

    Raises:
        RequestError: The server has the admin key alone, and the caller does not have it.
    """
    who = caller()
    if not who.is_admin and not who.hashed:
        error = _key_needed()
        path = request.url_rule.rule if request.url_rule else ""
        logger.info("request", status=error.status, error=error.code, method=request.method, path=path)
        raise error
    return who


def check_admin() -> None:
    """Refuse a caller without the admin key, unless the server has no keys at all. The route writes the log line.

    Raises:
        RequestError: The caller is somebody else.
    """
    who = caller()
    if who.is_admin:
        return
    if not who.hashed:
        raise _key_needed()
    message = "Only the admin key may do this: start the server with --admin-key (MINISGL_ADMIN_KEY) and send that key."
    raise RequestError(message, code="admin_key_needed", status=403)


def _key_needed() -> RequestError:
    message = "This needs the admin key (--admin-key): send `Authorization: Bearer KEY`."
    return RequestError(message, code="invalid_api_key", status=401)
