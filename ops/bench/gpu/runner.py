"""Runs one phase as a process of its own, ends it at its limit with all that it has started, and says what it found."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
from pydantic import ValidationError

from ops.bench.gpu import child
from ops.bench.gpu.document import Item, Phase, Status
from ops.bench.gpu.phase import Scale

ROOT: Final = Path(__file__).resolve().parents[3]
GRACE_S: Final = 3.0
"""Between SIGTERM and SIGKILL: time to end a server."""
LEAST_S: Final = 5.0
"""A phase is not begun with less: importing torch takes as long."""
MOST_SAID: Final = 200
POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Planned:
    """A phase, where its `run` is, and how long it may take."""

    name: str
    module: str
    limit_s: float
    by_name: bool = False
    """It runs only where `--phases` names it."""


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C and SIGTERM set. As an exception they might come amid the start of a process."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(
    phases: Sequence[Planned],
    scale: Scale,
    budget_s: float,
    stop: threading.Event,
    after_each: Callable[[Sequence[Phase]], None],
    before_each: Callable[[Planned], None] = lambda _: None,
) -> list[Phase]:
    """Run *phases* in order within *budget_s* until *stop*; call *after_each* with all that have ended so far."""
    ends_s = time.monotonic() + budget_s
    done: list[Phase] = []
    for phase in phases:
        if stop.is_set():
            break
        left_s = ends_s - time.monotonic()
        if left_s < min(LEAST_S, phase.limit_s):
            why = f"{budget_s:g} s of --budget were spent before it"
            done.append(Phase(name=phase.name, status="cut", reason=why, limit_s=phase.limit_s, wall_s=0.0))
        else:
            before_each(phase)
            done.append(run_one(phase, scale, left_s, stop))
        after_each(done)
    return done


def run_one(phase: Planned, scale: Scale, left_s: float, stop: threading.Event) -> Phase:
    """Run *phase* until *stop*, for at most its limit, or for *left_s* if that is less."""
    limit_s = min(phase.limit_s, left_s)
    with tempfile.TemporaryDirectory(prefix="minisgl-gpu-", ignore_cleanup_errors=True) as scratch:
        reports, said = Path(scratch) / "reports", Path(scratch) / "said"
        (temporary := Path(scratch) / "tmp").mkdir()
        reports.touch()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
        if scale.size == "toy":
            environment["OMP_NUM_THREADS"] = "1"  # tests share their cores: threads that wait for each other spin
        began_s = time.monotonic()
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", child.__name__, phase.module, scale.device, scale.size, str(reports)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env=environment,
                start_new_session=True,  # a group of its own, so that all of it can be ended
            )
        try:
            code = _wait(process, limit_s, stop)
        finally:
            end_group(process)
        wall_s = time.monotonic() - began_s
        items, why = read_reports(reports)
        status, reason = _verdict(code, phase, limit_s, items, why, last_said(said))
    if code is None and stop.is_set():
        status, reason = "cut", "interrupted while it ran"
    return Phase(
        name=phase.name, status=status, reason=reason, limit_s=phase.limit_s, wall_s=wall_s, items=tuple(items)
    )


def _wait(process: subprocess.Popen[bytes], limit_s: float, stop: threading.Event) -> int | None:
    """Return the exit code of *process*, or None if it runs at its limit or at *stop*."""
    ends_s = time.monotonic() + limit_s
    while not stop.is_set() and (left_s := ends_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left_s, POLL_S))
    return process.poll()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End *process* and all that it has started, by SIGTERM and then by SIGKILL; the group may be longer than it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)  # it ends what it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_reports(path: Path) -> tuple[list[Item], str]:
    """Return the items in the file that a phase wrote, and why it ended, if it says so. Half a line is left out."""
    items, why = [], ""
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(orjson.JSONDecodeError, ValidationError, TypeError):
            value = orjson.loads(line)
            if child.WHY in value:
                why = str(value[child.WHY])
            else:
                items.append(Item.model_validate(value))
    return items, why


def last_said(path: Path) -> str:
    """Return the last line of a phase's output."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 8192, 0))
        lines = file.read().decode(errors="replace").strip().splitlines()
    printable = "".join(letter if letter.isprintable() else " " for letter in lines[-1]) if lines else ""
    return printable.strip()[:MOST_SAID]


def _verdict(
    code: int | None, phase: Planned, limit_s: float, items: Sequence[Item], why: str, said: str
) -> tuple[Status, str]:
    """Return the status of a phase that ended with *code* (None: at its limit), and the reason."""
    last = f"; the last it said: {said}" if said else ""
    if code is None and limit_s < phase.limit_s:
        return "cut", f"the rest of --budget, {limit_s:.0f} s, was spent while it ran"
    if code is None:
        return "timeout", f"ended at its limit of {limit_s:g} s{last}"
    if code == child.SKIPPED:
        return "skipped", why
    if code == child.RAISED:
        return "failed", why
    if code < 0:
        return "killed", f"by {_signal_name(-code)}{last}"
    if code:
        return "failed", f"exit code {code}{last}"
    wrong = [item.item for item in items if item.ok is False]
    return ("wrong", f"wrong: {', '.join(wrong)}") if wrong else ("ok", "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
