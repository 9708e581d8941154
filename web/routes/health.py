"""GET /health, /ping, /v1: the process is alive. /ready: requests are answered, or what is missing. /version.
/health_generate, as in SGLang: a token goes through every stage now. /metrics, for Prometheus.
"""

from __future__ import annotations

from quart import Blueprint, Response

from pipeline import VERSION
from pipeline.names import PROBE
from web.live.frontend import Frontend
from web.live.metrics import CONTENT_TYPE, Exposition
from web.routes.answers import json_response
from web.routes.operations import operation


def health_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("health", __name__)
    exposition = Exposition(frontend)

    @routes.get("/health")
    @routes.get("/ping")
    @routes.get("/v1")
    @operation("200 while this process is alive")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @routes.get("/version")
    @operation("The version of the server, and how its engines compute")
    async def version() -> Response:
        return json_response({"version": VERSION, "engines": frontend.readiness.engines()})

    @routes.get("/ready")
    @operation("200 once a token has gone through every stage", not_ready=True)
    async def ready() -> Response:
        waiting_for = frontend.readiness.waiting_for
        status = "draining" if frontend.draining else "loading" if waiting_for else "ready"
        body = {"status": status, "waiting_for": waiting_for, "stages": frontend.readiness.stages()}
        return json_response(body, 200 if status == "ready" else 503)

    @routes.get("/health_generate")
    @operation("200 if a token goes through every stage now; takes at most 6 s", not_ready=True)
    async def health_generate() -> Response:
        readiness = frontend.readiness
        if frontend.draining or readiness.missing:
            status, waiting_for, detail = "draining" if frontend.draining else "loading", readiness.missing, ""
        else:
            detail = await readiness.try_now(frontend.spawn)
            status, waiting_for = ("failing", (PROBE,)) if detail else ("ok", ())
        body = {"status": status, "waiting_for": waiting_for, "detail": detail}
        return json_response(body, 200 if status == "ok" else 503)

    @routes.get("/metrics")
    @operation("Measures of every process, for Prometheus", answers=("text/plain",))
    async def metrics() -> Response:
        return Response(await exposition.text(), content_type=CONTENT_TYPE)

    return routes
