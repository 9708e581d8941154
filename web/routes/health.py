"""GET /health, /v1: the process is alive. /ready: a request would be answered; else what is waited for. /version."""

from __future__ import annotations

from quart import Blueprint, Response

from pipeline import VERSION
from web.answers import json_response
from web.frontend import Frontend


def health_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("health", __name__)

    @routes.get("/health")
    @routes.get("/v1")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @routes.get("/version")
    async def version() -> Response:
        return json_response({"version": VERSION})

    @routes.get("/ready")
    async def ready() -> Response:
        waiting_for = frontend.readiness.waiting_for
        status = "draining" if frontend.draining else "loading" if waiting_for else "ready"
        body = {"status": status, "waiting_for": waiting_for, "stages": frontend.readiness.stages()}
        return json_response(body, 200 if status == "ready" else 503)

    return routes
