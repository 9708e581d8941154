"""Attacks as the flags say, and says which bounds are broken."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ops.bench import report
from ops.bench.attack import alone, together
from ops.bench.attack.config import AttackConfig
from ops.bench.attack.kinds import KINDS
from ops.bench.processes import PROGRAM, interrupt_on_sigterm
from pipeline.errors import ConfigError
from pipeline.flags import parse_flags

ABOUT: Final = """\
Attacks a server that it starts, beside innocent clients: with all kinds of attackers together or, with --alone, with
one kind after the other, each beside a run without it. Exits with 1 if a bound is broken: the p99 of /health, streams
that end early, workers that die, the memory of web processes, the memory of Redis. With --alone also: how much longer
streams pause than without the attack, and requests of other clients that fail.

Kinds:
""" + "\n".join(f"  {name:<11} {kind.about}" for name, kind in KINDS.items())


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Attack; return the exit code. See `ops.bench.attack.main`."""
    (config,) = parse_flags("bench attack", (AttackConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    program = Path(config.checkout) / PROGRAM.name if config.checkout else PROGRAM
    if not program.is_file():
        raise ConfigError(f"--checkout {config.checkout}: no minisgl.py there; pass the folder of a checkout")
    interrupt_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="minisgl-attack-model-", ignore_cleanup_errors=True) as folder:
        document: dict[str, Any] = (alone if config.alone else together).attack(config, Path(folder), program)
    problems = document["broken"]
    print("\n".join(["", *problems]) if problems else "\nNo bound is broken.")
    document = {"options": report.options_of(config)} | document
    report.save(config.output, ("minisgl", "bench", "attack", *arguments), ("redis",), document)
    return 1 if problems else 0
