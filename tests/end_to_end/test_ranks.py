"""`serve --tp 2`: two processes answer over HTTP as one does, also when one of them dies or stands still."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import hasty_ranks
from support.checkpoints import TEXT
from support.selection import by_night, rest_at_night
from support.servers import Server, eventually, is_alive, serve
from support.streams import Stream, assert_nothing_is_left, events_of, num_of
from support.tool import Tool

from pipeline.events import Cancelled, Finished, TakenOver
from pipeline.names import GENERATE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

FLAGS = ("--dtype", "float32", "--max-prefill-length", "64", "--page-size", "16", "--tp", "2")
TIMEOUT_S, SILENCE_S = by_night((5, 8), (60, 70))
"""So long the ranks of the server wait for a frame, and so long nobody asks for anything."""
NUM_REQUESTS = 12
CLEAR = 1e-3
"""The two best tokens are at least so far apart where the answers must be equal."""
NUM_STREAMS = by_night(4, 20)
LENGTH = by_night(40, 200)
"""Tokens of the streams that are disturbed."""
ORPHAN_S = 1.0
"""A rank may outlive its group for so long."""


@pytest.fixture(scope="module")
def server(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    hasty = hasty_ranks.program(str(TIMEOUT_S))
    with serve(tmp_path_factory.mktemp("ranks"), "--model", str(llama3), *FLAGS, program=hasty) as server:
        yield server
        assert server.command.stop(signal.SIGINT) == 0
        assert "Traceback" not in server.command.output


def ranks_of(server: Server) -> dict[str, psutil.Process]:
    """Return the ranks that live, by their number."""
    found: dict[str, psutil.Process] = {}
    for process in server.command.workers(GENERATE):
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if is_alive(process):
                found[line[line.index("--rank") + 1]] = process
    return found


def figure(server: Server, name: str) -> float:
    """Return the first figure of the metrics whose line begins with *name*."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"minisgl:{name}")), 0.0)


def choices(server: Server) -> list[dict[str, Any]]:
    """Return what twelve requests that come at once are answered. Most prompts are computed in chunks."""
    bodies = [
        {
            "prompt": TEXT[: 3 + 20 * index],
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
            "echo": index == 3,
        }
        for index in range(NUM_REQUESTS)
    ]

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = server.ask("/v1/completions", body)["choices"][0]
        return choice

    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        return list(threads.map(ask, bodies))


def num_clear(choice: dict[str, Any]) -> int:
    """Return after how many tokens of an answer the two best ones are too close."""
    for number, top in enumerate(choice["logprobs"]["top_logprobs"][-12:]):
        best, second, *_ = [*sorted(top.values(), reverse=True), -99.0]
        if best - second < CLEAR:
            return number
    return 12


def test_two_ranks_answer_as_one(server: Server, llama3_server: Server) -> None:
    """Also when the prompts' first tokens are in the cache, and with the log-probabilities of a prompt."""
    expected = choices(llama3_server)
    for _ in range(2):
        answers = choices(server)
        compared = 0
        for mine, its in zip(answers, expected, strict=True):
            until = num_clear(its)
            assert mine["token_ids"][:until] == its["token_ids"][:until]
            logprobs, its_logprobs = (each["logprobs"]["token_logprobs"][: until - 12 or None] for each in (mine, its))
            assert logprobs[1:] == pytest.approx(its_logprobs[1:], abs=1e-3)
            compared += until
        assert compared > NUM_REQUESTS * 8
    eventually(lambda: figure(server, "prefix_cache_hits_total{") > 0, "the engine says that prefixes were cached")


def test_a_client_that_leaves_ends_its_request_on_all_ranks(server: Server) -> None:
    stream = Stream(server, "Go on.", max_tokens=300).begun()
    stream.leave()
    with server.log() as log:
        eventually(lambda: num_of(events_of(log, stream.uid), Cancelled) == 1, "it is cancelled")
        assert_nothing_is_left(log)
    assert Stream(server, "Hi.", max_tokens=3).answer[1] == "length"


def test_ranks_are_shown_and_listen_on_this_machine_alone(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    ready = httpx.get(f"{server.url}/ready").json()
    assert {name: each["phase"] for name, each in ready["stages"].items() if name.startswith("rank")} == {
        "rank-0": "ready",
        "rank-1": "ready",
    }
    shown = {slot["slot"]: slot["phase"] for slot in Tool("top --once", server.redis_url, capsys).json()["slots"]}
    assert (shown["rank-0-0"], shown["rank-1-0"], shown["generate-0"]) == ("ready", "ready", "ready")
    assert figure(server, 'worker_ready{slot="rank-1-0"}') == 1
    for process in ranks_of(server).values():
        listens = [each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        assert listens and set(listens) == {"127.0.0.1"}
    (loaded, *_) = server.command.log_lines("engine_loaded")
    assert (loaded["ranks"], loaded["kv_heads_of_a_rank"], loaded["kv_heads_copied"]) == (2, 1, 0)
    assert loaded["numerics"].endswith("/ranks-2")


@pytest.mark.parametrize("redis", rest_at_night(["runs", "stands still"]))
@pytest.mark.night  # seconds without a request
def test_ranks_stay_together_while_nobody_asks_for_anything(server: Server, redis: str) -> None:
    """For longer than a rank waits for a frame."""
    before = ranks_of(server)
    (process,) = [each for each in server.command.processes() if each.name().startswith(("valkey", "redis"))]
    if redis == "stands still":
        process.suspend()
    try:
        threading.Event().wait(SILENCE_S)
    finally:
        process.resume()
    assert Stream(server, "Are you there?", max_tokens=3).answer[1] == "length"
    assert ranks_of(server) == before


@pytest.mark.parametrize("death", rest_at_night(["kill 1", "kill 0", "stop 1"], first=0))
def test_when_a_rank_goes_all_start_again_once_and_no_stream_loses_a_token(server: Server, death: str) -> None:
    how, _, victim = death.partition(" ")
    prompts = [f"Story {index}." for index in range(NUM_STREAMS)]
    fields = {"max_tokens": LENGTH}
    expected = [stream.answer for stream in [Stream(server, prompt, **fields) for prompt in prompts]]
    num_deaths, before = len(server.command.log_lines("worker_died")), ranks_of(server)
    streams = [stream.begun() for stream in [Stream(server, prompt, **fields) for prompt in prompts]]
    before[victim].send_signal(signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    others = [each for rank, each in before.items() if rank != victim]
    eventually(lambda: not any(map(is_alive, others)), "the group has ended")
    eventually(lambda: not is_alive(before[victim]), "no orphan is left", timeout_s=ORPHAN_S)
    assert [stream.answer for stream in streams] == expected
    assert len(server.command.log_lines("worker_died")) == num_deaths + 1
    after = ranks_of(server)
    assert after.keys() == {"0", "1"} and not set(before.values()) & set(after.values())
    with server.log() as log:
        events = [events_of(log, stream.uid) for stream in streams]
        assert_nothing_is_left(log)
    assert all(isinstance(each[-1], Finished) for each in events)
    assert sum(num_of(each, TakenOver) for each in events) >= NUM_STREAMS
