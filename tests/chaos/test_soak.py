"""`make soak`: what counts as growth and what is reported; then a real run of a few requests."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from chaos import soak
from chaos.soak import Memory, Process, Redis, Snapshot
from support.checkpoints import make_checkpoint
from support.redis_servers import command
from support.servers import ROOT, run_command

from pipeline.errors import MiniSGLError
from pipeline.log.address import connect
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import Names

SOAK = (sys.executable, "-m", "chaos.soak")
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
MIB = 2**20
REDIS = Redis(
    used_bytes=2 * MIB,
    keys=20,
    groups=4,
    consumers=4,
    clients=9,
    bytes_by_key={"steps:*": 600, "replies:*": 1000},
    entries_by_key={"steps:*": 0, "replies:*": 30},
)


def snapshot(requests: int, *processes: Process, redis: Redis = REDIS) -> Snapshot:
    return Snapshot(requests, processes, redis)


def process(name: str, pid: int, rss: float, uss: float = 60) -> Process:
    return Process(name, pid, Memory(int(rss * MIB), int(uss * MIB), 50 * MIB))


def test_up_to_5_percent_more_is_as_before_and_less_is_fine() -> None:
    first = snapshot(1000, process("web-0", 1, 100, 80), process("generate-0", 2, 200, 100))
    last = snapshot(9000, process("web-0", 1, 104.9, 84.1), process("generate-0", 2, 150, 100))
    rows = {row.name: row for row in soak.rows(first, last)}
    assert rows["web-0, RSS"].ratio == pytest.approx(1.049) and rows["web-0, RSS"].within
    assert rows["web-0, USS"].ratio == pytest.approx(1.05125) and not rows["web-0, USS"].within
    assert rows["generate-0, RSS"].ratio == 0.75 and rows["generate-0, RSS"].within
    assert rows["web-0, heap"].ratio == 1.0
    assert rows["web-0, RSS"].per_request(8000) == pytest.approx(4.9 * MIB / 8000, abs=1)


def test_counts_are_rows_too_and_one_more_of_few_is_grown() -> None:
    last = snapshot(9000, redis=dataclasses.replace(REDIS, consumers=5, used_bytes=2 * MIB + 1))
    rows = {row.name: row for row in soak.rows(snapshot(1000), last)}
    assert set(rows) == {"Redis, used_memory", "keys", "consumer groups", "consumers", "clients of Redis"}
    assert not rows["consumers"].within and rows["keys"].within and rows["Redis, used_memory"].within


def test_what_was_none_must_stay_none() -> None:
    grown, none = (soak.Row("keys", 0, last, is_bytes=False) for last in (4, 0))
    assert grown.ratio == float("inf") and not grown.within
    assert none.within


def test_another_process_in_a_place_is_told() -> None:
    first = snapshot(1, process("web-0", 1, 10), process("generate-0", 2, 10), process("tokenize-0", 3, 10))
    assert soak.changed(first, first) == []
    last = snapshot(2, process("web-0", 1, 10), process("generate-0", 7, 10), process("tokenize-1", 3, 10))
    assert soak.changed(first, last) == [
        "generate-0: process 2 became 7",
        "tokenize-0: process 3 is gone",
        "tokenize-1: process 3 is new",
    ]
    with pytest.raises(AssertionError):
        soak.rows(first, last)


def test_the_table_says_by_how_much_and_whether_that_is_within() -> None:
    first = snapshot(1000, process("web-0", 1, 100, 80))
    last = snapshot(3000, process("web-0", 1, 120, 80))
    text = soak.table(first, last)
    (rss,) = [line for line in text.splitlines() if line.startswith("web-0, RSS")]
    assert rss.split()[2:] == ["100.0", "MiB", "120.0", "MiB", "1.200", "grew", "10,486", "B"]
    (uss,) = [line for line in text.splitlines() if line.startswith("web-0, USS")]
    assert uss.split()[-4:] == ["1.000", "yes", "0", "B"]
    assert text.splitlines()[0].split("  ")[-5:] == ["after 1,000", "after 3,000", "ratio", "within 5 %", "a request"]


def test_of_what_grew_the_course_is_told() -> None:
    first = snapshot(1000, process("web-0", 1, 100), process("generate-0", 2, 50))
    last = snapshot(3000, process("web-0", 1, 120), process("generate-0", 2, 50))
    between = snapshot(2000, process("web-0", 1, 119), process("generate-0", 2, 50))
    text = soak.evidence([first, between, last])
    assert soak.evidence([first, first]) == ""
    assert text.splitlines() == ["web-0, RSS after 1,000, 2,000, 3,000 requests, MiB: 100.0 119.0 120.0"]


def test_of_redis_the_keys_that_grew_are_told() -> None:
    by_key = {"live": 5, "steps:*": 600, "replies:*": 9000}
    more = dataclasses.replace(REDIS, used_bytes=3 * MIB, bytes_by_key=by_key, entries_by_key={"replies:*": 2000})
    text = soak.evidence([snapshot(1000), snapshot(2000, redis=more)])
    assert "Redis, used_memory after 1,000, 2,000 requests, MiB: 2.0 3.0" in text
    assert "keys that grew: replies:* from 1,000 to 9,000 bytes (30 to 2,000 entries), live from 0 to 5 bytes" in text


def test_the_memory_of_a_process_is_what_others_see_of_it() -> None:
    memory, seen = soak.memory_of(os.getpid()), psutil.Process().memory_full_info()
    assert memory.rss_bytes == pytest.approx(seen.rss, rel=0.05)
    assert memory.uss_bytes == pytest.approx(seen.uss, rel=0.05)
    assert 0 < memory.heap_bytes <= memory.rss_bytes


def test_a_process_that_is_gone_is_an_error_that_names_it() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(MiniSGLError, match=f"process {gone.pid} "):
        soak.memory_of(gone.pid)


def test_keys_groups_and_consumers_are_counted_and_weighed_by_kind(redis_url: str) -> None:
    log = RedisLog(redis_url, Names())
    try:
        for inbox in (Inbox.submitted(log.names), Inbox.steps(log.names, "generate-0")):
            log.prepare(inbox)
        command(redis_url, "XGROUP", "CREATECONSUMER", log.names.submitted, "tokenize", "tokenize-0")
        with connect(redis_url, decode_responses=True) as client:
            seen = soak.redis_now(client, log.names)
            assert soak.work_left(client, log.names) == []
    finally:
        log.close()
    assert (seen.keys, seen.groups, seen.consumers) == (2, 2, 1)
    assert set(seen.bytes_by_key) == {"submitted", "steps:*"} and all(seen.bytes_by_key.values())
    assert seen.entries_by_key == {"submitted": 0, "steps:*": 0}
    assert seen.clients >= 2 and seen.used_bytes > 100_000


def test_what_is_not_over_is_named(redis_url: str) -> None:
    names = Names()
    command(redis_url, "XADD", names.request("a" * 32), "*", "kind", "x")
    command(redis_url, "XADD", names.submitted, "*", "uid", "x")
    command(redis_url, "ZADD", names.live, "1", "x")
    with connect(redis_url, decode_responses=True) as client:
        assert soak.work_left(client, names) == ["live: 1", "request:*: 1", "submitted: 1"]


@pytest.mark.slow
@pytest.mark.night
def test_a_small_soak_has_two_snapshots_of_everything(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3")
    flags = ["--model", str(folder), "--requests", "60", "--warmup", "20", "--concurrency", "8", "--retention", "1"]
    flags += ["--output", str(tmp_path / "out.json")]
    running = run_command(flags, tmp_path, program=SOAK, environment=ENVIRONMENT)
    try:
        assert running.process.wait(280) == 0, running.output
    finally:
        running.stop()
    assert "Redis, used_memory" in running.output and "generate-0, heap" in running.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert [one["requests"] for one in document["snapshots"]] == [20, 40, 60]
    assert document["changed"] == []
    for one in (document["snapshots"][0], document["snapshots"][-1]):
        names = [process["name"] for process in one["processes"]]
        assert names == ["tokenize-0", "generate-0", "detokenize-0", "web-0", "supervisor", "Redis"]
        assert all(process["memory"]["rss_bytes"] > MIB for process in one["processes"])
        assert len({process["pid"] for process in one["processes"]}) == 6
        assert not any(kind.startswith("request") for kind in one["redis"]["bytes_by_key"])
    first, last = document["snapshots"][0]["redis"], document["snapshots"][-1]["redis"]
    assert first["clients"] > 0
    for name in ("keys", "groups", "consumers"):
        assert 0 < first[name] == last[name]
