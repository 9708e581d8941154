"""GET /openapi.json, made from the models that validate requests. GET /docs: a page that shows it, offline."""

from __future__ import annotations

from importlib.resources import files

from quart import Blueprint, Response, current_app

from web.routes.answers import json_response
from web.routes.openapi import openapi
from web.routes.operations import operation


def docs_routes() -> Blueprint:
    routes = Blueprint("docs", __name__)
    page = files("web").joinpath("static", "docs.html").read_bytes()

    @routes.get("/openapi.json")
    @operation("The OpenAPI document of this server")
    async def document() -> Response:
        return json_response(openapi(current_app))

    @routes.get("/docs")
    @operation("A page that shows this document and can call its routes", answers=("text/html",))
    async def docs() -> Response:
        return Response(page, content_type="text/html; charset=utf-8")

    return routes
