"""`minisgl top` beside a real server: what it shows is what /metrics and the histories say, and an engine's death."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.measured import Scrape
from support.servers import MEASURED_CONTEXT as CONTEXT
from support.servers import ROOT, Server, eventually
from support.streams import Stream, body
from support.terminal import on_a_terminal

from pipeline.names import GENERATE
from pipeline.views.history import story

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("measured_server")]

PROMPT = "The log is the memory of the program. " * 4


@pytest.fixture(scope="module")
def server(measured_server: Server) -> Server:
    return measured_server


def view(server: Server) -> dict[str, Any]:
    """Run it for one snapshot, over two statuses of each worker."""
    words = ("top", "--once", "--json", "--redis-url", server.redis_url, "--interval", "1.2")
    done = subprocess.run([sys.executable, str(ROOT / "minisgl.py"), *words], capture_output=True, check=True)
    assert done.stderr == b""
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def test_what_it_shows_is_what_metrics_and_the_histories_say(server: Server) -> None:
    answers = [server.post(body(f"{PROMPT} {min(number, 2)}", max_tokens=60 + number)) for number in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    refused = server.post(body("Too much. " * CONTEXT))
    assert refused.status_code == 400
    uids = [answer.headers["x-minisgl-uid"] for answer in (*answers, refused)]

    shown: dict[str, Any] = {}

    def is_still() -> bool:
        shown.update(view(server))
        (engine,) = shown["engines"]
        return engine["prefix_hits"] and engine["output_tokens_per_s"] == 0 and not engine["between_tokens_p50_s"]

    eventually(is_still, "every process has said what it counted, twice")
    said = Scrape(httpx.get(f"{server.url}/metrics", timeout=10).text)

    (engine,) = shown["engines"]
    hits, queries = said.total("prefix_cache_hits_total"), said.total("prefix_cache_queries_total")
    assert hits > 0
    assert engine == {
        "engine": "generate-0",
        "model": "llama",
        "context": CONTEXT,
        "running": 0,
        "waiting": 0,
        "preemptions": said.total("num_preemptions_total"),
        "cache_used": said.total("kv_cache_usage_perc"),
        "prefix_hits": pytest.approx(hits / queries),
        "prompt_tokens_per_s": 0,
        "output_tokens_per_s": 0,
        "first_token_p50_s": None,
        "between_tokens_p50_s": None,
    }
    for stream in shown["streams"]:
        for name in ("length", "pending", "lag"):
            assert stream[name] == said.total(f"stream_{name}", stream=stream["stream"])
    assert {stream["stream"] for stream in shown["streams"]} == said.values("stream_length", "stream")
    assert (shown["num_live"], shown["num_dead"]) == (said.total("num_requests_live"), said.total("dead_letters"))
    ready = {slot["slot"] for slot in shown["slots"] if slot["phase"] == "ready"}
    assert ready == said.values("worker_ready", "slot")
    addresses = [slot["address"] for slot in shown["slots"] if slot["address"]]
    assert addresses == [server.url]
    pids = {process.pid for process in server.command.processes()}
    assert {slot["pid"] for slot in shown["slots"] if slot["slot"] != "janitor-0"} < pids

    requests = {each["uid"]: each for each in shown["requests"]}
    assert list(requests) == sorted(requests, reverse=True) and set(uids) < set(requests)
    with server.log() as log:
        stories = [story(uid, history) for uid, history in zip(uids, log.histories(uids), strict=True)]
    for told in stories[:4]:
        request = requests[told["uid"]]
        timings = told["timings"]
        made_ms = timings["total_ms"] - timings["first_token_ms"]
        assert request["tokens_per_s"] == pytest.approx((told["completion_tokens"] - 1) * 1000 / made_ms)
        assert (request["state"], request["reason"]) == (told["state"], told["finish_reason"])
        assert request["prompt_tokens"] == told["usage"]["prompt_tokens"]
        assert request["cached_tokens"] == told["usage"]["cached_tokens"]
        assert request["output_tokens"] == told["completion_tokens"]
        assert request["took_ms"] == told["moments"][-1]["at_ms"]
        assert (request["engine"], request["endpoint"]) == ("generate-0", told["endpoint"])
    last = requests[uids[-1]]
    assert (last["state"], last["reason"]) == ("failed", stories[-1]["error"]["code"])
    assert (last["output_tokens"], last["tokens_per_s"], last["engine"]) == (0, None, "")


def test_while_requests_run_it_shows_how_fast(server: Server) -> None:
    def shows_how_fast() -> bool:
        """Look while three requests run; where the look takes longer than they do, look again."""
        streams = [Stream(server, f"Number {number}.", max_tokens=400) for number in range(3)]
        try:
            eventually(lambda: all(stream.num_frames for stream in streams), "all of them run")
            shown = view(server)
        finally:
            for stream in streams:
                stream.leave()
        uids = {stream.uid for stream in streams}
        running = [each for each in shown["requests"] if each["uid"] in uids]
        (engine,) = shown["engines"]
        assert {each["state"] for each in running} <= {"running", "finished"}
        return (
            all((each["tokens_per_s"] or 0) > 0 and each["output_tokens"] > 0 for each in running)
            and (engine["output_tokens_per_s"] or 0) > 0
            and (engine["between_tokens_p50_s"] or 0) > 0
        )

    eventually(shows_how_fast, "it shows how fast they are", timeout_s=60)


@pytest.mark.night
def test_an_engine_that_is_killed_is_seen_to_go_and_to_come_back(server: Server, tmp_path: Path) -> None:
    with on_a_terminal(("top", "--redis-url", server.redis_url, "--interval", "0.1"), tmp_path) as screen:
        row = re.compile(r"^generate-0 +(\S+) .* (\d+) +(nobody|[\d,]+ ms) ", re.MULTILINE)

        def seen() -> tuple[str, int]:
            found = row.search(screen.text)
            return (found[1], int(found[2])) if found else ("", 0)

        eventually(lambda: seen()[0] == "ready", "the engine is ready")
        epoch = seen()[1]
        stream = Stream(server, "A long one.", max_tokens=400)
        eventually(lambda: stream.num_frames > 3, "tokens come")
        (engine,) = server.command.workers(GENERATE)
        engine.kill()
        eventually(lambda: seen()[0] in ("away", "starting", "loading"), "it is seen to be gone")
        eventually(lambda: seen()[0] == "ready" and seen()[1] == epoch + 1, "its successor is ready")
        stream.join()
        ended = re.compile(f"^{stream.uid} +finished length ", re.MULTILINE)
        eventually(lambda: bool(ended.search(screen.text)), "the request is seen to end")
        screen.press("q")
        assert screen.ended() == 0
