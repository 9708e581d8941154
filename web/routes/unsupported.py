"""Paths of OpenAI's API and its relatives that this server lacks: 404 with a sentence that says so.

Not 501, after which most client libraries try again.
"""

from __future__ import annotations

from typing import Final

from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from web.routes.answers import error_response

PATHS: Final = (
    "/v1/audio/<path:rest>",
    "/v1/assistants",
    "/v1/batches",
    "/v1/embeddings",
    "/v1/files",
    "/v1/fine_tuning/jobs",
    "/v1/images/<path:rest>",
    "/v1/messages",
    "/v1/moderations",
    "/v1/realtime",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v1/threads",
    "/v1/vector_stores",
    "/api/chat",
    "/api/generate",
)
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


def unsupported_routes() -> Blueprint:
    routes = Blueprint("unsupported", __name__)

    async def unsupported(rest: str = "") -> Response:
        return error_response(
            RequestError(
                f"This server does not have {request.url_rule.rule.partition('<')[0] if request.url_rule else ''}; "
                "see /v1/chat/completions and /v1/models.",
                code="not_implemented",
                status=404,
            )
        )

    for path in PATHS:
        routes.add_url_rule(path, view_func=unsupported, methods=METHODS, provide_automatic_options=False)
    return routes
