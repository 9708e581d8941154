"""Real servers for tests: the command line as a user types it, in processes of its own, on a port that is free."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from ops.bench.models import nonsense
from pipeline.log.redis import RedisLog
from pipeline.names import Names

ROOT = Path(__file__).resolve().parents[2]
MINISGL = (sys.executable, str(ROOT / "minisgl.py"))
READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 45.0
MEASURED_CONTEXT = 8192
"""That of the server whose figures are looked at: an answer this long outlasts any look."""
MEASURED_RUNNING = 4
MEASURED_RETENTION_S = 300


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1, below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(check: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll until *check* holds; fail with *what* was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline_s, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Return whether *process* runs; one that has ended may be a zombie for as long as its parent likes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Command:
    """A running `minisgl` command and everything it prints."""

    process: subprocess.Popen[bytes]
    output_file: Path

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """Return the JSON log lines of one event."""
        lines = [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def processes(self) -> list[psutil.Process]:
        """Return the command's process and all below it."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def workers(self, stage: str) -> list[psutil.Process]:
        """Return the worker processes of *stage*, oldest first."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "--slot" in line and line[line.index("stage") + 1 if "stage" in line else 0] == stage:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and everything below it; return its exit code."""
        family = self.processes()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Server:
    """A server that answers HTTP."""

    command: Command
    url: str
    redis_url: str

    @contextlib.contextmanager
    def log(self) -> Iterator[RedisLog]:
        """Give the server's log."""
        log = RedisLog(self.redis_url, Names())
        try:
            yield log
        finally:
            log.close()

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that a path answers."""
        response = httpx.post(f"{self.url}{path}", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        """Send one chat completion."""
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120, **options)


def run_command(
    arguments: Sequence[str],
    folder: Path,
    *,
    program: Sequence[str] = MINISGL,
    environment: Mapping[str, str] | None = None,
) -> Command:
    """Start `minisgl <arguments>` with its output in *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    output_file = folder / f"output-{time.monotonic_ns()}.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=kept | dict(environment or {}),
            cwd=folder,
        )
    return Command(process, output_file)


def measured(program: Sequence[str], flags: Sequence[str], folder: Path) -> tuple[str, Any]:
    """Run *program*, which measures, to its end; return what it says, and what it writes."""
    flags = [*flags, "--output", str(folder / "out.json")]
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    running = run_command(flags, folder, program=(sys.executable, *program), environment=paths)
    try:
        assert running.process.wait(280) == 0, running.output
    finally:
        running.stop()
    return running.output, json.loads((folder / "out.json").read_text())


def wait_until_ready(url: str, commands: Sequence[Command], timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait until /ready says 200; fail with the commands' output when one of them ends or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        for command in commands:
            assert command.process.poll() is None, f"ended with {command.process.returncode}:\n{command.output}"
        assert time.monotonic() < deadline_s, "not ready:\n" + "\n".join(command.output for command in commands)
        time.sleep(0.05)


@contextlib.contextmanager
def serve(
    folder: Path,
    *flags: str,
    redis_url: str = "",
    ready: bool = True,
    demo: bool = False,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = MINISGL,
) -> Iterator[Server]:
    """Run `minisgl serve` with its data in *folder* until the block ends, and see that nothing of it is left.

    Where the flags name no model it is a random one, which says as much as it is asked for; *demo*: the one in the box.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    where = ["--redis-url", redis_url] if redis_url else ["--data-dir", str(folder / "data")]
    if not demo and "--model" not in flags:
        where += ["--model", str(nonsense(folder / "models"))]
    line = ["serve", "--port", str(port), *where, *flags]
    command = run_command(line, folder, program=program, environment=environment)
    server = Server(command, url, redis_url or f"unix://{folder / 'data' / 'redis.sock'}")
    try:
        if ready:
            wait_until_ready(url, [command])
        yield server
    finally:
        family = command.processes()
        command.stop()
        eventually(lambda: not any(map(is_alive, family)), f"none of {family} is left")
