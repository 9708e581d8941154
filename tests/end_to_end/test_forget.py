"""`minisgl replay forget` beside a real server: a request that runs is gone, and all others go on."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest
from support.redis_servers import command, until
from support.servers import Server
from support.tool import Tool

from pipeline.log.redis import RedisLog
from pipeline.names import Names

pytestmark = [pytest.mark.slow, pytest.mark.night]  # by day tests/ops/replay/test_forget.py stops what runs

BODY = {"max_tokens": 8000, "ignore_eos": True, "stream": True, "temperature": 0}


def test_a_request_that_runs_is_cancelled_and_gone_and_another_goes_on(
    forgetting_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url, redis = forgetting_server.url, forgetting_server.redis_url

    def ask(prompt: str, **fields: object) -> httpx.Response:
        body = {name: value for name, value in (BODY | {"prompt": prompt, **fields}).items() if value is not None}
        return client.send(client.build_request("POST", f"{url}/v1/completions", json=body), stream=True)

    with httpx.Client(timeout=60) as client, closing(RedisLog(redis, Names())) as log:
        gone, kept = ask("What ann asks: ", user="ann"), ask("What bob asks: ", user="bob")
        uid, other = (response.headers["x-minisgl-uid"] for response in (gone, kept))
        chunks = gone.iter_lines()
        assert [next(chunks) for _ in range(9)]
        told = Tool("replay forget", redis, capsys).json("--user", "ann")
        assert told["requests"] == [uid] and told["left"] == []
        assert told["removed"]["cancelled"] == 1 and told["removed"]["steps"] > 0
        assert list(chunks), "the stream ends"
        assert client.get(f"{url}/v1/requests/{uid}").status_code == 404
        length = len(log.histories([other])[0])
        until(lambda: len(log.histories([other])[0]) > length + 3)
        assert client.delete(f"{url}/v1/requests/{other}").json()["cancelled"] is True
        held = [key for key in command(redis, "KEYS", "*") if uid.encode() in (command(redis, "DUMP", key) or b"")]
        assert held == []
        kept.close()
        gone.close()
