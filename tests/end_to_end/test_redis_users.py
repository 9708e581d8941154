"""Every stage as a Redis user of its own, its password in the URL: nothing it needs is denied, and nobody is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support.redis_servers import Servers, command, running_server, users_with_password
from support.selection import by_night
from support.servers import ROOT, Command, eventually, free_port, run_command, wait_until_ready

from ops.bench.models import nonsense
from pipeline.names import DETOKENIZE, GENERATE, STAGES, TOKENIZE, WEB

pytestmark = pytest.mark.slow

PASSWORD = "hunter2-in-the-url"
MESSAGES = [{"role": "user", "content": "Hello!"}]
REPLICAS = by_night("1", "2")
"""Of each stage but the frontend. Which commits each user may call is tested in tests/ops/redis."""


class Guarded:
    """The stages, each under its own user."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.redis_url = redis_url
        self.folder = folder
        self.commands: list[Command] = []
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        model = ["--model", str(nonsense(folder))]
        limits = folder / "limits.toml"
        limits.write_text("[default]\nrequests_per_minute = 1000\nconcurrent_requests = 100\n[[key]]\nkey = 'sk-1'\n")
        for stage in STAGES:
            more = (
                ["--port", str(port), "--limits", str(limits), "--admin-key", "sk-a"]
                if stage == WEB
                else ["--replicas", REPLICAS, *model]
            )
            self.commands.append(
                run_command(["stage", stage, "--redis-url", self.as_user(stage), "--lease", "1", *more], folder / stage)
            )

    def as_user(self, user: str, password: str = PASSWORD) -> str:
        return self.redis_url.replace("unix://", f"unix://{user}:{password}@")

    def workers(self, stage: str) -> list[int]:
        return [process.pid for each in self.commands for process in each.workers(stage)]

    def post(self, path: str, body: Mapping[str, object], **headers: str) -> httpx.Response:
        sent = {"authorization": "Bearer sk-1"} | headers
        return httpx.post(self.url + path, json=body, headers=sent, timeout=120)

    def tool(self, *arguments: str) -> str:
        """Run a tool as an operator does who has the URL in the environment."""
        environment = os.environ | {"MINISGL_REDIS_URL": self.as_user("operator")}
        line = [sys.executable, str(ROOT / "minisgl.py"), *arguments]
        ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def denied(self) -> list[str]:
        """Return what Redis refused to anybody."""
        return [str(entry) for entry in command(self.as_user("admin"), "ACL", "LOG", 128)]


@contextmanager
def guarded(redis_servers: Servers, place: str, folder: Path) -> Iterator[Guarded]:
    users = users_with_password(folder, PASSWORD)
    with ExitStack() as stack:
        server = stack.enter_context(running_server(redis_servers.binary(place), folder, "--aclfile", users))
        stages = Guarded(server.url, folder)
        for each in stages.commands:
            stack.callback(each.stop)
        wait_until_ready(stages.url, stages.commands)
        for each in stages.commands:
            eventually(lambda each=each: bool(each.log_lines("stage_ready")), "all replicas are ready")  # type: ignore[misc]
        command(stages.as_user("admin"), "ACL", "LOG", "RESET")  # what `until it answers` was refused
        yield stages


@pytest.mark.night  # by day tests/ops/redis/test_users.py runs what each role may
@pytest.mark.parametrize("place", ["embedded", "oldest"])
def test_the_least_rights_are_enough_whatever_happens(redis_servers: Servers, place: str, tmp_path: Path) -> None:
    long = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with guarded(redis_servers, place, tmp_path) as stages:
        answer = stages.post("/v1/chat/completions", long | {"max_tokens": 8, "n": 3}).raise_for_status().json()
        assert len(answer["choices"]) == 3
        expected = stages.post("/v1/chat/completions", long).raise_for_status().json()
        assert expected["usage"]["completion_tokens"] == 400

        # Workers of each stage die while a request runs; who is left, or comes back, goes on with it.
        with httpx.stream(
            "POST",
            f"{stages.url}/v1/chat/completions",
            json=long | {"stream": True},
            headers={"authorization": "Bearer sk-1", "idempotency-key": "once"},
            timeout=120,
        ) as stream:
            uid = stream.headers["x-minisgl-uid"]
            lines = stream.iter_lines()
            text, killed = "", False
            for line in lines:
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if text and not killed:
                    killed = True
                    for stage in (GENERATE, TOKENIZE, DETOKENIZE):
                        for pid in stages.workers(stage):
                            os.kill(pid, signal.SIGKILL)
            assert killed
        assert text == expected["choices"][0]["message"]["content"]
        again = stages.post("/v1/chat/completions", long | {"stream": True}, **{"idempotency-key": "once"})
        assert again.headers["x-minisgl-uid"] == uid

        key = {"authorization": "Bearer sk-1"}
        with httpx.stream(
            "POST", f"{stages.url}/v1/chat/completions", json=long | {"stream": True}, headers=key
        ) as left:
            other = left.headers["x-minisgl-uid"]
            assert httpx.delete(f"{stages.url}/v1/requests/{other}", headers=key).status_code == 200
        assert stages.post("/flush_cache", {}, authorization="Bearer sk-a").status_code == 200
        assert stages.post("/tokenize", {"prompt": "Hello!"}).json()["tokens"]
        assert "[DONE]" in httpx.get(f"{stages.url}/v1/requests/{uid}/events", headers=key, timeout=60).text
        metrics = httpx.get(f"{stages.url}/metrics").text
        assert "minisgl:log_up 1.0" in metrics

        assert uid in stages.tool("trace", uid)
        stages.tool("dead", "ls")
        assert "generate-0" in stages.tool("top", "--once")
        assert stages.denied() == []

        shown = "".join(
            each.output + " ".join(part for process in each.processes() for part in process.cmdline())
            for each in stages.commands
        )
        assert "--redis-url" not in shown, "a URL with a password is in no command line"
        assert PASSWORD not in shown + metrics


def test_a_wrong_password_is_one_line_that_does_not_say_it(redis_servers: Servers, tmp_path: Path) -> None:
    with running_server(redis_servers.binary("embedded"), tmp_path, "--requirepass", "right") as server:
        line = [sys.executable, str(ROOT / "minisgl.py"), "stage", "web", "--redis-url"]
        url = server.url.replace("unix://", "unix://:wrong-one@")
        ended = subprocess.run([*line, url], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1 and "password_file=FILE" in ended.stderr
        assert "wrong-one" not in ended.stderr
