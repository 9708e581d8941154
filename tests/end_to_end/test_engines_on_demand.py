"""No engine is there until a request waits, as KEDA starts and ends them: web and tokenizers serve without one."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.redis_servers import find_servers, running_server
from support.servers import Command, eventually, free_port, run_command, wait_until_ready

from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB, Names

pytestmark = pytest.mark.slow

CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8, "temperature": 0}


def test_a_request_waits_for_the_engine_that_it_starts_and_nothing_else_starts_one(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(running_server(next(iter(find_servers().values())), tmp_path))
        log = stack.enter_context(contextlib.closing(RedisLog(redis.url, Names())))

        def start(stage: str, name: str, *flags: str) -> Command:
            command = run_command(["stage", stage, "--redis-url", redis.url, *flags], tmp_path / name)
            stack.callback(command.stop)
            return command

        def waiting() -> int:
            """The number that KEDA reads."""
            return log.backlog(Inbox.tokenized(log.names))

        def serving(name: str) -> list[Command]:
            web = start(WEB, f"web {name}", "--port", str(port), "--engines-on-demand")
            return [web, *(start(stage, f"{stage} {name}") for stage in (TOKENIZE, DETOKENIZE))]

        file = tmp_path / "engine is ready"
        file.touch()  # left by a container that was killed
        first, engine = serving("first"), start(GENERATE, "engine", "--ready-file", str(file))
        eventually(lambda: not file.exists(), "nothing is ready yet")
        wait_until_ready(url, [*first, engine])
        eventually(file.exists, "the engine is ready")
        engine.workers(GENERATE)[0].kill()
        eventually(lambda: not file.exists(), "no engine is ready")
        eventually(file.exists, "another engine is ready")
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).json()

        def models() -> list[str]:
            return [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]]

        eventually(lambda: bool(models()), "the web process has seen the engine")
        served = models()
        assert engine.stop() == 0 and not file.exists()
        for command in first:
            command.stop()

        wait_until_ready(url, serving("second"))  # none of these processes has seen an engine
        assert models() == served
        assert httpx.get(f"{url}/health_generate").status_code == 503
        until_s = time.monotonic() + 1.5  # as long as a probe would need several times
        while time.monotonic() < until_s:
            assert waiting() == 0
            time.sleep(0.05)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=CHAT, timeout=60)
            eventually(lambda: waiting() == 1, "the request waits for an engine")
            start(GENERATE, "another engine")
            assert asked.result().json()["choices"] == answer["choices"]
        eventually(lambda: waiting() == 0, "nothing keeps the engine")
