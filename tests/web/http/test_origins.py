"""What a web page may do: which headers let a request in, what a preflight is answered, and what the flags allow.

`test_browser.py` has a real browser try it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.selection import by_night
from support.stand_in_stages import StandIn
from support.web_site import CHAT, away, chat, error_of, request_lines, site

import web.routes.cache
from ops.serve.command import _check_origins
from ops.serve.config import parse_command
from pipeline.errors import ConfigError
from web.app import OPEN_PATHS
from web.config import OriginConfig, WebStageConfig
from web.http.keys import read_keys
from web.http.origins import Origins, read_origins

KEY = "sk-ann-0123456789"
PAGE = "https://chat.example.com"
EVIL = "http://evil.test"
JSON = {"content-type": "application/json"}
FORM = {"content-type": "application/x-www-form-urlencoded"}
LET_IN = 400
"""The status of a request that came to its route: its body is not JSON."""
OPEN_PAGES = ("/", "/pipeline", "/requests/<path:name>", "/pages/<path:name>")
OWN_ADDRESS = "10.1.2.3"


def allowed(*origins: str, hosts: tuple[str, ...] = (), host: str = "127.0.0.1") -> Origins:
    """Return what the flags allow on a server that listens on *host*."""
    return read_origins(OriginConfig(allow_host=hosts, allow_origin=origins), host)


@asynccontextmanager
async def client_of(tmp_path: Path, origins: Origins | None = None, *, has_key: bool = False) -> AsyncIterator[Any]:
    async with away(tmp_path, keys=read_keys([KEY], "") if has_key else None, origins=origins) as there:
        yield there.client


@pytest.fixture
def client(tmp_path: Path) -> AbstractAsyncContextManager[Any]:
    """One of a server without flags."""
    return client_of(tmp_path)


async def status(client: Any, method: str, path: str, headers: dict[str, str], address: str = "") -> int:
    """Return the status of a request to the server at *address*; its body is no JSON."""
    given = {"scope_base": {"server": (address, 1919)}} if address else {}
    body = {"data": b"{"} if method == "POST" else {}
    response = await client.open(path, method=method, headers=headers, **body, **given)
    return int(response.status_code)


# without keys


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        # no browser
        ({}, LET_IN),
        (FORM, LET_IN),
        (JSON | {"sec-fetch-site": "none"}, LET_IN),
        # a page of this server, behind a proxy for HTTPS or not
        (JSON | {"origin": "http://localhost", "sec-fetch-site": "same-origin"}, LET_IN),
        (JSON | {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, LET_IN),
        (JSON | {"host": "[::1]:8000", "origin": "http://[::1]:8000"}, LET_IN),
        (JSON | {"host": "127.0.0.1:8443", "origin": "https://127.0.0.1:8443"}, LET_IN),
        # any other page
        (JSON | {"origin": EVIL}, 403),
        (JSON | {"origin": "null"}, 403),
        (JSON | {"origin": ""}, 403),
        (JSON | {"origin": "http://localhost:3000"}, 403),
        (JSON | {"origin": "http://localhost.evil.test"}, 403),
        (JSON | {"origin": "http://evil.test/localhost"}, 403),
        (JSON | {"origin": "file://localhost"}, 403),
        (JSON | {"origin": PAGE}, 403),
        (JSON | {"host": "127.0.0.1", "origin": "http://localhost"}, 403),
        (JSON | {"host": "", "origin": "http://"}, 403),
        (JSON | {"sec-fetch-site": "cross-site"}, 403),
        (JSON | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 403),
        # no form of any page, not even of its own
        ({"content-type": "text/plain", "origin": EVIL}, 403),
        (FORM | {"origin": "http://localhost"}, 415),
        ({"origin": "http://localhost"}, 415),
        # an unknown key changes nothing
        (JSON | {"origin": EVIL, "authorization": "Bearer none"}, 403),
    ],
)
async def test_a_request_of_a_foreign_page_is_refused(client: Any, headers: dict[str, str], expected: int) -> None:
    assert await status(client, "POST", CHAT, headers) == expected


JSON_TYPES = ("application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json")
OTHER_TYPES = (
    *("text/plain", "text/plain;charset=UTF-8", "text/plain; x=application/json", "multipart/form-data; boundary=x"),
    *("application/octet-stream", "application/jsonp", "text/json", "nonsense"),
)


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_body_says_that_it_is_json(tmp_path: Path, has_key: bool) -> None:
    async with client_of(tmp_path, has_key=has_key) as client:
        for given in (*JSON_TYPES, *OTHER_TYPES, "application/x-www-form-urlencoded", ""):
            headers = {"content-type": given, "authorization": f"Bearer {KEY}"}
            for path in (CHAT, "/completions", "/generate", "/tokenize", "/v1/detokenize", "/abort_request"):
                expected = 415 if given in OTHER_TYPES else LET_IN
                assert await status(client, "POST", path, headers) == expected, (given, path)


ALWAYS = ("localhost", "LOCALHOST:80", "127.0.0.1", "127.9.9.9:1", "[::1]:80", "")
OWN = (OWN_ADDRESS, f"{OWN_ADDRESS}:80", f"[::ffff:{OWN_ADDRESS}]")
NAMED = ("chat.example.com", "Chat.Example.com:443", "10.9.9.9", "[fd00::1]")
OTHERS = (
    *("evil.test", "evil.test:1919", "localhost.evil.test", "127.0.0.1.evil.test", "localhost@evil.test"),
    *("10.1.2.4", "[::2]", "1", "a b"),
)


@pytest.mark.parametrize(
    ("origins", "names"),
    [
        (allowed(), ()),
        (allowed(hosts=("Chat.example.com", "10.9.9.9", "FD00:0::1"), host="0.0.0.0"), NAMED),
        (allowed(host="0.0.0.0"), (*NAMED, *OTHERS)),
        (allowed(hosts=("*",)), (*NAMED, *OTHERS)),
    ],
    ids=["default", "named", "on all interfaces", "any"],
)
async def test_the_server_is_called_by_its_names(tmp_path: Path, origins: Origins, names: tuple[str, ...]) -> None:
    async with client_of(tmp_path, origins) as client:
        for host in (*ALWAYS, *OWN, *NAMED, *OTHERS):
            expected = LET_IN if host in (*ALWAYS, *OWN, *names) else 403
            headers = JSON | {"host": host}
            assert await status(client, "POST", CHAT, headers, OWN_ADDRESS) == expected, host
            own_page = headers | ({"origin": f"http://{host}"} if host else {})
            assert await status(client, "POST", CHAT, own_page, OWN_ADDRESS) == expected, host


async def test_the_name_that_it_listens_on_is_one_of_them(tmp_path: Path) -> None:
    async with client_of(tmp_path, allowed(host="GPU-box")) as client:
        assert await status(client, "POST", CHAT, {"host": "gpu-box:1919"}) == LET_IN
        assert await status(client, "POST", CHAT, {"host": "gpu-box.evil.test"}) == 403


REBOUND = {"host": "evil.test:1919", "sec-fetch-site": "same-origin"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
FRAME = LINK | {"sec-fetch-dest": "iframe"}
IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}


async def test_probes_may_use_any_name_and_links_lead_to_the_same_paths(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.routes.cache, "PATIENCE_S", 0.0)
    rules = [(method, str(rule)) for rule in client.app.url_map.iter_rules() for method in rule.methods or ()]
    tried = sorted({*rules, ("GET", "/nothing"), ("DELETE", CHAT), ("GET", "/flush_cache"), ("GET", "/health/")})
    for method, path in tried:
        is_open = path.rstrip("/") in OPEN_PATHS or path in OPEN_PAGES
        for headers in (REBOUND, LINK):
            assert (await status(client, method, path, headers) == 403) is not is_open, (method, path)
        for headers in ({"origin": EVIL}, *by_night((), (FRAME, IMAGE, {"origin": "null"}))):
            assert await status(client, method, path, headers) == 403, (method, path)
    page = await client.get("/docs", headers=LINK)
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"origin": EVIL}, ("Origin: `http://evil.test`", "`--allow-origin http://evil.test`", "MINISGL_ALLOW_ORIGIN")),
        ({"origin": "null"}, ("Origin: `null`", "Files and sandboxed pages", "`--allow-origin`")),
        ({"host": "evil.test:80"}, ("Host: `evil.test:80`", "`--allow-host NAME` (MINISGL_ALLOW_HOST)", "API keys")),
        (IMAGE, ("Sec-Fetch-Site: `cross-site`", "`--allow-origin URL`")),
        ({"content-type": "text/plain"}, ("Content-Type: `text/plain` given, expected `application/json`",)),
        ({"origin": "http://localhost"}, ("Content-Type: nothing given, expected `application/json`",)),
        ({"origin": "x" * 5000}, ("`" + "x" * 100 + "`",)),
    ],
)
async def test_a_refusal_says_what_was_seen_and_what_to_do_before_it_reads_the_body(
    client: Any, headers: dict[str, str], words: tuple[str, ...]
) -> None:
    with capture_logs() as lines:
        async with client.request(CHAT, method="POST", headers=headers) as connection:
            await connection.send(b"{")  # the rest of the body never comes
            async with asyncio.timeout(5):
                told = (await connection.receive()).decode()
    assert all(word in told for word in words), told
    assert len(told) < 700
    (line,) = request_lines(lines)
    assert line["error"] in told and (line["method"], line["path"]) == ("POST", CHAT)
    assert line["error"] in ("origin_not_allowed", "host_not_allowed", "unsupported_media_type")


# allowed pages


async def test_an_allowed_page_may_send_requests_and_read_answers_and_others_may_not(
    redis_url: str, stand_in: StandIn
) -> None:
    async with site(redis_url, origins=allowed(PAGE, "http://localhost:3000")) as here:
        for body in (chat(), chat(stream=True)):
            response = await here.post(body, headers={"origin": PAGE, "sec-fetch-site": "cross-site"})
            assert response.status_code == 200 and await response.get_data()
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            exposed = response.headers["Access-Control-Expose-Headers"].lower().split(", ")
            assert {"x-minisgl-uid", "x-request-id"} <= set(exposed)
            assert response.headers.getlist("Vary") == ["Origin"]
        uid = response.headers["x-minisgl-uid"]
        for path in ("/v1/embeddings", f"/v1/requests/{uid}/events", "/nothing"):
            response = await here.get(path, origin=PAGE)
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
        status, _ = await error_of(here.post(chat(), headers={"origin": EVIL}))
        assert status == 403
        for headers in ({"origin": EVIL}, {"origin": "null"}, {}):
            response = await here.post(chat(), headers=headers)
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"
    assert len(stand_in.requests()) == 3


ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/health", "/nothing", "/v1/embeddings"])
async def test_a_preflight_of_an_allowed_page_is_answered_without_a_key(
    tmp_path: Path, has_key: bool, path: str
) -> None:
    async with client_of(tmp_path, allowed(PAGE), has_key=has_key) as client:
        response = await client.open(path, method="OPTIONS", headers=ASKS | {"origin": PAGE})
        assert response.status_code == 204
        headers = response.headers
        assert headers["Access-Control-Allow-Origin"] == PAGE and headers["Vary"] == "Origin"
        assert headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        assert {"GET", "POST", "DELETE"} <= set(headers["Access-Control-Allow-Methods"].split(", "))
        assert int(headers["Access-Control-Max-Age"]) > 60
        assert "Access-Control-Allow-Private-Network" not in headers
        asks = ASKS | {"origin": PAGE, "access-control-request-private-network": "true"}
        response = await client.open(path, method="OPTIONS", headers=asks)
        assert response.headers["Access-Control-Allow-Private-Network"] == "true"
        for origin in (EVIL, "null", PAGE + ":8443", PAGE.replace("https", "http")):
            response = await client.open(path, method="OPTIONS", headers=ASKS | {"origin": origin})
            assert response.status_code == 403
            assert not {name for name, _ in response.headers if name.startswith("Access-Control")}


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("content-type", "content-type"),
        ("a,  b ,c", "a, b, c"),
        ("x-api-key, bad name, a;b, a\xe4", "x-api-key"),
        ("*", "*"),
        (",", None),
        ("", None),
    ],
)
async def test_headers_that_are_asked_for_are_allowed_if_they_are_names(
    tmp_path: Path, asked: str, answered: str | None
) -> None:
    async with client_of(tmp_path, allowed(PAGE)) as client:
        headers = ASKS | {"origin": PAGE, "access-control-request-headers": asked}
        response = await client.open(CHAT, method="OPTIONS", headers=headers)
        assert response.status_code == 204
        assert response.headers.get("Access-Control-Allow-Headers") == answered


async def test_without_the_flag_no_page_is_told_anything(client: Any) -> None:
    for method in ("GET", "OPTIONS"):
        response = await client.open("/health", method=method, headers={"origin": "http://localhost"})
        assert response.status_code == 200
        assert not {name for name, _ in response.headers if name.startswith("Access-Control") or name == "Vary"}
    assert await status(client, "OPTIONS", CHAT, ASKS | {"origin": PAGE}) == 403


async def test_any_page_may_come_where_the_flag_says_so(tmp_path: Path) -> None:
    async with client_of(tmp_path, allowed("*")) as client:
        for origin in (EVIL, "null"):
            for method, path, expected in (("POST", CHAT, LET_IN), ("OPTIONS", CHAT, 204)):
                response = await client.open(path, method=method, headers=JSON | ASKS | {"origin": origin}, data=b"{")
                assert response.status_code == expected
                assert response.headers["Access-Control-Allow-Origin"] == "*"
                assert "Vary" not in response.headers


# with keys


async def test_a_request_with_a_key_may_come_from_anywhere(tmp_path: Path) -> None:
    bearer = JSON | {"authorization": f"Bearer {KEY}"}
    async with client_of(tmp_path, has_key=True) as client:
        for headers in ({"origin": EVIL}, {"host": "chat.example.com"}, {"sec-fetch-site": "cross-site"}):
            assert await status(client, "POST", CHAT, bearer | headers) == LET_IN
            assert await status(client, "POST", CHAT, JSON | headers) == 401
            assert await status(client, "POST", CHAT, JSON | headers | {"x-api-key": "sk-wrong"}) == 401
        for path in OPEN_PATHS:
            assert await status(client, "GET", path, {"host": "chat.example.com"}) != 403
            assert await status(client, "GET", path, {"origin": EVIL}) == 403


async def test_an_allowed_page_can_read_that_its_key_is_wrong(tmp_path: Path) -> None:
    async with client_of(tmp_path, allowed(PAGE), has_key=True) as client:
        for headers in ({}, {"authorization": "Bearer sk-wrong"}):
            response = await client.post(CHAT, headers=JSON | headers | {"origin": PAGE}, data=b"{")
            assert response.status_code == 401
            assert response.headers["Access-Control-Allow-Origin"] == PAGE


# the flags


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("https://chat.example.com", "https://chat.example.com"),
        ("HTTPS://Chat.Example.com:443", "https://chat.example.com"),
        ("http://localhost:80", "http://localhost"),
        ("http://localhost:443", "http://localhost:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
        ("*", "*"),
    ],
)
def test_an_origin_is_read_as_browsers_write_it(given: str, meant: str) -> None:
    assert allowed(given).origins == {meant}


@pytest.mark.parametrize(
    "bad",
    [
        "chat.example.com", "https://", "https://a/", "https://a/b", "https://a?b", "https://u@a", "https://*.a",
        "https://a:", "https://a:x", "null", "", "https://ä.de", "https://a b", "://a", "https://a\n",
    ],
)  # fmt: skip
def test_what_is_no_origin_is_refused_with_what_one_is(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        allowed(PAGE, bad)
    message = str(caught.value)
    assert message.startswith(f"--allow-origin: {bad!r}: must be scheme://host") and PAGE in message
    assert "\n" not in message


@pytest.mark.parametrize("bad", ["https://a", "a:80", "[::1]:80", "a/b", "", "*.a", "a b", "ä.de", "[", "a\n"])
def test_what_is_no_name_is_refused_with_what_one_is(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        allowed(hosts=("a", bad))
    message = str(caught.value)
    assert message.startswith(f"--allow-host: {bad!r}: must be a name or an address without scheme and port")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("line", "warns"),
    [
        ("", False),
        ("--host 0.0.0.0", True),
        ("--host ::", True),
        ("--host 0.0.0.0 --allow-origin https://chat.example.com", True),
        ("--host 0.0.0.0 --api-key k", False),
        ("--host 0.0.0.0 --limits /l.toml", False),
        ("--host 0.0.0.0 --allow-host chat.example.com", False),
        ("--host 0.0.0.0 --allow-host *", False),
        ("--host 10.1.2.3", False),
    ],
)
def test_a_start_that_checks_no_name_warns(line: str, warns: bool) -> None:
    config = parse_command(["stage", "web", *line.split()], {})
    assert isinstance(config, WebStageConfig)
    with capture_logs() as lines:
        _check_origins(config)
    assert [(one["log_level"], one["event"]) for one in lines] == warns * [("warning", "any_host_allowed")]
    assert all("--allow-host" in one["remedy"] for one in lines)


def test_a_start_with_a_wrong_origin_or_name_is_refused() -> None:
    for flags in (["--allow-origin", "a"], ["--allow-host", "http://a"]):
        with pytest.raises(ConfigError, match=flags[0]):
            _check_origins(parse_command(["stage", "web", *flags], {}))  # type: ignore[arg-type]
