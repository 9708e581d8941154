"""The description of a route, beside its code, and GET /openapi.json, which is made from all of them, with the models
that validate requests.

Also the paths of OpenAI's API and its relatives that this server lacks: 404 with a sentence that says so, not 501,
after which most client libraries try again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from quart import Blueprint, Quart, Response, current_app, request

from pipeline import VERSION
from pipeline.errors import RequestError
from web.routes.answers import error_response, json_response
from web.wire.endpoints import MESSAGES_ENDPOINT

F = TypeVar("F", bound=Callable[..., Any])

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_ATTRIBUTE: Final = "__operation__"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route."""

    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    """The models of the request body: one of them reads it. None: there is no body."""
    body_is_optional: bool = False
    answers: tuple[str, ...] = (JSON,)
    """The content types of an answer that is not an error."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Query parameter -> its JSON Schema, with a description."""
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Request header -> its JSON Schema, with a description."""
    not_ready: bool = False
    """503 is an answer, not an error: its body has the status."""


def operation(summary: str, *bodies: type[BaseModel], **more: Any) -> Callable[[F], F]:
    """Attach a description to a view function, which stays as it is. *more* as in Operation."""
    described = Operation(summary, bodies, **more)

    def say(view: F) -> F:
        setattr(view, _ATTRIBUTE, described)
        return view

    return say


def operation_of(view: Callable[..., Any]) -> Operation | None:
    """Return the description of *view*; None if it has none."""
    found: Operation | None = getattr(view, _ATTRIBUTE, None)
    return found


REFERENCE: Final = "#/components/schemas/{model}"
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_PARAMETER: Final = re.compile(r"<(?:\w+:)?(\w+)>")

ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""The shape of every error .."""
ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "additionalProperties": False,
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
""".. but on /v1/messages."""


def docs_routes() -> Blueprint:
    routes = Blueprint("docs", __name__)

    @routes.get("/openapi.json")
    @operation("The OpenAPI document of this server")
    async def document() -> Response:
        return json_response(openapi(current_app))

    return routes


def openapi(app: Quart) -> dict[str, Any]:
    """Return the document, OpenAPI 3.1, of the routes of *app*; routes without a description are left out."""
    operations: list[tuple[str, str, Operation]] = []
    for rule in app.url_map.iter_rules():
        described = operation_of(app.view_functions[rule.endpoint])
        if described is not None:
            operations += [(rule.rule, method, described) for method in METHODS if method in (rule.methods or ())]
    operations.sort(key=lambda each: (each[0], METHODS.index(each[1])))
    models: dict[type[BaseModel], None] = dict.fromkeys(
        body for _, _, described in operations for body in described.bodies
    )
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, described in operations:
        paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})[method.lower()] = _operation(path, method, described)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "MiniSGL",
            "version": VERSION,
            "description": "An LLM serving engine whose memory is a log. Its API is OpenAI's, with additions.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, method: str, described: Operation) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]
    for where, names in (("query", described.query), ("header", described.headers)):
        parameters += [
            {"name": name, "in": where, "description": schema["description"], "schema": {"type": "string", **schema}}
            for name, schema in names.items()
        ]
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": described.summary,
        "parameters": parameters,
        "responses": {"200": _answer("Success.", described.answers), "default": _error(path)},
    }
    if described.not_ready:
        found["responses"]["503"] = _answer("Not ready; the body says what is missing.", described.answers)
    if described.bodies:
        references = [{"$ref": REFERENCE.format(model=body.__name__)} for body in described.bodies]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        found["requestBody"] = {"required": not described.body_is_optional, "content": {JSON: {"schema": schema}}}
    return found


def _answer(description: str, content_types: tuple[str, ...]) -> dict[str, Any]:
    schemas: dict[str, Any] = {JSON: {"schema": {"type": ["object", "array"]}}, EVENTS: {}}
    content = {kind: schemas.get(kind, {"schema": {"type": "string"}}) for kind in content_types}
    return {"description": description, "content": content}


def _error(path: str) -> dict[str, Any]:
    model = "AnthropicError" if path.startswith(MESSAGES_ENDPOINT) else "Error"
    return {"description": "An error.", "content": {JSON: {"schema": {"$ref": REFERENCE.format(model=model)}}}}


_STORES: Final = (
    "assistants",
    "batches",
    "containers",
    "conversations",
    "evals",
    "files",
    "threads",
    "uploads",
    "vector_stores",
)
PATHS: Final = (
    "/v1/audio/<path:rest>",
    "/v1/embeddings",
    "/v1/fine_tuning/<path:rest>",
    "/v1/images/<path:rest>",
    "/v1/moderations",
    "/v1/realtime",
    "/v1/rerank",
    "/v1/score",
    "/api/chat",
    "/api/generate",
    *(f"/v1/{store}{what}" for store in _STORES for what in ("", "/<path:rest>")),
)


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
