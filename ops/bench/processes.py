"""Processes that a benchmark starts: a clean environment, output in a file, and an end with all their children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PROGRAM: Final = ROOT / "minisgl.py"
MINISGL: Final = (sys.executable, str(PROGRAM))
STOP_TIMEOUT_S: Final = 45.0
MOST_SAID: Final = 300
"""Letters of a line that are shown."""
INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    output: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    alone: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run *command* until the block ends, its output appended to a file. Without a file its stdin and stdout are pipes.

    It gets our environment without the MINISGL_ variables, and *environment*. *alone*: in a session of its own, so that
    Linux gives it a share of busy cores of its own.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
    process: subprocess.Popen[bytes] | None = None
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(output.open("ab")) if output else None
            stack.enter_context(_uninterrupted())
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if file else subprocess.PIPE,
                stdout=file or subprocess.PIPE,
                stderr=file,
                env=kept | dict(environment or {}),
                cwd=None if file else ROOT,
                pass_fds=fds,
                start_new_session=alone,
            )
        yield process
    finally:
        if process is not None:
            _end(process)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the block ends: in the middle of Popen they would leave a process behind."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def last_line(output: Path) -> str:
    """Return the start of the last line of a file; "nothing" if it has none."""
    with output.open("rb") as file:
        file.seek(max(output.stat().st_size - 8192, 0))
        lines = file.read().decode(errors="replace").strip().splitlines() or ["nothing"]
    return "".join(letter if letter.isprintable() else " " for letter in lines[-1]).strip()[:MOST_SAID]


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does: it first ends the processes that it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    family = tree_of(process.pid)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of process *pid* and of its descendants."""
    return sum(map(cpu_s, tree_of(pid)))


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process with all its threads; 0 if it has ended. /proc has it only in steps of 10 ms."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), as Linux numbers these clocks
    except OSError:
        return 0.0


def tree_of(pid: int) -> list[int]:
    """Return *pid* and the ids of its descendants."""
    parents = {int(path.name): _parent_of(path) for path in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for one in found:  # grows on the way
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _parent_of(process: Path) -> int:
    """Return the id of a process's parent; 0 if it has ended."""
    try:
        text = (process / "stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])  # the process's name comes before and may hold anything
