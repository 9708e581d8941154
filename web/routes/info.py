"""The model and the server as SGLang and llama.cpp describe them, for clients that were made for those.

`/server_info` is SGLang's newer name. Its newer `/model_info` is missing on purpose: its benchmark would load a
tokenizer by that answer, and the name of a served model may be neither a folder nor a name of the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quart import Blueprint, Response

from pipeline import VERSION
from pipeline.metrics.counters import read_snapshot
from pipeline.metrics.families import CACHE_CONFIG, GENERATION_SPEED, KV_CACHE_USAGE, NUM_RUNNING, NUM_WAITING, Family
from pipeline.stage.slots import Status
from web.live.frontend import Frontend
from web.routes.answers import json_response
from web.routes.operations import operation

LOADS: Final[Mapping[str, Family]] = {
    "num_running_reqs": NUM_RUNNING,
    "num_queue_reqs": NUM_WAITING,
    "token_usage": KV_CACHE_USAGE,
    "last_gen_throughput": GENERATION_SPEED,
}
"""What an engine has to do now, and how fast it was. Zeros are left out of its snapshot."""


def internal_state(status: Status) -> dict[str, Any]:
    """Return what SGLang tells of a scheduler, and calls so in its metrics, of an engine with this *status*.

    What an engine does not publish, or has not yet, is left out.
    """
    readings = read_snapshot(status.metrics)
    told: dict[str, Any] = {
        "slot": status.slot,
        "model_path": status.models[0] if status.models else "",
        "context_length": status.context,
    }
    for page_size, _, _, num_pages in readings.get(CACHE_CONFIG, {}):
        told |= {"page_size": int(page_size), "memory_usage": {"token_capacity": int(page_size) * int(num_pages)}}
        told |= {name: readings.get(family, {}).get((), 0) for name, family in LOADS.items()}
    return told


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

    @routes.get("/server_info")
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
                "internal_states": [internal_state(status) for status in readiness.ready_engines],
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
