"""`serve --frontends 2`: two web processes share the port. When one dies, the other takes all requests."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest
from support.servers import Server, eventually, serve

from pipeline.events import Submitted, decode
from pipeline.names import WEB
from pipeline.stage.slots import read_statuses

pytestmark = pytest.mark.slow

CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4, "temperature": 0, "stream": True}


def ask(server: Server) -> str:
    """Ask on a connection of its own; return the uid of the answer."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    return answer.headers["x-minisgl-uid"]


def test_two_web_processes_share_the_port_and_one_answers_while_the_other_is_started_again(tmp_path: Path) -> None:
    with serve(tmp_path, "--frontends", "2") as server, server.log() as log:
        names: set[str] = set()
        while len(names) < 2:  # the kernel says who gets a connection
            (history,) = log.histories([ask(server)])
            event = decode(history[0].fields)
            assert isinstance(event, Submitted)
            names.add(event.frontend)
        assert names == {"web-0", "web-1"}
        victim = next(status.pid for status in read_statuses(log, WEB) if status.slot == "web-0")
        psutil.Process(victim).kill()
        for _ in range(5):
            ask(server)

        def is_back() -> bool:
            statuses = read_statuses(log, WEB)
            return len(statuses) == 2 and all(each.phase == "ready" and each.pid != victim for each in statuses)

        eventually(is_back, "both are ready again")
        assert len(server.command.workers(WEB)) == 2
