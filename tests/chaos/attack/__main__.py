"""`make attack`: a server under hostile clients, and what innocent ones notice of it.

All kinds of attackers come together or, with `--alone`, one kind after the other. Then each run has a server of its
own, with the same clients twice: first while the attackers are prepared and silent, then beside them. So the clients'
own share of the cores is in both.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from chaos.attack.clients import HEALTH, NEWCOMERS, STREAMS
from chaos.attack.kinds import ALONE, KINDS, Order
from chaos.attack.target import Client, ClientsFailed, Server, Target, begin, client, end, target
from chaos.measure import exit_code, parsed
from rich.console import Console

from ops.bench import report
from ops.bench.targets import PROGRAM, SideFailed, interrupt_on_sigterm
from pipeline.errors import ConfigError
from pipeline.flags import above_zero, at_least, flag, seconds, yes_or_no

ABOUT: Final = """\
Attacks a server that it starts, beside innocent clients: with all kinds of attackers together or, with --alone, with
one kind after the other, each beside a run without it. Exits with 1 if a bound is broken: the p99 of /health, streams
that end early, workers that die, the memory of web processes, the memory of Redis. With --alone also: how much longer
streams pause than without the attack, and requests of other clients that fail.

Kinds:
""" + "\n".join(f"  {name:<11} {kind.about}" for name, kind in KINDS.items())
TOGETHER: Final = "together"
"""The name of the run of all kinds."""
TOGETHER_S: Final = 60.0
SETTLE_S: Final = 1.0
"""Between the two halves of a run: the streams of the first one are cancelled."""
OUTLASTING: Final = 3900
"""Tokens of a stream that outlasts a run."""
WEB_BYTES: Final = 500_000_000
"""Most memory of a web process."""
LOG_FLAGS: Final = ("--max-log-bytes", "1G")
"""So that all kinds together can use up their share of the log on any machine."""


@dataclass(frozen=True, slots=True)
class AttackConfig:
    """The attack, and the server."""

    seconds: float | None = flag(
        "--seconds", default=None, parse=seconds, help="length of the attack [60; with --alone 10, stops 30]"
    )
    kinds: tuple[str, ...] = flag(
        "--kinds",
        default=(),
        choices=tuple(KINDS),
        repeated=True,
        help=f"kinds of attackers [all; with --alone all but {', '.join(name for name in KINDS if name not in ALONE)}]",
    )
    alone: bool = flag(
        "--alone", default=False, parse=yes_or_no, help="one kind after the other, each beside a run without it"
    )
    runs: int = flag("--runs", default=3, parse=at_least(1), help="runs of each kind with --alone; their medians count")
    streams: int = flag("--streams", default=8, parse=at_least(1), help="innocent streams at any time")
    stream_tokens: int = flag("--stream-tokens", default=1000, parse=at_least(2), help="tokens of each of them")
    idle: int = flag("--idle", default=1500, parse=at_least(0), help="connections that ask for nothing")
    health_ms: float = flag("--health-ms", default=100.0, parse=above_zero, help="bound of the p99 of /health, in ms")
    pause_s: float = flag(
        "--pause", default=0.3, parse=above_zero, help="bound of how much longer streams pause with --alone, in seconds"
    )
    checkout: str = flag("--checkout", default="", help="folder of another version of this project [this one]")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for `minisgl serve`, as one quoted text")
    output: str = flag("--output", default="", help="JSON file for the setup and all figures")


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen in a while: by the clients, of the server, and by the attackers of each kind, if there were any."""

    length_s: float
    health: Mapping[str, Any]
    streams: Mapping[str, Any]
    newcomers: Mapping[str, Any]
    server: Server
    attacks: Mapping[str, Mapping[str, Any]]
    """Kind -> what its attackers got; see `kinds.Attack`."""

    @property
    def waited(self) -> float:
        """The part of the time that a web process waited for a core."""
        return max((last - first for first, last in self.server.waited_s.values()), default=0.0) / self.length_s


@dataclass(frozen=True, slots=True)
class Run:
    """One run: beside the attack and, if it was measured, without it."""

    attacked: Seen
    quiet: Seen | None = None


FIGURES: Final[Mapping[str, tuple[str, str, Callable[[Seen], float]]]] = {
    "pause": ("s", ".2f", lambda seen: seen.streams["longest_pause_ms"] / 1000),
    "/health p99": ("ms", ",.0f", lambda seen: report.spread_of(seen.health["ms"]).p99),
    "max": ("ms", ",.0f", lambda seen: max(seen.health["ms"], default=0.0)),
    "first token": ("ms", ",.0f", lambda seen: max(seen.newcomers["first_ms"], default=0.0)),
    "waited": ("of the time", ".0%", lambda seen: seen.waited),
    "web": ("MiB", ",.0f", lambda seen: seen.server.web_bytes / (1 << 20)),
    "tokenizer": ("MiB", ",.0f", lambda seen: seen.server.tokenizer_bytes / (1 << 20)),
    "Redis": ("MiB", ",.0f", lambda seen: seen.server.redis_bytes / (1 << 20)),
    "attackers' CPU": ("s", ".1f", lambda seen: sum(each["cpu_s"] for each in seen.attacks.values())),
}
"""Name -> unit, format, value. The pause is the longest of any stream; a first token is the slowest of a run."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Attack; return the exit code.

    Raises:
        ConfigError: The flags cannot work.
        MiniSGLError: All kinds come together, and the server did not start, or a process of the clients failed.
    """
    config = parsed("make attack", AttackConfig, ABOUT, arguments, environment)
    report.check_can_write("--output", config.output)
    program = Path(config.checkout) / PROGRAM.name if config.checkout else PROGRAM
    if not program.is_file():
        raise ConfigError(f"--checkout {config.checkout}: no minisgl.py there; pass the folder of a checkout")
    interrupt_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="minisgl-attack-model-", ignore_cleanup_errors=True) as folder:
        runs, failed = (alone if config.alone else together)(config, Path(folder), program)
    problems = [*failed, *(text for name, of_it in runs.items() for text in broken(name, of_it, config))]
    print(table(runs, config))
    print("\n".join(["", *(problems or ["No bound is broken."])]))
    document = {
        "options": report.options_of(config),
        "runs": {name: [_plain(run) for run in of_it] for name, of_it in runs.items()},
        "broken": problems,
    }
    report.save(config.output, ("make", "attack", *arguments), ("redis",), document)
    return 1 if problems else 0


Runs = dict[str, list[Run]]


def together(config: AttackConfig, folder: Path, program: Path) -> tuple[Runs, list[str]]:
    """Attack one server with all kinds; return the run, and why it failed: never, as that is raised."""
    kinds = config.kinds or tuple(KINDS)
    flags = [*LOG_FLAGS, *(flag for kind in kinds if kind != "labels" for flag in KINDS[kind].serve_flags)]
    flags += shlex.split(config.serve_flags)
    with target(program, folder, flags) as server, contextlib.ExitStack() as stack:
        order = Order(server.port, config.streams, config.stream_tokens, True, config.idle)
        attackers, innocents = _clients(kinds, order, stack)
        seen = _measured(server, innocents, attackers, config.seconds or TOGETHER_S)
    return {TOGETHER: [Run(seen)]}, []


def alone(config: AttackConfig, folder: Path, program: Path) -> tuple[Runs, list[str]]:
    """Attack a server for each run of each kind; return the runs, and why others failed."""
    runs: Runs = {}
    failed: list[str] = []
    with Console(stderr=True).status("", refresh_per_second=1) as status:
        for kind, number in itertools.product(config.kinds or ALONE, range(1, config.runs + 1)):
            status.update(f"{kind}: run {number} of {config.runs}")
            try:
                runs.setdefault(kind, []).append(one_alone(kind, config, folder, program))
            except (ClientsFailed, SideFailed) as error:  # it is a finding, and the other kinds are worth a look
                failed.append(f"{kind}: {error}")
    return {kind: of_it for kind, of_it in runs.items() if of_it}, failed


def one_alone(kind: str, config: AttackConfig, folder: Path, program: Path) -> Run:
    """Start a server and its clients; let them be alone, and then beside the attack."""
    length_s = config.seconds or KINDS[kind].seconds
    flags = [*KINDS[kind].serve_flags, *shlex.split(config.serve_flags)]
    with target(program, folder, flags) as server, contextlib.ExitStack() as stack:
        order = Order(server.port, config.streams, OUTLASTING, False, config.idle)
        attackers, innocents = _clients([kind], order, stack)
        quiet = _measured(server, innocents, [], length_s)
        time.sleep(SETTLE_S)
        return Run(_measured(server, innocents, attackers, length_s), quiet)


def _clients(kinds: Sequence[str], order: Order, stack: contextlib.ExitStack) -> tuple[list[Client], list[Client]]:
    """Return attackers of all *kinds* and innocent clients, once they are ready."""
    attackers = [stack.enter_context(client(kind, order)) for kind in kinds]
    innocents = [stack.enter_context(client(role, order)) for role in (STREAMS, NEWCOMERS, HEALTH)]
    for each in (*attackers, *innocents):
        each.ready()
    return attackers, innocents


def _measured(server: Target, innocents: Sequence[Client], attackers: Sequence[Client], length_s: float) -> Seen:
    for group in (innocents, attackers):
        begin(group)
    seen = server.watch(length_s)
    results = end([*innocents, *attackers])
    if attackers:
        server.read_deaths(seen)
    attacks = {each.name: results[each.name] for each in attackers}
    return Seen(length_s, results[HEALTH], results[STREAMS], results[NEWCOMERS], seen, attacks)


def figure(name: str, all_seen: Sequence[Seen]) -> float:
    """Return the median of a figure. Sizes are the largest."""
    unit, _, value = FIGURES[name]
    return (max if unit == "MiB" else median)(map(value, all_seen))


def halves(runs: Sequence[Run]) -> tuple[list[Seen], list[Seen]]:
    """Return what was seen beside the attack, and what without it, where that was measured."""
    return [run.attacked for run in runs], [run.quiet for run in runs if run.quiet]


def broken(name: str, runs: Sequence[Run], config: AttackConfig) -> list[str]:
    """Return a sentence for each bound that runs of the same attack broke."""
    attacked, quiet = halves(runs)
    found = []
    if quiet and (longer_s := figure("pause", attacked) - figure("pause", quiet)) > config.pause_s:
        found.append(f"streams paused {longer_s:.2f} s longer than without it; the bound is {config.pause_s:g} s")
    if (p99_ms := figure("/health p99", attacked)) > config.health_ms or not all(
        seen.health["ms"] for seen in attacked
    ):
        found.append(f"/health took {p99_ms:.1f} ms (p99); the bound is {config.health_ms:g} ms")
    if failures := sum(seen.health["failures"] for seen in attacked):
        found.append(f"/health did not answer 200 for {failures} times")
    if early := [text for seen in attacked for text in seen.streams["early"]]:
        found.append(f"{len(early)} streams ended early; the first: {early[0]}")
    if not quiet and not any(seen.streams["whole"] for seen in attacked):
        found.append("no stream came to its end")
    others = _summed(seen.newcomers["answers"] for seen in attacked)
    wrong = {what: {status: counts[status] for status in counts if status != "200"} for what, counts in others.items()}
    if quiet and any(wrong.values()):
        found.append(f"other clients did not get 200: {'; '.join(answered(wrong))}")
    found += dict.fromkeys(text for seen in attacked for text in broken_by_processes(seen.server))
    return [f"{name}: {text}." for text in found]


def broken_by_processes(server: Server) -> list[str]:
    """Return what is said of each bound that a process of the server broke."""
    found = []
    if server.deaths:
        found.append(f"workers died: {', '.join(server.deaths)}")
    if server.web_bytes > WEB_BYTES:
        found.append(f"a web process took {_mib(server.web_bytes)}; the bound is {_mib(WEB_BYTES)}")
    if 0 < server.redis_budget_bytes < server.redis_bytes:
        found.append(f"Redis took {_mib(server.redis_bytes)}; its budget is {_mib(server.redis_budget_bytes)}")
    return found


def table(runs: Mapping[str, Sequence[Run]], config: AttackConfig) -> str:
    """Return a table with a row for each attack, and what attackers and other clients got."""
    heads = [("", *FIGURES), ("", *(unit for unit, _, _ in FIGURES.values()))]
    rows = [(name, *(_cell(each, of_it) for each in FIGURES)) for name, of_it in runs.items()]
    lines = [
        f"Beside {config.streams} streams, on {report.cpu_model()}",
        "Medians, and of sizes the largest; (in parentheses without the attack).",
        "",
        report.aligned([*heads, *rows]),
    ]
    for name, of_it in runs.items():
        attacked, _ = halves(of_it)
        attacks = [attack for seen in attacked for attack in seen.attacks.values()]
        streams = {key: sum(seen.streams[key] for seen in attacked) for key in ("whole", "refused")}
        connections = sum(each["connections"] for each in attacks)
        replaced = sum(seen.server.replaced for seen in attacked)
        lines += [
            f"\n{name}: {connections:,} connections for nothing or slowly, {replaced} tokenizers replaced",
            f"  streams: {streams['whole']} came whole, {streams['refused']} had to try again",
            *(f"  {line}" for line in answered(_summed(each["answers"] for each in attacks))),
            *(f"  others' {line}" for line in answered(_summed(seen.newcomers["answers"] for seen in attacked))),
        ]
    return "\n".join(lines)


def _cell(name: str, runs: Sequence[Run]) -> str:
    _, shown, _ = FIGURES[name]
    attacked, quiet = halves(runs)
    return f"{figure(name, attacked):{shown}}" + (f" ({figure(name, quiet):{shown}})" if quiet else "")


def _summed(answers: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up the answers of several runs."""
    total: dict[str, dict[str, int]] = {}
    for what, counts in (item for each in answers for item in each.items()):
        for status, number in counts.items():
            of_it = total.setdefault(what, {})
            of_it[status] = of_it.get(status, 0) + number
    return total


def answered(answers: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each thing that was asked: how often which status came."""
    return [
        f"{what}: " + ", ".join(f"{number} x {status}" for status, number in sorted(counts.items()))
        for what, counts in answers.items()
        if counts
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"


def _plain(run: Run) -> dict[str, Any]:
    halves = {name: half for name, half in (("quiet", run.quiet), ("attacked", run.attacked)) if half}
    return {name: report.options_of(half) | {"server": report.options_of(half.server)} for name, half in halves.items()}


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
