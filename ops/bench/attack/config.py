"""The flags of `minisgl bench attack`."""

from __future__ import annotations

from dataclasses import dataclass

from ops.bench.attack.kinds import ALONE, KINDS
from ops.bench.serve import above_zero
from pipeline.flags import at_least, flag, seconds, yes_or_no


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
