"""`minisgl replay drive` against our own server: recorded traffic of every endpoint gets the same answers again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from redrive import leaves, record
from servers import Server

import minisgl
from ops.replay.files import read_dump

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

EVERY_S = 0.04
NUM_REQUESTS = 20


def test_recorded_traffic_gets_the_same_answers_at_another_pace(
    llama3_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dump.zst"
    uids = record(llama3_server, file, [EVERY_S] * NUM_REQUESTS, [24] * NUM_REQUESTS)
    flags = ("--url", llama3_server.url, "--speed", "4", "--compare", "--json")
    code = minisgl.main(["replay", "drive", str(file), *flags])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, ""), printed
    document = json.loads(printed.out)
    rows = {row["uid"]: row for row in document["requests"]}
    assert rows.keys() == set(uids) and document["clock_after"] == "redis"
    assert document["answers"] == {"compared": len(uids), "identical": len(uids), "changed_ends": {}}
    cancelled = [row["after"]["end"] for row in rows.values() if row["before"]["end"] == "cancelled"]
    assert cancelled == ["cancelled"] * sum(map(leaves, range(NUM_REQUESTS)))
    assert all(row["after"]["ttft_ms"] > 0 for row in rows.values())
    last = max(row["due_ms"] for row in rows.values())
    moments_ms = [int(recording.entries[0].fields["ms"]) for recording in read_dump(file)]
    assert last == pytest.approx((max(moments_ms) - min(moments_ms)) / 4, abs=1)
