"""`minisgl bench attack`: its clients see what happened, a broken bound is said, and a real server stands it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai_stand_in import DONE, Body, Frames, OpenAIStandIn, text_chunk, usage_chunk, whole
from servers import ROOT

from ops.bench import attack
from ops.bench.attack import AttackConfig, Figures, Server
from ops.bench.attack_clients import LARGEST_BODY, Order, Streams, giant_bodies, health, streams

GOOD = Figures(
    health={"ms": [1.0] * 99 + [50.0], "failures": 0},
    streams={"whole": 9, "early": [], "refused": 0, "longest_pause_ms": 20.0},
    server=Server(web_bytes=100 << 20, redis_bytes=9 << 20, redis_budget_bytes=10 << 20, replaced=3),
    answers={"tokenizes": {"200": 3, "400": 1}},
    connections=12,
)
NUM_TOKENS = 20
CUT_OFF = [text_chunk("a"), usage_chunk(1, NUM_TOKENS)]


def order(stand_in: OpenAIStandIn) -> Order:
    return Order(int(stand_in.url.rpartition(":")[2]), 1, NUM_TOKENS)


def read_streams(stand_in: OpenAIStandIn, num_answers: int) -> Streams:
    """Return what one stream after the other got, once so many were asked for."""
    begun: list[float] = []

    async def run() -> Streams:
        end = asyncio.Event()
        reading = asyncio.create_task(streams(order(stand_in), lambda: begun.append(time.monotonic()), end))
        while len(stand_in.bodies) < num_answers:
            await asyncio.sleep(0.005)
        end.set()
        return await reading

    told = asyncio.run(run())
    assert len(begun) == 1
    return told


def test_a_whole_stream_counts_and_one_that_is_cut_or_short_is_seen(stand_in: OpenAIStandIn) -> None:
    short = [text_chunk("a"), usage_chunk(1, NUM_TOKENS - 1), DONE]
    wrong: list[Frames | tuple[int, object]] = [CUT_OFF, short, (500, {"error": "broken"}), (503, {"error": "full"})]

    def script(body: Body) -> Frames | tuple[int, object]:
        return wrong[len(stand_in.bodies) - 2] if 1 < len(stand_in.bodies) < 6 else whole(body)

    stand_in.script = script
    told = read_streams(stand_in, 6)
    assert (told.whole, told.refused) == (len(stand_in.bodies) - len(wrong), 1)
    assert [text[:4] for text in told.early] == ["it e", "it e", "EOFE"] and "500" in told.early[2]


def test_health_is_asked_on_new_connections_and_what_is_no_200_is_counted(stand_in: OpenAIStandIn) -> None:
    async def run() -> tuple[list[float], int]:
        end = asyncio.Event()
        asyncio.get_running_loop().call_later(0.12, end.set)
        told = await health(order(stand_in), lambda: None, end)
        return told.ms, told.failures

    times, failures = asyncio.run(run())  # the stand-in has no /health
    assert len(times) == failures > 0 and all(0 < each < 5000 for each in times)


def test_bodies_are_as_large_as_they_may_be_and_one_is_larger() -> None:
    kinds = giant_bodies()
    assert set(kinds) == {"wrong bodies", "legal bodies", "lists of prompts", "tokenizes"}
    for kind, requests in kinds.items():
        sizes = [len(data.partition(b"\r\n\r\n")[2]) for data in requests]
        told = [int(data.partition(b"Content-Length: ")[2].partition(b"\r")[0]) for data in requests]
        assert sizes == told
        assert sum(size > LARGEST_BODY for size in sizes) == (kind == "wrong bodies")
        assert max(sizes) > 0.9 * 1_000_000
    legal = [data.partition(b"\r\n\r\n")[2] for kind in ("legal bodies", "tokenizes") for data in kinds[kind]]
    assert all(isinstance(json.loads(body), dict) for body in legal)


def test_no_bound_is_broken_by_a_server_that_stood_it() -> None:
    assert attack.broken(GOOD, 100) == []
    shown = attack.table(GOOD, AttackConfig())
    assert "below 10 MiB" in shown and "tokenizes: 3 x 200, 1 x 400" in shown


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"health": {"ms": [1.0] * 9 + [500.0], "failures": 0}}, "/health took 455.1 ms"),
        ({"health": {"ms": [], "failures": 0}}, "/health took"),
        ({"health": {"ms": [1.0], "failures": 1}}, "did not answer 200 for 1 of 1"),
        ({"streams": {"whole": 1, "early": ["cut"]}}, "1 streams ended early; the first: cut"),
        ({"streams": {"whole": 0, "early": []}}, "No stream came to its end"),
        ({"server": Server(deaths=["web-0 with 3"])}, "Workers died: web-0 with 3"),
        ({"server": Server(web_bytes=401 << 20)}, "A web process took 401 MiB"),
        ({"server": Server(redis_bytes=11, redis_budget_bytes=10)}, "Redis took"),
    ],
)
def test_a_broken_bound_is_said(changes: dict[str, object], says: str) -> None:
    (said,) = attack.broken(dataclasses.replace(GOOD, **changes), 100)  # type: ignore[arg-type]
    assert says in said


def test_deaths_are_read_from_the_log_and_a_tokenizer_that_was_to_be_replaced_is_none(tmp_path: Path) -> None:
    lines = [
        {"event": "worker_died", "worker": "web-0", "code": -9},
        {"event": "worker_died", "worker": "tokenize-0", "code": 4},
        {"event": "other", "worker": "web-0"},
    ]
    (tmp_path / "log").write_text("plain text\n" + "\n".join(map(json.dumps, lines)))
    server = Server()
    attack._read_deaths(server, tmp_path / "log")
    assert (server.deaths, server.replaced) == (["web-0 with -9"], 1)


@pytest.mark.slow
@pytest.mark.night
def test_a_server_stands_an_attack(tmp_path: Path) -> None:
    """Other tests share the cores: the bound of /health is wide."""
    command = [sys.executable, str(ROOT / "minisgl.py"), "bench", "attack", "--health-ms", "5000"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out.json")], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No bound is broken." in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    figures = document["figures"]
    assert document["broken"] == [] and document["health_ms"]["count"] > 10
    kinds = {"wrong bodies", "legal bodies", "lists of prompts", "leavers", "tokenizes", "dribblers"}
    assert set(figures["answers"]) == kinds
    assert set(figures["answers"].get("wrong bodies", {})) <= {"400", "413"}
    assert figures["streams"]["whole"] >= document["options"]["streams"] and figures["server"]["web_bytes"] > 1 << 20
    assert figures["connections"] >= document["options"]["idle"]
