"""`minisgl bench attack`, or `make attack`: a server under hostile clients, and what innocent ones notice of it.

The server is a real one, on an embedded Redis, with a small random model. Attackers have a low priority, so that on a
few cores they do not take the CPU time that the server needs.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis

from ops.bench import attack_clients, nonsense, report
from ops.bench.peers import our_server
from ops.bench.processes import PROGRAM, interrupt_on_sigterm, started, tree_of
from ops.bench.serve import above_zero
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.flags import at_least, flag, parse_flags, seconds
from pipeline.process.parent import EXIT_REPLACE

ABOUT: Final = """\
Attacks a server that it starts, beside innocent streams: wrong and legal giant bodies, idle connections, clients that
send byte by byte, lists of prompts, giant tokenizes, and clients that leave. Exits with 1 if a bound is broken: the p99
of /health, streams that end early, workers that die, the memory of web processes, the memory of Redis.
"""
WEB_BYTES: Final = 400 << 20
"""Most memory of a web process."""
LOOK_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class AttackConfig:
    """The attack, and the server."""

    seconds: float = flag("--seconds", default=60.0, parse=seconds, help="length of the attack")
    streams: int = flag("--streams", default=8, parse=at_least(1), help="innocent streams at any time")
    stream_tokens: int = flag("--stream-tokens", default=1000, parse=at_least(2), help="tokens of each of them")
    idle: int = flag("--idle", default=1500, parse=at_least(0), help="connections that ask for nothing")
    health_ms: float = flag("--health-ms", default=100.0, parse=above_zero, help="bound of the p99 of /health, in ms")
    checkout: str = flag("--checkout", default="", help="folder of another version of this project [this one]")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for `minisgl serve`, as one quoted text")
    output: str = flag("--output", default="", help="JSON file for the setup and all figures")


@dataclass(slots=True)
class Server:
    """What is seen of the server from outside."""

    web_bytes: int = 0
    """The largest resident size of a web process."""
    waited_s: dict[str, list[float]] = field(default_factory=dict)
    """Web process -> how long it had waited for a core, by Linux, at the first look and at the last."""
    redis_bytes: int = 0
    redis_budget_bytes: int = 0
    """Redis' maxmemory; 0 if it has none."""
    deaths: list[str] = field(default_factory=list)
    replaced: int = 0
    """Tokenizers that were replaced because one request took too long, as is meant."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The result."""

    health: Mapping[str, Any]
    streams: Mapping[str, Any]
    server: Server
    answers: Mapping[str, Mapping[str, int]]
    connections: int

    @property
    def health_ms(self) -> report.Spread:
        return report.spread_of(self.health["ms"])


class ClientsFailed(MiniSGLError):
    """A process of the clients did not begin, or ended with an error, which it has printed."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Attack; return the exit code.

    Raises:
        ConfigError: The flags cannot work.
        MiniSGLError: The server did not start, or a process of the clients failed.
    """
    (config,) = parse_flags("bench attack", (AttackConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    program = Path(config.checkout) / PROGRAM.name if config.checkout else PROGRAM
    if not program.is_file():
        raise ConfigError(f"--checkout {config.checkout}: no minisgl.py there; pass the folder of a checkout")
    interrupt_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="minisgl-attack-", ignore_cleanup_errors=True) as folder:
        figures = measured(config, Path(folder), program)
    problems = broken(figures, config.health_ms)
    print(table(figures, config))
    print("\n".join(["", *problems]) if problems else "\nNo bound is broken.")
    document = {
        "options": report.options_of(config),
        "figures": report.options_of(figures) | {"server": report.options_of(figures.server)},
        "health_ms": report.options_of(figures.health_ms),
        "broken": problems,
    }
    report.save(config.output, ("minisgl", "bench", "attack", *arguments), ("redis",), document)
    return 1 if problems else 0


def measured(config: AttackConfig, folder: Path, program: Path) -> Figures:
    """Start the server and its clients, and end them."""
    flags = ["--model", str(nonsense.ensure(folder / "models")), *shlex.split(config.serve_flags)]
    with our_server(folder, flags, program=program) as (served, _), contextlib.ExitStack() as stack:
        port = int(served.url.rpartition(":")[2])

        def begin(role: str, number: int = 0) -> subprocess.Popen[bytes]:
            return stack.enter_context(_client(role, port, number, config.stream_tokens))

        streams = begin(attack_clients.STREAMS, config.streams)
        attackers = [begin(role, config.idle) for role in attack_clients.ATTACKERS]
        health = begin(attack_clients.HEALTH)
        server = Server()
        end_s = time.monotonic() + config.seconds
        with redis.Redis(unix_socket_path=str(folder / "redis.sock")) as client:
            while time.monotonic() < end_s:
                _look(server, client, served.pid)
                time.sleep(LOOK_EVERY_S)
        told_health = _result(health)
        told = [_result(each) for each in attackers]
        told_streams = _result(streams)
        _read_deaths(server, folder / "minisgl.log")
    answers = {kind: counts for each in told for kind, counts in each["answers"].items()}
    return Figures(told_health, told_streams, server, answers, sum(each["connections"] for each in told))


@contextlib.contextmanager
def _client(role: str, *order: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of clients, once it has begun."""
    command = [sys.executable, "-m", "ops.bench.attack_clients", role, *map(str, order)]
    with started(command, None, alone=True) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise ClientsFailed(f"the clients of {role} ended with {process.wait()}; their error is above")
        yield process


def _result(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """End a process of clients; return what it saw."""
    text, _ = process.communicate()
    if process.returncode or not text:
        raise ClientsFailed(f"a process of the clients ended with {process.returncode}; its error is above")
    told: dict[str, Any] = json.loads(text)
    return told


def _look(server: Server, client: redis.Redis, pid: int) -> None:
    for each in tree_of(pid):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
            if b"--listen-fd" in words:
                server.web_bytes = max(server.web_bytes, _largest_bytes(each))
                waited_s = int(Path(f"/proc/{each}/schedstat").read_text().split()[1]) / 1e9
                server.waited_s[str(each)] = [server.waited_s.get(str(each), [waited_s])[0], waited_s]
    with contextlib.suppress(redis.RedisError):
        told: Any = client.info("memory")
        server.redis_bytes = max(server.redis_bytes, int(told["used_memory"]))
        server.redis_budget_bytes = int(told["maxmemory"])


def _largest_bytes(pid: int) -> int:
    """Return the largest resident size of a process until now, by Linux."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _read_deaths(server: Server, said: Path) -> None:
    """Read in the server's log which workers died."""
    for text in said.read_text(errors="replace").splitlines():
        if '"worker_died"' in text:
            line = json.loads(text)
            if line["code"] == EXIT_REPLACE:
                server.replaced += 1
            else:
                server.deaths.append(f"{line['worker']} with {line['code']}")


def broken(figures: Figures, health_ms: float) -> list[str]:
    """Return a sentence for each bound that is broken."""
    health, streams, server = figures.health_ms, figures.streams, figures.server
    found = []
    if health.p99 > health_ms or not health.count:
        found.append(f"/health took {health.p99:.1f} ms (p99); the bound is {health_ms:g} ms.")
    if figures.health["failures"]:
        found.append(f"/health did not answer 200 for {figures.health['failures']} of {health.count} times.")
    if early := streams["early"]:
        found.append(f"{len(early)} streams ended early; the first: {early[0]}")
    if not streams["whole"]:
        found.append("No stream came to its end.")
    if server.deaths:
        found.append(f"Workers died: {', '.join(server.deaths)}.")
    if server.web_bytes > WEB_BYTES:
        found.append(f"A web process took {_mib(server.web_bytes)}; the bound is {_mib(WEB_BYTES)}.")
    if 0 < server.redis_budget_bytes < server.redis_bytes:
        found.append(f"Redis took {_mib(server.redis_bytes)}; its budget is {_mib(server.redis_budget_bytes)}.")
    return found


def table(figures: Figures, config: AttackConfig) -> str:
    """Return the figures as a table, and the answers of the attackers as another one."""
    health, streams, server = figures.health_ms, figures.streams, figures.server
    waited_s = max((last - first for first, last in server.waited_s.values()), default=0.0)
    budget = f"below {_mib(server.redis_budget_bytes)}" if server.redis_budget_bytes else "none"
    rows = [
        ("", "measured", "bound"),
        ("/health p50, ms", f"{health.p50:.1f}", ""),
        ("/health p99, ms", f"{health.p99:.1f}", f"{config.health_ms:g}"),
        ("/health max, ms", f"{max(figures.health['ms'], default=0.0):.1f}", ""),
        ("web process waited for a core", f"{waited_s / config.seconds:.0%} of the time", ""),
        ("/health without a 200", f"{figures.health['failures']} of {health.count}", "0"),
        ("streams that came whole", str(streams["whole"]), "at least 1"),
        ("streams that ended early", str(len(streams["early"])), "0"),
        ("streams that had to try again (503)", str(streams["refused"]), ""),
        ("longest pause of a stream, ms", f"{streams['longest_pause_ms']:.0f}", ""),
        ("workers that died", str(len(server.deaths)), "0"),
        ("tokenizers replaced after a slow request", str(server.replaced), ""),
        ("web process, largest", _mib(server.web_bytes), _mib(WEB_BYTES)),
        ("Redis, used memory, largest", _mib(server.redis_bytes), budget),
    ]
    lines = [f"{config.seconds:g} s of attack beside {config.streams} streams, on {report.cpu_model()}", ""]
    lines += [
        report.aligned(rows),
        "",
        f"{figures.connections:,} connections were opened to ask for nothing, or slowly",
    ]
    lines += [f"{kind}: " + ", ".join(_counted(counts)) for kind, counts in figures.answers.items()]
    return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> list[str]:
    return [f"{number} x {status}" for status, number in sorted(counts.items())]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
