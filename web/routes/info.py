"""What the server is, serves and does: GET /v1/models and /v1/models/<id>; /health, /ping, /v1 (the process is alive),
/ready (requests are answered, or what is missing), /version, /health_generate as in SGLang (a token goes through every
stage now), and /metrics for Prometheus.

And the model and the server as SGLang and llama.cpp describe them, for clients that were made for those. `/server_info`
is SGLang's newer name. Its newer `/model_info` is missing on purpose: its benchmark would load a tokenizer by that
answer, and the name of a served model may be neither a folder nor a name of the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quart import Blueprint, Response, request

from pipeline import VERSION
from pipeline.metrics.counters import read_snapshot
from pipeline.metrics.families import CACHE_CONFIG, GENERATION_SPEED, KV_CACHE_USAGE, NUM_RUNNING, NUM_WAITING, Family
from pipeline.names import PROBE
from pipeline.stage.slots import Status
from web.http.acceptor import ALIVE
from web.live.frontend import Frontend
from web.live.metrics import CONTENT_TYPE, Exposition
from web.routes.access import caller
from web.routes.answers import json_response
from web.routes.openapi import operation

LOADS: Final[Mapping[str, Family]] = {
    "num_running_reqs": NUM_RUNNING,
    "num_queue_reqs": NUM_WAITING,
    "token_usage": KV_CACHE_USAGE,
    "last_gen_throughput": GENERATION_SPEED,
}
"""The load and the speed of an engine. Its snapshot leaves out zeros."""


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
                "served_model_name": readiness.resolve(None),
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


def model_routes(frontend: Frontend, created_s: int) -> Blueprint:
    routes = Blueprint("models", __name__)

    def described(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "minisgl",
            "root": frontend.readiness.resolve(None),
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


def health_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("health", __name__)
    exposition = Exposition(frontend)

    @routes.get("/health")
    @routes.get("/ping")
    @routes.get("/v1")
    @operation("200 while this process is alive")
    async def health() -> Response:
        return json_response(ALIVE)

    @routes.get("/version")
    @operation("The version of the server, and how its engines compute")
    async def version() -> Response:
        return json_response({"version": VERSION, "engines": frontend.readiness.engines()})

    @routes.get("/ready")
    @operation(
        "200 once a token has gone through every stage; with ?for=requests, while requests are taken", not_ready=True
    )
    async def ready() -> Response:
        waiting_for = frontend.readiness.waiting_for
        if request.args.get("for") == "requests" and frontend.readiness.takes_requests:
            waiting_for = ()
        status = "draining" if frontend.draining else "loading" if waiting_for else "ready"
        body: dict[str, object] = {"status": status, "waiting_for": waiting_for}
        if PROBE in waiting_for and frontend.readiness.probe_failure:
            body["detail"] = frontend.readiness.probe_failure
        body["stages"] = frontend.readiness.stages()
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
        return Response(await exposition.text(is_admin=caller().is_admin), content_type=CONTENT_TYPE)

    return routes
