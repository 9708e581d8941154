"""`minisgl replay drive` against our own server: recorded traffic of every endpoint gets the same answers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redrive import leaves, record
from support.servers import Server
from support.tool import Tool

from ops.replay.files import read_dump
from pipeline.names import base_uid

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]

EVERY_S = 0.04
NUM_REQUESTS = 20


def driven(capsys: pytest.CaptureFixture[str], file: Path, server: Server, *flags: str) -> dict[str, Any]:
    """Drive *file* without a difference or an error; return what is printed."""
    drive = Tool("replay drive", "", capsys)
    document: dict[str, Any] = drive.json(str(file), "--url", server.url, "--compare", *flags)
    for row in document["requests"]:
        told = httpx.get(f"{server.url}/v1/requests/{row['new_uid']}/events?format=events").text
        assert f'"copy_of":"{base_uid(row["uid"])}' in told, "replay forget finds it"
    return document


@pytest.mark.night  # by day tests/ops/replay drives a stand-in
def test_recorded_traffic_gets_the_same_answers_at_another_pace(
    llama3_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dump.zst"
    uids = record(llama3_server, file, [EVERY_S] * NUM_REQUESTS, [24] * NUM_REQUESTS)
    document = driven(capsys, file, llama3_server, "--speed", "4")
    rows = {row["uid"]: row for row in document["requests"]}
    assert rows.keys() == set(uids) and document["clock_after"] == "redis"
    assert document["answers"] == {"compared": len(uids), "identical": len(uids), "changed_ends": {}}
    cancelled = [row["after"]["end"] for row in rows.values() if row["before"]["end"] == "cancelled"]
    assert cancelled == ["cancelled"] * sum(map(leaves, range(NUM_REQUESTS)))
    assert all(row["after"]["ttft_ms"] > 0 for row in rows.values())
    last = max(row["due_ms"] for row in rows.values())
    moments_ms = [int(recording.entries[0].fields["ms"]) for recording in read_dump(file)]
    assert last == pytest.approx((max(moments_ms) - min(moments_ms)) / 4, abs=1)

    # As any OpenAI server: each request is a stream, without fields that only MiniSGL knows, so it could end earlier.
    document = driven(capsys, file, llama3_server, "--speed", "4", "--client-clock", "--set", "ignore_eos=true")
    assert (document["clock_after"], document["answers"]["identical"]) == ("client", len(uids))
    assert document["fields_not_sent"].keys() == {"ignore_eos"}
    whole = [row["after"] for row in document["requests"] if row["before"]["end"] == "length"]
    assert all(0 < after["ttft_ms"] <= after["e2e_ms"] for after in whole)
