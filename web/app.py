"""The Quart application: routes, keys, pages, body limits; and every error has the OpenAI error body."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import structlog
from quart import Quart, Request, Response, g, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, RequestTimeout, Unauthorized

from pipeline.errors import RequestError
from pipeline.metrics.families import HTTP_REQUESTS, HTTP_RESPONSES
from web.config import DEFAULT_BODY_BYTES
from web.http.asgi import OneTask
from web.http.connections import BODY_TIMEOUT_S, spread_s
from web.http.keys import Caller, Keys, keys_in
from web.http.origins import Origins, body_refusal, is_preflight
from web.http.page_files import PAGES
from web.live.frontend import Frontend
from web.routes.answers import error_response, is_anthropic, request_id
from web.routes.cache import cache_routes
from web.routes.dead import dead_letter_routes
from web.routes.generations import generation_routes
from web.routes.info import health_routes, info_routes, model_routes
from web.routes.listing import listing_routes
from web.routes.openapi import docs_routes, operation_of, unsupported_routes
from web.routes.pages import NAME as PAGES_NAME
from web.routes.pages import docs_page_routes, page_routes
from web.routes.pipeline import pipeline_routes
from web.routes.requests import replay_routes, request_routes
from web.routes.stored import stored_routes
from web.routes.stored_chats import stored_chat_routes
from web.routes.tokenizer import tokenizer_routes
from web.routes.usage import usage_routes
from web.wire.openai.errors import CODES

logger = structlog.get_logger()

PATH_SHOWN: Final = 256
"""Most characters of a path in a log line; a client may send thousands."""
OPEN_PATHS: Final = ("/health", "/ping", "/ready", "/health_generate", "/metrics", "/docs", "/openapi.json")
"""Paths that need no API key: probes and Prometheus have none, and the documentation is public."""
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_NO_KEY: Final = "This server needs an API key: send `Authorization: Bearer KEY`."
_WRONG_KEY: Final = "The API key is not one of this server; ask whoever runs it for a valid one."
_EXPIRED_KEY: Final = "The API key has expired; ask whoever runs this server for a new one."
_MESSAGES: Final = {
    401: "The API key was revoked, or has expired, before the body of the request arrived.",
    404: "There is nothing at this path; see /v1/models and /v1/chat/completions.",
    405: "This path does not take this method; see the Allow header.",
    408: f"The body did not arrive within {BODY_TIMEOUT_S} s.",
}


def create_app(
    frontend: Frontend,
    keys: Keys | None = None,
    *,
    origins: Origins | None = None,
    max_body_bytes: int = DEFAULT_BODY_BYTES,
    pages: Path | None = PAGES,
) -> Quart:
    """Return the application of *frontend*; with *keys*, it answers only requests that have one of them.

    *origins*: the web pages that may send requests, and the names by which they may call the server. *pages*: the
    folder of its own pages; None: it has none.
    """
    messages = _MESSAGES | {413: f"The body is larger than {max_body_bytes} bytes (--max-body-bytes)."}
    keys = keys or Keys()
    origins = origins or Origins()
    app = Quart(__name__, static_folder=None)
    app.request_class = _Request
    app.asgi_http_class = OneTask
    app.config |= {
        "RESPONSE_TIMEOUT": None,  # Quart's 60 s would cut a stream without a word
        "BODY_TIMEOUT": None,  # `_Request` has its own timeout
        "MAX_CONTENT_LENGTH": max_body_bytes,
    }
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    for routes in (
        generation_routes(frontend),
        request_routes(frontend),
        model_routes(frontend, int(time.time())),
        info_routes(frontend),
        health_routes(frontend),
        cache_routes(frontend),
        docs_routes(),
        docs_page_routes(),
        *([page_routes(pages)] if pages is not None else []),
        tokenizer_routes(frontend),
        pipeline_routes(frontend, keys),
        listing_routes(frontend),
        usage_routes(frontend),
        stored_routes(frontend),
        stored_chat_routes(frontend),
        replay_routes(frontend),
        dead_letter_routes(frontend),
        unsupported_routes(),
    ):
        app.register_blueprint(routes)

    @app.before_request
    async def count_request() -> None:
        frontend.measures.add(HTTP_REQUESTS, *_route_and_method())

    _guard(app, keys, origins)

    @app.errorhandler(RequestError)
    async def refused(error: RequestError) -> Response:
        return error_response(error)

    @app.errorhandler(HTTPException)
    async def refused_by_quart(error: HTTPException) -> Response:
        status = error.code or 500
        _log_line(status)
        response = error_response(RequestError(messages.get(status, error.name), status=status))
        allowed = getattr(error, "valid_methods", None)  # of 405, which must list them
        if allowed:
            response.headers["Allow"] = ", ".join(sorted(allowed))
        return response

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        logger.error("handler_failed", method=request.method, path=request.path[:PATH_SHOWN], exc_info=error)
        _log_line(500)
        return error_response(RequestError("The server failed on this request; that is our bug.", status=500))

    @app.after_request
    async def open_to_page(response: Response) -> Response:  # the first here is the last to run
        origins.open_to(request.headers.get("origin"), response.headers)
        return response

    @app.after_request
    async def drop_body(response: Response) -> Response:
        request.body.clear()  # its client has left, and the answer may have no end
        return response

    @app.after_request
    async def count_response(response: Response) -> Response:
        frontend.measures.add(HTTP_RESPONSES, *_route_and_method(), str(response.status_code))
        return response

    @app.after_request
    async def add_request_id(response: Response) -> Response:
        response.headers["x-request-id"] = request_id()
        if is_anthropic():
            response.headers["request-id"] = request_id()
        return response

    return app


def _guard(app: Quart, keys: Keys, origins: Origins) -> None:
    """Before any route, refuse requests without a key of *keys*, and those of foreign pages, by *origins*."""

    @app.before_request
    async def answer_preflight() -> Response | None:
        """Tell a browser whether a page may send a request. The browser does not send a key with that question."""
        if not is_preflight(request.method, request.headers):
            return None
        _refuse(origins.preflight_refusal(request.headers))
        return Response(status=204, headers=origins.preflight(request.headers))

    @app.before_request
    async def check_key() -> None:
        """Set `g.caller` by the key of the request. Raises RequestError if a key is needed and missing."""
        given = keys_in(request.scope["headers"])
        found = keys.find(given)
        g.caller, g.keys = found or Caller(), keys
        if found is None and not _is_open():
            unknown = _EXPIRED_KEY if keys.had(given) else _WRONG_KEY
            _refuse(RequestError(unknown if any(given) else _NO_KEY, status=401))

    @app.before_request
    async def check_page() -> None:
        """Refuse a request that a foreign web page may have sent. Raises RequestError."""
        if not g.caller.hashed:
            own_address = str((request.server or ("",))[0])
            _refuse(origins.refusal(request.headers, own_address, is_open=_is_open()))
        described = operation_of(app.view_functions[request.endpoint]) if request.endpoint else None
        if described is not None and described.bodies and request.method == "POST":
            _refuse(body_refusal(request.headers))


def _is_open() -> bool:
    return request.path.rstrip("/") in OPEN_PATHS or request.blueprint == PAGES_NAME


def _refuse(error: RequestError | None) -> None:
    """Write the log line of *error* and raise it, if there is one."""
    if error is not None:
        _log_line(error.status, error.code)
        raise error


def _log_line(status: int, code: str | None = None) -> None:
    """Write the log line of a request that no route took or could answer."""
    path = request.path[:PATH_SHOWN]
    logger.info("request", status=status, error=code or CODES.get(status), method=request.method, path=path)


def _route_and_method() -> tuple[str, str]:
    """Return the route and the method, never the path itself: labels of metrics have few values."""
    rule = request.url_rule.rule if request.url_rule else "unknown"
    return rule, request.method if request.method in METHODS else "unknown"


class _Request(Request):
    async def get_data(  # type: ignore[override]  # Quart has a signature for each kind of result
        self, cache: bool = True, as_text: bool = False, parse_form_data: bool = False
    ) -> str | bytes:
        """As Quart's, which waits in `asyncio.wait_for`: in Python 3.11 that swallows the cancellation of a client that
        leaves as the last of its body comes, and the client would be answered for ever."""
        assert not cache, "the body is given once: pass cache=False"
        try:
            async with asyncio.timeout(spread_s(BODY_TIMEOUT_S)):
                body = await super().get_data(cache, as_text, parse_form_data)
            if not g.keys.has(g.caller):  # the body may have taken long
                raise Unauthorized
            return body
        except TimeoutError:
            raise RequestTimeout from None
        except RequestEntityTooLarge as error:  # the body refers to it, so its traceback would keep the body alive
            raise RequestEntityTooLarge from error.with_traceback(None)
        finally:
            self.body.clear()  # cancelled timers keep the request alive for a while
