"""`make soak`: what counts as growth and what is reported; then a real run of a few requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from chaos import soak
from chaos.soak import Memory, Process, Redis, Snapshot
from support.checkpoints import make_checkpoint
from support.servers import measured

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


@pytest.mark.slow
@pytest.mark.night
def test_a_small_soak_has_two_snapshots_of_everything(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3")
    flags = ["--model", str(folder), "--requests", "60", "--warmup", "20", "--concurrency", "8", "--retention", "1"]
    said, document = measured(("-m", "chaos.soak"), flags, tmp_path)
    assert "Redis, used_memory" in said and "generate-0, heap" in said
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
