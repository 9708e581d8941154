"""`minisgl serve --archive`: a request that Redis does not keep any more is found as if it did."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.kernel_variants import VARIANTS
from support.redis_servers import command
from support.servers import Server, eventually
from support.streams import IDS
from support.tool import Tool

from pipeline.archive.reader import open_archive
from pipeline.names import Names

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama3_server")]


def test_a_request_is_archived_when_it_ends_and_found_when_redis_has_dropped_it(
    llama3_server: Server, llama3_archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "The log is what happened.", "max_tokens": 8, "temperature": 1, "ignore_eos": True}
    response = httpx.post(f"{llama3_server.url}/v1/completions", json=body | {"stream": True}, headers=IDS, timeout=60)
    uid = response.headers["x-minisgl-uid"]
    tools = [Tool(name, llama3_server.redis_url, capsys) for name in ("trace", "replay show")]
    paths = [f"{llama3_server.url}/v1/requests/{uid}", f"{llama3_server.url}/v1/requests/{uid}/events"]
    told = [tool.json(uid) for tool in tools]
    shown = [httpx.get(path).content for path in paths]
    assert shown[1] == response.content
    assert told[0]["text"] == told[1]["text"] and told[1]["tokens"] == 8

    archive = open_archive(str(llama3_archive))
    eventually(lambda: uid in archive.find([uid]), "the request is archived")
    redis_url, key = llama3_server.redis_url, Names().request(uid)
    kept, left_ms = command(redis_url, "DUMP", key), command(redis_url, "PTTL", key)
    assert command(redis_url, "DEL", key) == 1
    for tool in tools:
        assert "unknown here" in tool.failure(uid)
    found = [tool.json(uid, "--archive", str(llama3_archive)) for tool in tools]
    told[1] = {name: value for name, value in told[1].items() if name in found[1]}
    assert found == told
    assert [httpx.get(path).content for path in paths] == shown
    if VARIANTS:  # torch alone promises no equal tokens
        (again,) = Tool("replay run", llama3_server.redis_url, capsys).json(uid, "--archive", str(llama3_archive))
        assert (again["identical"], again["tokens"]) == (1, 8)
    assert command(redis_url, "RESTORE", key, left_ms, kept) == b"OK"  # other tests use this server
