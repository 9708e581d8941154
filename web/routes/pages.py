"""GET /, /pipeline, /requests/<uid>: the pages. GET /pages/<file>: their files. They hold no data and need no key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from quart import Blueprint, Response, request
from werkzeug.exceptions import NotFound

from web.http.page_files import PAGES, PageFile, read_page, read_pages
from web.routes.openapi import operation

NAME: Final = "pages"
"""Name of the blueprint whose paths need no key."""
HTML: Final = "text/html"
KINDS: Final = (HTML, "text/css", "text/javascript", "application/json", "image/svg+xml", "image/png", "text/plain")


def page_routes(folder: Path = PAGES) -> Blueprint:
    """Return the routes of the pages in *folder*."""
    routes = Blueprint(NAME, __name__)
    files = read_pages(folder)

    @routes.get("/")
    @operation("The playground, a page", answers=(HTML,))
    async def playground() -> Response:
        accepted = request.accept_mimetypes
        if accepted and not accepted["text/html"]:  # a client of the API at a wrong path
            raise NotFound
        return _page(files, "index.html")

    @routes.get("/pipeline")
    @operation("The pipeline live, a page", answers=(HTML,))
    async def live() -> Response:
        return _page(files, "pipeline.html")

    @routes.get("/requests/<path:name>")
    @operation("The timeline of a request, a page", answers=(HTML,))
    async def timeline(name: str) -> Response:  # a wrong name gets the page, too: the page says what is wrong
        return _page(files, "request.html")

    @routes.get("/pages/<path:name>")
    @operation("A file of the pages", answers=KINDS)
    async def file(name: str) -> Response:
        return _page(files, name)

    return routes


def docs_page_routes() -> Blueprint:
    """Return the route of the page that shows /openapi.json. It exists also without the other pages."""
    routes = Blueprint("docs_page", __name__)
    page = {"docs.html": read_page(PAGES / "docs.html")}

    @routes.get("/docs")
    @operation("A page that shows /openapi.json and can call its routes", answers=(HTML,))
    async def docs() -> Response:
        return _page(page, "docs.html")

    return routes


def _page(files: Mapping[str, PageFile], name: str) -> Response:
    """Return a file, or 304 to a browser that has it. Raises NotFound if there is none."""
    found = files.get(name)
    if found is None:
        raise NotFound
    if request.if_none_match.contains_weak(found.tag):
        return Response(status=304, headers=found.headers)
    return Response(found.content, content_type=found.content_type, headers=found.headers)
