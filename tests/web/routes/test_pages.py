"""The pages over HTTP: which path shows which, with which headers, to whom; and that nothing else of the disk comes."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from support.stand_in_stages import StandIn
from support.web_process import serving
from support.web_site import Site, code_of, site

from web.http.keys import read_keys
from web.http.page_files import POLICY, policy_of

PATHS = {
    "/": "index.html",
    "/pipeline": "pipeline.html",
    "/requests/019aaf3e8b7c7000800000000000abcd": "request.html",
    "/requests/<script>": "request.html",
    "/requests/a/b": "request.html",
    "/pages/app.js": "app.js",
    "/pages/vendor/LICENSE": "vendor/LICENSE",
}
KEY = "sk-page"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pages whose content is their name, and a secret beside them."""
    (tmp_path / "secret.txt").write_text("secret")
    for name in PATHS.values():
        path = tmp_path / "pages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "pages"


@pytest.fixture
def here(redis_url: str, folder: Path) -> AbstractAsyncContextManager[Site]:
    return site(redis_url, ready=False, pages=folder)


async def test_each_path_shows_its_file_to_anybody_with_all_headers(redis_url: str, folder: Path) -> None:
    async with site(redis_url, ready=False, pages=folder, keys=read_keys([KEY], "")) as here:
        for path, name in PATHS.items():
            response = await here.client.get(path)
            assert (response.status_code, await response.get_data(as_text=True)) == (200, name), path
            told = {
                "Content-Security-Policy": policy_of(POLICY),
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-cache",
            }
            assert {name: response.headers.get(name) for name in told} == told
            head = await here.client.head(path)
            assert (head.status_code, head.headers["ETag"]) == (200, response.headers["ETag"])
            assert head.headers["Content-Length"] == str(len(name))


async def test_a_browser_that_has_a_file_is_not_sent_it_again(here: Site, folder: Path) -> None:
    tag = (await here.get("/pages/app.js")).headers["ETag"]
    for known, status in ((tag, 304), (f'"x", W/{tag}', 304), ("*", 304), ('"x"', 200)):
        response = await here.get("/pages/app.js", **{"If-None-Match": known})
        assert response.status_code == status, known
        assert response.headers["ETag"] == tag and "Content-Security-Policy" in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/pages/../secret.txt",
        "/pages/..%2fsecret.txt",
        "/pages/%2e%2e/secret.txt",
        "/pages//etc/passwd",
        "/pages/vendor/../../secret.txt",
        "/pages/..\\secret.txt",
        "/pages/app.js/",
        "/pages/app.js%00",
        "/pages/vendor",
        "/pages/",
        "/pages",
    ],
)
async def test_nothing_but_the_files_of_the_folder_is_sent(here: Site, folder: Path, path: str) -> None:
    assert await code_of(here.get(path)) == (404, "not_found")


async def test_a_client_of_the_api_at_the_wrong_path_is_told_so_and_no_page(here: Site, folder: Path) -> None:
    for accepted, status in (
        ("application/json", 404),
        ("text/event-stream, application/json;q=0.9", 404),
        ("*/*", 200),
        ("text/html,application/xhtml+xml,*/*;q=0.8", 200),
    ):
        assert (await here.get("/", accept=accepted)).status_code == status, accepted
    client: Any = here.client
    assert await code_of(client.post("/", json={})) == (405, "method_not_allowed")


async def test_without_pages_their_paths_are_not_there_and_the_documentation_is(bare: Site) -> None:
    for path in PATHS:
        assert await code_of(bare.get(path)) == (404, "not_found")
    response = await bare.get("/docs")
    assert response.status_code == 200 and "sha256-" in response.headers["Content-Security-Policy"]


async def test_a_page_that_is_missing_is_not_found(redis_url: str, tmp_path: Path) -> None:
    async with site(redis_url, ready=False, pages=tmp_path) as here:
        assert await code_of(here.get("/pipeline")) == (404, "not_found")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "status"), [pytest.param((), 200, marks=pytest.mark.night), (("--pages", "no"), 404)]
)
def test_a_flag_turns_the_pages_off(redis_url: str, stand_in: StandIn, flags: tuple[str, ...], status: int) -> None:
    with serving(redis_url, *flags) as server:
        assert server.status("/pages/docs.html") == status and server.status("/docs") == 200
