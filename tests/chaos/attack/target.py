"""The server that is attacked, what is seen of it from outside, and the processes of its clients."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import redis
from chaos.attack.kinds import Order
from chaos.attack.wire import ADMIN, ATTACKER, INNOCENT

from ops.bench.models import nonsense
from ops.bench.targets import ROOT, our_server, started, tree_of
from pipeline.errors import MiniSGLError
from pipeline.process.parent import EXIT_REPLACE

LOOK_EVERY_S: Final = 0.25
KEYS: Final = ("--api-key", ATTACKER, INNOCENT, "--admin-key", ADMIN)


class ClientsFailed(MiniSGLError):
    """A process of the clients did not begin, or ended with an error, which it has printed."""


@dataclass(slots=True)
class Server:
    """What is seen of the server."""

    web_bytes: int = 0
    """The largest resident size of a web process."""
    tokenizer_bytes: int = 0
    """The largest resident size of a tokenizer."""
    waited_s: dict[str, list[float]] = field(default_factory=dict)
    """Web process -> how long it had waited for a core, by Linux, at the first look and at the last."""
    redis_bytes: int = 0
    redis_budget_bytes: int = 0
    """Redis' maxmemory; 0 if it has none."""
    deaths: list[str] = field(default_factory=list)
    replaced: int = 0
    """Tokenizers that were replaced because one request took too long, as is meant."""


class Target:
    """A running server."""

    def __init__(self, folder: Path, port: int, pid: int) -> None:
        self.port = port
        self._folder = folder
        self._pid = pid

    def watch(self, length_s: float) -> Server:
        """Look at the server for so long; return what was seen."""
        server = Server()
        end_s = time.monotonic() + length_s
        with redis.Redis(unix_socket_path=str(self._folder / "redis.sock")) as client:
            while time.monotonic() < end_s:
                look(server, client, self._pid)
                time.sleep(LOOK_EVERY_S)
        return server

    def read_deaths(self, server: Server) -> None:
        """Add the workers that have died since the start."""
        read_deaths(server, self._folder / "minisgl.log")


@contextlib.contextmanager
def target(program: Path, model: Path, flags: Sequence[str]) -> Iterator[Target]:
    """Run the server of *program* with a small model below the folder *model*."""
    with (
        tempfile.TemporaryDirectory(prefix="minisgl-attack-", ignore_cleanup_errors=True) as folder,
        our_server(Path(folder), ["--model", str(nonsense(model)), *KEYS, *flags], program=program) as (
            served,
            _,
        ),
    ):
        yield Target(Path(folder), int(served.url.rpartition(":")[2]), served.pid)


class Client:
    """A process of clients; see `clients`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._process = process

    def ready(self) -> Client:
        """Wait until it is prepared. Like all below, raises ClientsFailed if the process ends."""
        self._line()
        return self

    def go(self) -> None:
        """Let it begin; do not wait."""
        self._say(b"go\n")

    def begun(self) -> None:
        """Wait until all of its clients have begun."""
        self._line()

    def stop(self) -> None:
        """Let it end; do not wait."""
        self._say(b"stop\n")

    def result(self) -> dict[str, Any]:
        """Return what it saw, when it has ended."""
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_line` finds
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ClientsFailed(f"the clients of {self.name} ended with {self._process.wait()}; their error is above")
        return line


@contextlib.contextmanager
def client(name: str, order: Order) -> Iterator[Client]:
    """Start a process of clients; it is ready after `Client.ready`."""
    command = [sys.executable, "-m", "chaos.attack.clients", name, json.dumps(asdict(order))]
    with started(command, None, environment={"PYTHONPATH": str(ROOT / "tests")}, alone=True) as process:
        yield Client(name, process)


def begin(clients: Sequence[Client]) -> None:
    """Let clients begin together; wait until all have."""
    for each in clients:
        each.go()
    for each in clients:
        each.begun()


def end(clients: Sequence[Client]) -> dict[str, dict[str, Any]]:
    """End clients together, as attackers may take long with their small share of a core; return name -> what it saw."""
    for each in clients:
        each.stop()
    return {each.name: each.result() for each in clients}


def look(server: Server, redis_client: redis.Redis, pid: int) -> None:
    """Look at the processes below *pid*, and at Redis."""
    for each in tree_of(pid):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
            if b"--listen-fd" in words:
                server.web_bytes = max(server.web_bytes, _largest_bytes(each))
                waited_s = int(Path(f"/proc/{each}/schedstat").read_text().split()[1]) / 1e9
                server.waited_s[str(each)] = [server.waited_s.get(str(each), [waited_s])[0], waited_s]
            elif b"tokenize" in words:
                server.tokenizer_bytes = max(server.tokenizer_bytes, _largest_bytes(each))
    with contextlib.suppress(redis.RedisError):
        answer: Any = redis_client.info("memory")
        server.redis_bytes = max(server.redis_bytes, int(answer["used_memory"]))
        server.redis_budget_bytes = int(answer["maxmemory"])


def _largest_bytes(pid: int) -> int:
    """Return the largest resident size of a process until now, by Linux."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def read_deaths(server: Server, said: Path) -> None:
    """Read in the server's log which workers died."""
    for text in said.read_text(errors="replace").splitlines():
        if '"worker_died"' in text:
            line = json.loads(text)
            if line["code"] == EXIT_REPLACE:
                server.replaced += 1
            else:
                server.deaths.append(f"{line['worker']} with {line['code']}")
