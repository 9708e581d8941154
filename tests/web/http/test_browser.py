"""Web pages in a real browser: what one tries with a server that it can reach, and what an allowed one can do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families
from support.redis_servers import command, until
from support.stand_in_stages import StandIn
from support.web_process import Server, serving
from support.web_site import seal_of

from pipeline.names import Names

# By day test_origins.py has what a server answers to such headers.
pytestmark = [pytest.mark.slow, pytest.mark.night]

PAGES = Path(__file__).parents[1] / "pages"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-popup-blocking", "--no-proxy-server", "--disable-background-networking", "--disable-component-update",
    "--disable-features=LocalNetworkAccessChecks",
)  # fmt: skip
"""The browser protects its user no more than an older one does."""
NAMES = "MAP *.test 127.0.0.1"
"""What DNS says: the names of all pages lead to this machine."""
ENDLESS: list[ChatCompletionMessageParam] = [{"role": "user", "content": "endless"}]
KEY = "sk-page-0123456789"
PATIENCE_S = 60.0


def browser() -> str:
    """Return the browser; without one the test is skipped, but in CI it fails."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        remedy = f"no browser ({', '.join(BROWSERS)}) on PATH: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(remedy)
    return found


@dataclass
class Site:
    """The server of the pages. What is none of its own paths goes to *rebound*, as if DNS had changed: the browser sees
    one origin all the time, and that server sees its requests as they are."""

    rebound: Server
    next_pages: list[str] = field(default_factory=list)
    """Where the page that reports next goes."""
    reports: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """Listen; give the port."""
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                page = PAGES / self.path.partition("?")[0].lstrip("/")
                if self.path == "/report":
                    site.reports.put(json.loads(body))
                    self.reply(200, site.next_pages.pop(0).encode())
                elif page.suffix == ".html":
                    self.reply(200, page.read_bytes(), "text/html")
                elif self.path == "/favicon.ico":
                    self.reply(404)
                else:
                    to = http.client.HTTPConnection("127.0.0.1", site.rebound.port, timeout=PATIENCE_S)
                    with contextlib.closing(to):
                        to.request(self.command, self.path, body or None, dict(self.headers))
                        answer = to.getresponse()
                        self.reply(answer.status, answer.read(), answer.headers.get_content_type())

            do_POST = do_DELETE = do_OPTIONS = do_GET

            def reply(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield server.server_address[1]
            finally:
                server.shutdown()
                thread.join()


@contextlib.contextmanager
def showing(url: str, folder: Path) -> Iterator[None]:
    """Show a page in a browser of its own."""
    words = [browser(), *FLAGS, f"--host-resolver-rules={NAMES}", f"--user-data-dir={folder / 'profile'}", url]
    with (folder / "browser.log").open("wb") as output:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def tried(server: Server) -> Counter[tuple[str, str, int]]:
    """Return how often a server gave each answer: route, method, status; without those of this test and of favicons."""
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    counted: Counter[tuple[str, str, int]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "minisgl:http_responses_total" and sample.labels["slot"] == "web-0":
                route, method, status = (sample.labels[name] for name in ("endpoint", "method", "status_code"))
                if route not in ("unknown", "/ready", "/metrics"):
                    counted[route, method, int(status)] += int(sample.value)
    return counted - OF_THIS_TEST


OF_THIS_TEST = Counter({("/v1/chat/completions", "POST", 200): 1})
REQUEST = "/v1/requests/<name>"
REFUSED = Counter(
    {
        ("/v1/chat/completions", "POST", 403): 2,  # as text; and rebound
        ("/chat/completions", "POST", 403): 1,
        ("/v1/completions", "POST", 403): 1,
        ("/completions", "POST", 403): 1,
        ("/generate", "OPTIONS", 403): 1,
        ("/v1/tokenize", "OPTIONS", 403): 1,
        ("/tokenizer_info", "GET", 403): 1,
        ("/v1/models", "GET", 403): 1,
        (f"{REQUEST}/events", "GET", 403): 1,
        (f"{REQUEST}/replay", "POST", 403): 2,  # and rebound
        ("/v1/dead/<name>/requeue", "POST", 403): 1,
        ("/v1/requests", "GET", 403): 2,  # and rebound
        ("/v1/pipeline/events", "GET", 403): 1,
        ("/requests/<path:name>", "GET", 403): 1,  # in a frame
        ("/tokenize", "POST", 403): 1,
        ("/flush_cache", "POST", 403): 2,  # by fetch, and in a window of its own
        ("/abort_request", "POST", 403): 1,
        (REQUEST, "OPTIONS", 403): 1,
        ("/health_generate", "GET", 403): 1,
        ("/v1/detokenize", "POST", 403): 1,
        (REQUEST, "GET", 403): 1,  # rebound
        (REQUEST, "DELETE", 403): 1,  # rebound
    }
)
"""What came to the server of all that the page tried. The browser sends no more of what asks first (OPTIONS)."""


def test_a_foreign_page_can_do_nothing_and_an_allowed_one_all_with_its_key(
    redis_url: str, stand_in: StandIn, tmp_path: Path
) -> None:
    browser()
    with contextlib.ExitStack() as stack:
        attacked = stack.enter_context(serving(redis_url))
        site = Site(attacked)
        port = stack.enter_context(site.open())
        page = f"http://good.test:{port}"
        guarded = stack.enter_context(serving(redis_url, "--slot", "1", "--allow-origin", page, "--api-key", KEY))
        client = stack.enter_context(attacked.client())
        stream = iter(client.chat.completions.create(model="default", messages=ENDLESS, stream=True))
        next(stream)
        ((victim, _),) = stand_in.requests()
        site.next_pages += [
            f"http://evil.test:{port}/foreign.html?server=http://127.0.0.1:{attacked.port}&uid={victim}",
            "about:blank",
        ]
        allowed = f"{page}/allowed.html?server=http://127.0.0.1:{guarded.port}&key={KEY}"
        stack.enter_context(showing(allowed, tmp_path))

        told = site.reports.get(timeout=PATIENCE_S)
        assert {name: answer["status"] for name, answer in told.items()} == {
            "whole": 200, "stream": 200, "events": 200, "cancel": 200, "wrong": 400, "stranger": 401
        }  # fmt: skip
        assert "Hello" in told["whole"]["text"] and told["whole"]["uid"] in told["whole"]["text"]
        assert told["stream"]["text"].endswith("data: [DONE]\n\n") and told["events"]["text"] == told["stream"]["text"]

        read = site.reports.get(timeout=PATIENCE_S)
        until(lambda: tried(attacked) >= REFUSED, timeout_s=PATIENCE_S)
        assert tried(attacked) == REFUSED
        rebound = {name: read.pop(name)[:4] for name in list(read) if name.startswith("rebound")}
        assert len(read) >= 10 and set(read.values()) == {""}, "what the page could read"
        assert len(rebound) == 5 and set(rebound.values()) == {"403 "}
        submitted = [uid for uid, _ in stand_in.requests()]
        assert submitted == [victim, told["whole"]["uid"], told["stream"]["uid"]]
        assert command(redis_url, "EXISTS", Names().control) == 0, "what was flushed"
        next(stream)
        assert seal_of(stand_in.stages.log, victim) == {}, "who was cancelled"
