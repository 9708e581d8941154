"""GET /metrics, for Prometheus. It needs no key, as in vLLM: Prometheus has none."""

from __future__ import annotations

from quart import Blueprint, Response

from web.live.frontend import Frontend
from web.live.metrics import CONTENT_TYPE, Exposition
from web.routes.operations import operation


def metrics_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("metrics", __name__)
    exposition = Exposition(frontend)

    @routes.get("/metrics")
    @operation("Measures of every process, for Prometheus", answers=("text/plain",))
    async def metrics() -> Response:
        return Response(await exposition.text(), content_type=CONTENT_TYPE)

    return routes
