"""One kind of attackers after the other: how much longer do streams pause than beside no attack?

Each run has a server of its own, with the same clients twice: first while the attackers are prepared and silent, then
beside them. So the clients' own share of the cores is in both.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from ops.bench import report
from ops.bench.attack.clients import HEALTH, NEWCOMERS, STREAMS
from ops.bench.attack.config import AttackConfig
from ops.bench.attack.kinds import ALONE, KINDS, Order
from ops.bench.attack.target import Client, ClientsFailed, Server, Target, begin, client, end, target
from ops.bench.attack.together import answered, broken_by_processes
from ops.bench.peers import SideFailed

SETTLE_S: Final = 1.0
"""Between the two halves of a run: the streams of the first one are cancelled."""
TOKENS: Final = 3900
"""Of a stream: it outlasts a run."""


@dataclass(frozen=True, slots=True)
class Half:
    """What the clients saw, and what was seen of the server."""

    health: Mapping[str, Any]
    streams: Mapping[str, Any]
    newcomers: Mapping[str, Any]
    server: Server

    @property
    def health_ms(self) -> list[float]:
        return list(self.health["ms"])

    @property
    def pause_s(self) -> float:
        return float(self.streams["longest_pause_ms"]) / 1000

    @property
    def first_ms(self) -> list[float]:
        return list(self.newcomers["first_ms"])


@dataclass(frozen=True, slots=True)
class Run:
    """One run: without the attack and with it."""

    quiet: Half
    attacked: Half
    attack: Mapping[str, Any]
    """What the attackers got; see `kinds.Attack`."""


@dataclass(frozen=True, slots=True)
class Medians:
    """The runs of one kind, by their medians."""

    quiet_pause_s: float
    pause_s: float
    quiet_health_p99_ms: float
    health_p99_ms: float
    health_max_ms: float
    quiet_first_ms: float
    """Largest time to the first token of another client."""
    first_ms: float
    web_bytes: float
    tokenizer_bytes: float
    cpu_s: float

    @property
    def longer_s(self) -> float:
        """How much longer a stream pauses beside the attack."""
        return self.pause_s - self.quiet_pause_s


def attack(config: AttackConfig, folder: Path, program: Path) -> dict[str, Any]:
    """Attack servers of *program*, print the figures, and return them with a sentence for each broken bound."""
    runs: dict[str, list[Run]] = {}
    failed: list[str] = []
    with Console(stderr=True).status("", refresh_per_second=1) as status:
        for kind in config.kinds or ALONE:
            for number in range(1, config.runs + 1):
                status.update(f"{kind}: run {number} of {config.runs}")
                try:
                    runs.setdefault(kind, []).append(measured(kind, config, folder, program))
                except (ClientsFailed, SideFailed) as error:  # it is a finding, and the other kinds are worth a look
                    failed.append(f"{kind}: {error}")
    runs = {kind: of_it for kind, of_it in runs.items() if of_it}
    print(table(runs, config))
    return {
        "runs": {kind: [_plain(run) for run in of_it] for kind, of_it in runs.items()},
        "broken": [*failed, *(f"{kind}: {text}" for kind, of_it in runs.items() for text in broken(of_it, config))],
    }


def measured(kind: str, config: AttackConfig, folder: Path, program: Path) -> Run:
    """Start a server and its clients; let them be alone, and then beside the attack."""
    length_s = config.seconds or KINDS[kind].seconds
    flags = [*KINDS[kind].serve_flags, *shlex.split(config.serve_flags)]
    with target(program, folder, flags) as server, contextlib.ExitStack() as stack:
        order = Order(server.port, config.streams, TOKENS, False, config.idle)
        attackers = stack.enter_context(client(kind, order)).ready()
        innocents = [stack.enter_context(client(role, order)).ready() for role in (STREAMS, NEWCOMERS, HEALTH)]
        quiet, _ = _half(server, innocents, None, length_s)
        time.sleep(SETTLE_S)
        attacked, told = _half(server, innocents, attackers, length_s)
        server.read_deaths(attacked.server)
    return Run(quiet, attacked, told)


def _half(
    server: Target, innocents: Sequence[Client], attackers: Client | None, length_s: float
) -> tuple[Half, dict[str, Any]]:
    hostile = [attackers] if attackers else []
    for group in (innocents, hostile):
        begin(group)
    seen = server.watch(length_s)
    told = end([*innocents, *hostile])
    return Half(told[HEALTH], told[STREAMS], told[NEWCOMERS], seen), told[attackers.name] if attackers else {}


def medians(runs: Sequence[Run]) -> Medians:
    """Return what is shown of the runs of one kind."""
    return Medians(
        quiet_pause_s=median(run.quiet.pause_s for run in runs),
        pause_s=median(run.attacked.pause_s for run in runs),
        quiet_health_p99_ms=median(report.spread_of(run.quiet.health_ms).p99 for run in runs),
        health_p99_ms=median(report.spread_of(run.attacked.health_ms).p99 for run in runs),
        health_max_ms=median(max(run.attacked.health_ms, default=0.0) for run in runs),
        quiet_first_ms=median(max(run.quiet.first_ms, default=0.0) for run in runs),
        first_ms=median(max(run.attacked.first_ms, default=0.0) for run in runs),
        web_bytes=max(run.attacked.server.web_bytes for run in runs),
        tokenizer_bytes=max(run.attacked.server.tokenizer_bytes for run in runs),
        cpu_s=median(run.attack["cpu_s"] for run in runs),
    )


def broken(runs: Sequence[Run], config: AttackConfig) -> list[str]:
    """Return a sentence for each bound that the runs of one kind broke."""
    seen, found = medians(runs), []
    if seen.longer_s > config.pause_s:
        found.append(
            f"streams paused for {seen.pause_s:.2f} s, and without the attack for {seen.quiet_pause_s:.2f} s; "
            f"the bound of the difference is {config.pause_s:g} s."
        )
    if seen.health_p99_ms > config.health_ms:
        found.append(
            f"/health took {seen.health_p99_ms:.1f} ms (p99), and without the attack "
            f"{seen.quiet_health_p99_ms:.1f} ms; the bound is {config.health_ms:g} ms."
        )
    if failures := sum(run.attacked.health["failures"] for run in runs):
        found.append(f"/health did not answer 200 for {failures} times.")
    if early := [text for run in runs for text in run.attacked.streams["early"]]:
        found.append(f"{len(early)} streams ended early; the first: {early[0]}")
    for what, counts in _summed(run.attacked.newcomers["answers"] for run in runs).items():
        wrong = {status: number for status, number in counts.items() if status != "200"}
        if wrong:
            found.append(f"other clients did not get 200:{answered({what: wrong})[0][1:]}.")
    for text in dict.fromkeys(text for run in runs for text in broken_by_processes(run.attacked.server)):
        found.append(text[0].lower() + text[1:])
    return found


def _summed(answers: Any) -> dict[str, dict[str, int]]:
    """Add up the answers of several runs."""
    total: dict[str, dict[str, int]] = {}
    for each in answers:
        for what, counts in each.items():
            for status, number in counts.items():
                total.setdefault(what, {}).setdefault(status, 0)
                total[what][status] += number
    return total


def table(runs: Mapping[str, Sequence[Run]], config: AttackConfig) -> str:
    """Return a table with a row for each kind, and what its attackers got."""
    heads = {
        "": "",
        "pause quiet": "s",
        "attacked": "s",
        "longer": f"<= {config.pause_s:g} s",
        "/health p99": f"<= {config.health_ms:g} ms",
        "max": "ms",
        "first token quiet": "ms",
        "attacked ": "ms",
        "web": "MiB",
        "tokenizer": "MiB",
        "attackers' CPU": "of one core",
    }
    shown: list[tuple[str, ...]] = [tuple(map(str.strip, heads)), tuple(heads.values())]
    for kind, of_it in runs.items():
        seen = medians(of_it)
        figures = (seen.quiet_pause_s, seen.pause_s, seen.longer_s)
        times = (seen.health_p99_ms, seen.health_max_ms, seen.quiet_first_ms, seen.first_ms)
        sizes = (seen.web_bytes / (1 << 20), seen.tokenizer_bytes / (1 << 20))
        shown.append(
            (
                kind,
                *(f"{value:.2f}" for value in figures),
                *(f"{value:,.0f}" for value in (*times, *sizes)),
                f"{seen.cpu_s / (config.seconds or KINDS[kind].seconds):.0%}",
            )
        )
    lines = [
        f"Beside {config.streams} streams, {config.runs} x without each kind and with it",
        f"On {report.cpu_model()}",
        "Medians. A first token is the slowest of a run. Sizes are the largest of all runs.",
        "",
        report.aligned(shown),
        "",
        "What the attackers got:",
    ]
    for kind, of_it in runs.items():
        lines += answered(_summed(run.attack["answers"] for run in of_it))
        if connections := sum(run.attack["connections"] for run in of_it):
            lines.append(f"  {kind}: {connections:,} connections")
    return "\n".join(lines)


def _plain(run: Run) -> dict[str, Any]:
    halves = {"quiet": run.quiet, "attacked": run.attacked}
    told = {name: report.options_of(half) | {"server": report.options_of(half.server)} for name, half in halves.items()}
    return told | {"attack": run.attack}
