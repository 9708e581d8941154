"""GET /v1/models and /v1/models/<id>: the models that the engines serve."""

from __future__ import annotations

from quart import Blueprint, Response

from web.live.frontend import Frontend
from web.routes.answers import json_response
from web.routes.operations import operation


def model_routes(frontend: Frontend, created_s: int) -> Blueprint:
    routes = Blueprint("models", __name__)

    def described(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "minisgl",
            "root": frontend.readiness.models[0],
            "parent": None,
            "max_model_len": frontend.readiness.context,
            "has_chat_template": frontend.readiness.has_chat_template,
        }

    @routes.get("/models")
    @routes.get("/v1/models")
    @operation("The served models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [described(name) for name in frontend.readiness.models]})

    @routes.get("/models/<path:name>")
    @routes.get("/v1/models/<path:name>")
    @operation("One served model")
    async def model(name: str) -> Response:
        return json_response(described(frontend.readiness.resolve(name)))

    return routes
