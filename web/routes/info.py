"""The model and the server as SGLang and llama.cpp describe them, for clients that were made for those."""

from __future__ import annotations

from quart import Blueprint, Response

from pipeline import VERSION
from web.live.frontend import Frontend
from web.routes.answers import json_response
from web.routes.operations import operation


def info_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("info", __name__)
    readiness, max_queued = frontend.readiness, frontend.log.limits.max_queued

    @routes.get("/get_model_info")
    @operation("The served model, in SGLang's words")
    async def model_info() -> Response:
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
        return json_response(
            {
                "model_path": readiness.resolve(None),
                "served_model_name": readiness.models[0],
                "context_length": readiness.context,
                "max_queued_requests": max_queued,
                "status": "ready" if not readiness.waiting_for else "loading",
                "version": VERSION,
            }
        )

    @routes.get("/props")
    @operation("The server and its model, in llama.cpp's words")
    async def props() -> Response:
        return json_response(
            {
                "model_path": readiness.resolve(None),
                "default_generation_settings": {
                    "n_ctx": readiness.context,
                    "params": dict(readiness.sampling_defaults),
                },
                "total_slots": max_queued,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"minisgl {VERSION}",
            }
        )

    return routes
