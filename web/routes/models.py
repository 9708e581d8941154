"""GET /v1/models and /v1/models/<id>: the models that the engines serve; and the same as other servers say it."""

from __future__ import annotations

from quart import Blueprint, Response

from pipeline import VERSION
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

    @routes.get("/get_model_info")
    @operation("The served model, in SGLang's words")
    async def model_info() -> Response:
        readiness = frontend.readiness
        name = readiness.resolve(None)
        return json_response(
            {
                "model_path": name,
                "tokenizer_path": name,
                "is_generation": True,
                "preferred_sampling_params": dict(readiness.sampling_defaults) or None,
            }
        )

    @routes.get("/get_server_info")
    @operation("The server and its model, in SGLang's words")
    async def server_info() -> Response:
        readiness = frontend.readiness
        return json_response(
            {
                "model_path": readiness.resolve(None),
                "served_model_name": readiness.models[0],
                "context_length": readiness.context,
                "max_queued_requests": frontend.log.limits.max_queued,
                "status": "ready" if not readiness.waiting_for else "loading",
                "version": VERSION,
            }
        )

    @routes.get("/props")
    @operation("The server and its model, in llama.cpp's words")
    async def props() -> Response:
        readiness = frontend.readiness
        return json_response(
            {
                "model_path": readiness.resolve(None),
                "default_generation_settings": {
                    "n_ctx": readiness.context,
                    "params": dict(readiness.sampling_defaults),
                },
                "total_slots": frontend.log.limits.max_queued,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"minisgl {VERSION}",
            }
        )

    return routes
