"""All kinds of attackers at once: does the server stay alive, and do innocent streams come to their end?"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench import report
from ops.bench.attack.clients import HEALTH, NEWCOMERS, STREAMS
from ops.bench.attack.config import AttackConfig
from ops.bench.attack.kinds import KINDS, Order
from ops.bench.attack.target import Server, begin, client, end, target

SECONDS: Final = 60.0
WEB_BYTES: Final = 500_000_000
"""Most memory of a web process."""
LOG_FLAGS: Final = ("--max-log-bytes", "1G")
"""So that the attackers can use up their share of the log on any machine."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The result."""

    health: Mapping[str, Any]
    streams: Mapping[str, Any]
    newcomers: Mapping[str, Any]
    server: Server
    answers: Mapping[str, Mapping[str, int]]
    connections: int
    cpu_s: Mapping[str, float]
    """Kind -> CPU time of its attackers."""

    @property
    def health_ms(self) -> report.Spread:
        return report.spread_of(self.health["ms"])


def attack(config: AttackConfig, folder: Path, program: Path) -> dict[str, Any]:
    """Attack the server of *program*, print the figures, and return them with a sentence for each broken bound."""
    length_s = config.seconds or SECONDS
    figures = measured(config, length_s, folder, program)
    print(table(figures, config, length_s))
    return {
        "figures": report.options_of(figures) | {"server": report.options_of(figures.server)},
        "health_ms": report.options_of(figures.health_ms),
        "broken": broken(figures, config.health_ms),
    }


def measured(config: AttackConfig, length_s: float, folder: Path, program: Path) -> Figures:
    """Start the server and its clients, and end them."""
    kinds = config.kinds or tuple(KINDS)
    flags = [flag for kind in kinds if kind != "labels" for flag in KINDS[kind].serve_flags]
    with (
        target(program, folder, [*LOG_FLAGS, *flags, *shlex.split(config.serve_flags)]) as server,
        contextlib.ExitStack() as stack,
    ):
        order = Order(server.port, config.streams, config.stream_tokens, True, config.idle)
        attackers = [stack.enter_context(client(kind, order)) for kind in kinds]
        innocents = [stack.enter_context(client(role, order)) for role in (STREAMS, NEWCOMERS, HEALTH)]
        for each in (*attackers, *innocents):
            each.ready()
        for group in (innocents, attackers):
            begin(group)
        seen = server.watch(length_s)
        told = end([*innocents, *attackers])
        server.read_deaths(seen)
    hostile = {kind: told[kind] for kind in kinds}
    return Figures(
        told[HEALTH],
        told[STREAMS],
        told[NEWCOMERS],
        seen,
        {what: counts for each in hostile.values() for what, counts in each["answers"].items()},
        sum(each["connections"] for each in hostile.values()),
        {kind: each["cpu_s"] for kind, each in hostile.items()},
    )


def broken(figures: Figures, health_ms: float) -> list[str]:
    """Return a sentence for each bound that is broken."""
    health, streams = figures.health_ms, figures.streams
    found = []
    if health.p99 > health_ms or not health.count:
        found.append(f"/health took {health.p99:.1f} ms (p99); the bound is {health_ms:g} ms.")
    if figures.health["failures"]:
        found.append(f"/health did not answer 200 for {figures.health['failures']} of {health.count} times.")
    if early := streams["early"]:
        found.append(f"{len(early)} streams ended early; the first: {early[0]}")
    if not streams["whole"]:
        found.append("No stream came to its end.")
    return found + broken_by_processes(figures.server)


def broken_by_processes(server: Server) -> list[str]:
    """Return a sentence for each bound that a process of the server broke."""
    found = []
    if server.deaths:
        found.append(f"Workers died: {', '.join(server.deaths)}.")
    if server.web_bytes > WEB_BYTES:
        found.append(f"A web process took {mib(server.web_bytes)}; the bound is {mib(WEB_BYTES)}.")
    if 0 < server.redis_budget_bytes < server.redis_bytes:
        found.append(f"Redis took {mib(server.redis_bytes)}; its budget is {mib(server.redis_budget_bytes)}.")
    return found


def table(figures: Figures, config: AttackConfig, length_s: float) -> str:
    """Return the figures as a table, and the answers of the attackers as another one."""
    health, streams, server = figures.health_ms, figures.streams, figures.server
    first_ms = report.spread_of(figures.newcomers["first_ms"])
    waited_s = max((last - first for first, last in server.waited_s.values()), default=0.0)
    budget = f"below {mib(server.redis_budget_bytes)}" if server.redis_budget_bytes else "none"
    rows = [
        ("", "measured", "bound"),
        ("/health p50, ms", f"{health.p50:.1f}", ""),
        ("/health p99, ms", f"{health.p99:.1f}", f"{config.health_ms:g}"),
        ("/health max, ms", f"{max(figures.health['ms'], default=0.0):.1f}", ""),
        ("web process waited for a core", f"{waited_s / length_s:.0%} of the time", ""),
        ("/health without a 200", f"{figures.health['failures']} of {health.count}", "0"),
        ("streams that came whole", str(streams["whole"]), "at least 1"),
        ("streams that ended early", str(len(streams["early"])), "0"),
        ("streams that had to try again (503)", str(streams["refused"]), ""),
        ("longest pause of a stream, ms", f"{streams['longest_pause_ms']:.0f}", ""),
        ("first token of other clients p50, ms", f"{first_ms.p50:.0f}", ""),
        ("first token of other clients max, ms", f"{max(figures.newcomers['first_ms'], default=0.0):.0f}", ""),
        ("workers that died", str(len(server.deaths)), "0"),
        ("tokenizers replaced after a slow request", str(server.replaced), ""),
        ("web process, largest", mib(server.web_bytes), mib(WEB_BYTES)),
        ("tokenizer, largest", mib(server.tokenizer_bytes), ""),
        ("Redis, used memory, largest", mib(server.redis_bytes), budget),
        ("CPU time of the attackers", f"{sum(figures.cpu_s.values()):.1f} s", ""),
    ]
    lines = [f"{length_s:g} s of attack beside {config.streams} streams, on {report.cpu_model()}", ""]
    lines += [
        report.aligned(rows),
        "",
        f"{figures.connections:,} connections were opened to ask for nothing, slowly, or without end",
        "CPU time of each: " + ", ".join(f"{kind} {cpu_s:.1f} s" for kind, cpu_s in figures.cpu_s.items()),
        "",
        "What the attackers got:",
        *answered(figures.answers),
        "",
        "What other clients got:",
        *answered(figures.newcomers["answers"]),
    ]
    return "\n".join(lines)


def answered(answers: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each thing that was asked: how often which status came."""
    return [
        f"  {what}: " + ", ".join(f"{number} x {status}" for status, number in sorted(counts.items()))
        for what, counts in answers.items()
    ]


def mib(num_bytes: int) -> str:
    """Return a size as text."""
    return f"{num_bytes / (1 << 20):,.0f} MiB"
