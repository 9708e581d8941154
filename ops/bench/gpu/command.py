"""The phases of `minisgl bench gpu`, its flags, and what becomes of the figures. It measures nothing itself."""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, cast

from rich.console import Console

from ops.bench import report
from ops.bench.gpu import document, install, show
from ops.bench.gpu.document import Document, Phase
from ops.bench.gpu.phase import Scale
from ops.bench.gpu.runner import Planned, interruptible, run_all
from pipeline.errors import ConfigError
from pipeline.flags import flag, parse_flags, seconds

ABOUT: Final = """\
Tells what this code does on a GPU: what the machine has and can do, whether CUDA computes what a CPU computes, how fast
the engine and the server are. Each phase is a process of its own with a limit; one that fails or hangs is reported, and
the next one runs. Without a GPU the phases that can run on a CPU do, at small sizes. Exits with 1 when something was
wrong or failed.
"""
PHASES: Final = (  # by worth for the time: what the budget cuts off is at the end; docs/gpu-check.md has the sum
    Planned("machine", "ops.bench.gpu.machine", 20.0),
    Planned("probes", "ops.bench.gpu.probes", 30.0),
    Planned("flashinfer", "ops.bench.gpu.flashinfer", 150.0),  # it compiles what the later phases use
    Planned("parity", "ops.bench.gpu.parity", 100.0),
    Planned("engine", "ops.bench.gpu.engine", 100.0),
    Planned("server", "ops.bench.gpu.server", 120.0),
    Planned("protocol", "ops.bench.gpu.protocol", 150.0),
    Planned("graphs", "ops.bench.gpu.graphs", 60.0),
    Planned("overlap", "ops.bench.gpu.overlap", 60.0),
    Planned("deterministic", "ops.bench.gpu.deterministic", 90.0),
    Planned("collectives", "ops.bench.gpu.collectives", 50.0),
    Planned("sampling", "ops.bench.gpu.sampling", 60.0),
    Planned("fa", "ops.bench.gpu.fa", 1200.0, by_name=True),  # its kernels compile for minutes
)
BUDGET_S: Final[Mapping[str, float]] = {"cuda": 450.0, "cpu": 120.0}
INTERRUPTED: Final = 130


def phase_names(text: str) -> tuple[str, ...]:
    """Parse `a,b`: phases, whatever their order."""
    known = [phase.name for phase in PHASES]
    names = tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: no such phase; expected some of {','.join(known)}")
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: must be phases with commas between them")
    return names


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """What runs, where, and for how long."""

    budget_s: float = flag(
        "--budget", default=0.0, parse=seconds, help="seconds for all phases together [450 on a GPU, 120 on a CPU]"
    )
    phases: tuple[str, ...] = flag(
        "--phases",
        default=(),
        parse=phase_names,
        help=(
            f"only these, with commas between them: {','.join(phase.name for phase in PHASES)} [all but "
            f"{','.join(phase.name for phase in PHASES if phase.by_name)}]"
        ),
    )
    device: str = flag(
        "--device", default="auto", choices=("auto", "cuda", "cpu"), help="device to check; auto: a GPU if there is one"
    )
    size: str = flag(
        "--size",
        default="auto",
        choices=("auto", "toy", "small", "full"),
        help=("amount of measuring; auto: full on a GPU, small on a CPU; toy: a minute, its figures mean nothing"),
    )
    json: str = flag("--json", default="", help="JSON file for all figures, written after each phase")
    wheels: str = flag(
        install.FLAG, default="", help="folder of wheels (`make gpu-wheels`) to unpack for this run; needs no network"
    )


def run(arguments: Sequence[str], environment: Mapping[str, str], install_s: float | None) -> int:
    """Run the phases; return the exit code. *install_s* is what --wheels took.

    Raises:
        ConfigError: The flags cannot work, or there is no GPU where one is asked for.
    """
    (config,) = parse_flags("bench gpu", (GpuConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--json", config.json)
    if config.device == "cuda" and not has_gpu():
        raise ConfigError(
            "--device cuda: NVIDIA's driver (libcuda.so.1) is not here, or has no GPU; check nvidia-smi, or pass "
            "--device cpu"
        )
    device = cast(
        Literal["cuda", "cpu"], ("cuda" if has_gpu() else "cpu") if config.device == "auto" else config.device
    )
    size = cast(
        Literal["toy", "small", "full"],
        ("full" if device == "cuda" else "small") if config.size == "auto" else config.size,
    )
    budget_s = config.budget_s or BUDGET_S[device]
    chosen = [phase for phase in PHASES if phase.name in config.phases or not (config.phases or phase.by_name)]
    began, began_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()

    def found(done: Sequence[Phase]) -> Document:
        return Document(
            arguments=tuple(arguments),
            began=began,
            device=device,
            size=size,
            budget_s=budget_s,
            install_s=install_s,
            wall_s=time.monotonic() - began_s,
            finished=len(done) == len(chosen) and not stop.is_set(),
            cut=tuple(phase.name for phase in done if phase.status == "cut"),
            phases=tuple(done),
        )

    def keep(done: Sequence[Phase]) -> None:
        if config.json:
            document.write(Path(config.json), found(done))
        print(f"{done[-1].name}: {show.outcome(done[-1])}", file=sys.stderr, flush=True)

    with interruptible() as stop, Console(stderr=True).status("", refresh_per_second=1) as status:
        done = run_all(chosen, Scale(device, size), budget_s, stop, keep, lambda phase: status.update(phase.name))
    show.table(found(done))
    if stop.is_set():
        return INTERRUPTED
    return 0 if found(done).ok else 1


def has_gpu() -> bool:
    """Return whether NVIDIA's driver is here and has a device. It imports no torch, which takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
