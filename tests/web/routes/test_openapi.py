"""The document says of every route what it takes, by the models that validate it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support.web_site import Site, site

from web.routes.openapi import METHODS, PATHS

PAGE = Path(__file__).parents[3] / "docs" / "http-api.md"


PAGES = Path(__file__).parents[1] / "pages"


async def document(redis_url: str) -> tuple[dict[str, Any], set[tuple[str, str]]]:
    """Return the document, and what the application really has: (path, method)."""
    async with site(redis_url, ready=False, pages=PAGES) as here:
        response = await here.client.get("/openapi.json")
        assert response.status_code == 200 and response.content_type == "application/json"
        routes = {
            (rule.rule.replace("<path:", "{").replace("<", "{").replace(">", "}"), method)
            for rule in here.app.url_map.iter_rules()
            for method in (rule.methods or set()) & set(METHODS)
            if rule.rule not in PATHS
        }
        return json.loads(await response.get_data(as_text=True)), routes


async def test_every_route_is_in_the_document_but_those_that_are_not_there(redis_url: str) -> None:
    told, routes = await document(redis_url)
    assert {(path, method.upper()) for path, methods in told["paths"].items() for method in methods} == routes
    assert ("/v1/chat/completions", "POST") in routes and ("/v1/requests/{name}/events", "GET") in routes


async def test_every_route_is_on_the_page_of_endpoints_and_no_other(redis_url: str) -> None:
    _, routes = await document(redis_url)
    table = PAGE.read_text().partition("## Requests and their ids")[0]
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", table)) | set(
        re.findall(r"`(/v1/(?:de)?tokenize)`", table)
    )
    assert {re.sub(r"<\w+>", "{name}", path) for path in named} == {path for path, _ in routes}


async def test_a_body_is_told_by_the_model_that_reads_it(redis_url: str) -> None:
    told, _ = await document(redis_url)
    body = told["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = told["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert schema["required"] == ["prompt"]
    assert schema["properties"]["top_p"]["anyOf"][0] == {"minimum": 0, "maximum": 1, "type": "number"}
    (stop,) = [one for one in schema["properties"]["stop"]["anyOf"] if one.get("type") != "null"]
    assert {"type": "string"} in stop["anyOf"], "also what is read in another form than it is kept in"
    assert "-1 and 0 mean all" in schema["properties"]["top_k"]["description"]


async def test_every_property_of_a_body_has_a_description(redis_url: str) -> None:
    told, _ = await document(redis_url)
    schemas = {name: schema for name, schema in told["components"]["schemas"].items() if not name.endswith("Error")}
    assert {"ChatRequest", "CompletionRequest", "SGLangRequest", "SGLangSampling", "Message", "Tool"} <= set(schemas)
    for name, schema in schemas.items():
        for property_name, property_ in schema.get("properties", {}).items():
            description = property_.get("description", "")
            assert description.endswith("."), f"{name}.{property_name}: {description!r}"


async def test_every_error_has_the_shape_of_its_dialect_and_no_reference_leads_nowhere(redis_url: str) -> None:
    told, _ = await document(redis_url)
    references = {part.split('"')[0] for part in json.dumps(told).split("#/components/schemas/")[1:]}
    assert references <= set(told["components"]["schemas"])
    for path, methods in told["paths"].items():
        model = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        for operation in methods.values():
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert error == {"$ref": f"#/components/schemas/{model}"}


async def test_the_page_needs_no_network(bare: Site) -> None:
    response = await bare.client.get("/docs")
    page = await response.get_data(as_text=True)
    assert response.content_type == "text/html; charset=utf-8"
    assert "http://" not in page and "https://" not in page and "//cdn" not in page
    assert 'fetch("/openapi.json")' in page
