"""Who may do what: each key its own requests, and the admin key everything. `web.keys` says who has which key."""

from __future__ import annotations

import structlog
from quart import g, request

from pipeline.errors import RequestError
from web.keys import Caller

logger = structlog.get_logger()


def caller() -> Caller:
    """Return who has sent the current HTTP request."""
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
