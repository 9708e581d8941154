"""The process tree of one command: starts the workers by exec, waits until they are ready, restarts dead ones, drains.

Knows processes and statuses, not what a stage does. Everything here runs in one thread: a child asks to die with the
thread that started it. Modules of the log are imported after the children have been started, which need both cores.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import structlog

from pipeline.errors import ConfigError, LogError, MiniSGLError
from pipeline.names import rank_stage, slot_index, slot_stage
from pipeline.process.parent import EXIT_REPLACE, RUN_VARIABLE, SUPERVISOR_VARIABLE

if TYPE_CHECKING:
    from pipeline.log.redis import RedisLog
    from pipeline.stage.slots import Status

logger = structlog.get_logger()

EXIT_CONFIG = 2
"""Exit code of a child whose configuration cannot work. Everything ends with it, unless the child was ready before."""
LONGEST_BACKOFF_S = 5.0
SERVICE_S = 5.0
"""Time that a child must have served to start over with the shortest backoff."""
POLL_S = 0.02
SETTLED_POLL_S = 1.0
"""Pause between two reads of the statuses once all children are ready. Until then it sleeps, unless a signal comes."""
REASON_S = 0.5
"""Time for which the other ranks of an engine may end by themselves."""
TELL_LATE_S = 10.0
"""Pause between two log lines about children that are not ready yet."""
MOST_DEATHS_AT_START = 5
"""Number of deaths after which a child that was never ready is given up."""


@dataclass(frozen=True, slots=True)
class Job:
    """A worker that should run: its stage, its command line without the slot, and what it inherits."""

    stage: str
    arguments: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    drain_s: float = 10.0
    """Longest time that it may take to end after SIGTERM."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that only this worker gets, such as its secrets."""
    rank: int = 0
    """Number of the rank, for a rank of an engine."""
    group: str = ""
    """Group of a rank, the same for all ranks of an engine. They end together, and start together under a new name."""
    spans_machines: bool = False
    """Whether other machines have ranks of its engine. These meet under the name in its flags, at each start."""

    @property
    def role(self) -> str:
        """Stage under which it publishes its status."""
        return rank_stage(self.rank) if self.rank else self.stage


@dataclass(slots=True)
class _Child:
    """One process of a job, and its state."""

    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    status: Status | None = None
    held: Sequence[Status] = ()
    """Statuses of all slots that it holds."""
    ready_s: float = float("inf")
    """Time when it was first ready."""
    was_ready: bool = False
    """Whether one of its processes was ready."""
    failures: int = 0
    blamed: _Child | None = None
    """Another rank of the same engine, whose death ended this one the last time."""
    restart_s: float = field(default=float("inf"))
    """Time when it is started again, while it is down."""

    @property
    def name(self) -> str:
        return f"{self.job.role}-{self.slot}"

    @property
    def is_down(self) -> bool:
        return self.restart_s != float("inf")


class ChildFailed(MiniSGLError):
    """A child ended with the exit code for configuration. Its own output says why."""


class StartFailed(MiniSGLError):
    """The children did not become ready. The message names them and the reason."""


class Supervisor:
    """The workers of one command. `signals` is set by SIGTERM and SIGINT: the second one ends everything at once."""

    def __init__(
        self,
        open_log: Callable[[], RedisLog],
        jobs: Sequence[Job],
        *,
        program: Sequence[str],
        environment: Mapping[str, str],
        watch_redis: Callable[[], None],
        output: BinaryIO | None = None,
        ready_file: Path | None = None,
    ) -> None:
        """*program*: start of every child's command line, `minisgl`, by exec. *watch_redis*: keeps Redis alive.

        *open_log* is called once, after the start. The children write to *output*, or where this process writes.
        *ready_file* is there while all children are ready.
        """
        self._open_log = open_log
        self._watch_redis = watch_redis
        self._jobs = jobs
        self._output = output
        self._ready_file = ready_file
        self._program = tuple(program)
        self._run = secrets.token_hex(8)
        self._environment = dict(environment) | {SUPERVISOR_VARIABLE: str(os.getpid()), RUN_VARIABLE: self._run}
        self._children: list[_Child] = []
        self._num_starts: Counter[str] = Counter()
        """Number of starts by group of ranks. Ranks of different starts do not find each other."""
        self._looked_s = 0.0
        self._is_settled = False
        """Whether all children are ready."""
        self._heard: int | None = None
        """Pipe with a byte for each signal, such as the end of a child; None: not listening."""
        self.signals = 0

    @functools.cached_property
    def _log(self) -> RedisLog:
        return self._open_log()

    def listen(self) -> None:
        """Count the signals that ask for an end, and wake up at each signal."""

        def count(*_: object) -> None:
            self.signals += 1

        def wake_up(*_: object) -> None: ...

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, count)
        signal.signal(signal.SIGCHLD, wake_up)
        if self._heard is None:
            self._heard, said = os.pipe()
            for end in (self._heard, said):
                os.set_blocking(end, False)
            signal.set_wakeup_fd(said, warn_on_full_buffer=False)

    @contextlib.contextmanager
    def without_interrupts(self) -> Iterator[None]:
        """Leave SIGINT to another program on this terminal. Not by SIG_IGN, which a child would inherit."""

        def leave(*_: object) -> None: ...

        before = signal.signal(signal.SIGINT, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def start(self) -> None:
        """Start one process for every job. Each asks for a slot of its own, the lowest possible.

        A living holder keeps its slot (`acquire_slot`). The statuses are no help here: after a crash they outlive their
        workers, and new holders of the slots find the unfinished work of those workers.

        Raises:
            ConfigError: The ready file cannot be written.
        """
        self._clear_ready_file()
        num_started: Counter[str] = Counter()
        for job in self._jobs:
            slot = num_started[job.role]
            num_started[job.role] += 1
            self._children.append(_Child(job, self._spawn(job, slot), slot))

    def wait_until_ready(self, timeout_s: float, show: Callable[[Sequence[str]], None] | None = None) -> bool:
        """Wait until every child is ready; return False if a signal comes first. *show* gets the late children.

        Raises:
            ChildFailed: A child ended with the exit code for configuration.
            StartFailed: A child died again and again, or the time is over.
        """
        told_s, told = time.monotonic(), ""
        deadline_s = told_s + timeout_s
        while True:
            self.watch()
            late = [child for child in self._children if child.status is None or child.status.phase != "ready"]
            if show is not None:
                show([_why(child) for child in late])
            if not late or self.signals:
                return not late
            for child in late:
                if child.failures >= MOST_DEATHS_AT_START and not child.job.spans_machines:
                    dead = child.blamed or child
                    raise StartFailed(
                        f"{dead.name} ended {child.failures} times before it was ready, with "
                        f"{dead.process.returncode}; its own lines above say why"
                    )
            why, now_s = ", ".join(map(_why, late)), time.monotonic()
            if now_s > deadline_s:
                raise StartFailed(f"not ready after {timeout_s:.0f} s: {why}; its own lines above say more")
            if why != told and now_s - told_s >= TELL_LATE_S:
                logger.info("not_ready_yet", workers=why)
                told_s, told = now_s, why
            time.sleep(POLL_S)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Keep the children alive until a signal comes, or *until* returns True.

        Raises:
            ChildFailed: A child that was never ready ended with the exit code for configuration.
        """
        while not self.signals and not (until is not None and until()):
            self.watch()
            self._sleep()

    def _sleep(self) -> None:
        """Sleep until there may be something to do."""
        if self._heard is None or not self._is_settled:
            time.sleep(POLL_S)
        elif select.select([self._heard], [], [], SETTLED_POLL_S)[0]:
            os.read(self._heard, 4096)

    def watch(self) -> None:
        """Reap children, restart them, and read their statuses, once."""
        self._watch_redis()
        for child in self._children:
            if child.is_down:
                if time.monotonic() >= child.restart_s:
                    self._restart(child)
            elif child.process.poll() is not None:
                self._reap(child)
        self._settle(all(child.status is not None and child.status.phase == "ready" for child in self._children))
        if time.monotonic() - self._looked_s > (SETTLED_POLL_S if self._is_settled else 2 * POLL_S):
            self._looked_s = time.monotonic()
            self._read_statuses()

    def _settle(self, is_settled: bool) -> None:
        if self._ready_file is not None and is_settled != self._is_settled:
            try:
                if is_settled:
                    self._ready_file.touch()
                else:
                    self._ready_file.unlink(missing_ok=True)
            except OSError as error:  # such as a full disk; the workers go on
                logger.warning("ready_file_not_written", file=str(self._ready_file), error=str(error))
        self._is_settled = is_settled

    def _clear_ready_file(self) -> None:
        """Remove what an earlier start has left, and find out whether the file can be written."""
        if self._ready_file is None:
            return
        try:
            self._ready_file.touch()
            self._ready_file.unlink()
        except OSError as error:
            raise ConfigError(
                f"--ready-file {self._ready_file}: it cannot be written ({error.strerror}); name a file in a folder "
                "where this user can write"
            ) from error

    def stop(self, order: Sequence[Sequence[str]]) -> None:
        """End the children stage by stage: those of the first entry of *order*, then those of the next."""
        self._settle(False)
        for stages in order:
            children = [child for child in self._children if child.job.stage in stages and child.process.poll() is None]
            for child in children:
                child.process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            for child in children:
                self._end(child, began_s + child.job.drain_s)

    def kill(self) -> None:
        """End all children at once."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()

    def _spawn(self, job: Job, slot: int) -> subprocess.Popen[bytes]:
        command = [*self._program, "stage", job.stage, *job.arguments, "--slot", str(slot)]
        if job.group:
            command += ["--rank", str(job.rank)]
        if job.group and not job.spans_machines:
            command += ["--group", f"{self._run}.{job.group}.{self._num_starts[job.group]}"]
        # A process group of its own: Ctrl-C in the terminal reaches only the supervisor, which ends the stages in their
        # order. No session of its own: Linux would share out the cores by session, and a thread that seldom runs, such
        # as the one that accepts connections, would wait long for its turn.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self._environment | dict(job.variables),
            pass_fds=job.pass_fds,
            process_group=0,
        )

    def _reap(self, child: _Child) -> None:
        code = child.process.returncode
        if code == EXIT_CONFIG and not child.was_ready:
            raise ChildFailed(f"{child.name} cannot run with this configuration")
        served_s = max(0.0, time.monotonic() - child.ready_s)
        child.failures = 1 if served_s > SERVICE_S or code == EXIT_REPLACE else child.failures + 1
        backoff_s = 0.0 if child.failures == 1 else min(0.1 * 2.0**child.failures, LONGEST_BACKOFF_S)
        child.restart_s = time.monotonic() + backoff_s
        logger.warning(
            "worker_died", worker=child.name, code=code, served_s=round(served_s, 1), restart_in_s=round(backoff_s, 1)
        )
        self._free_slots(child)
        child.blamed = None
        if child.job.group:
            self._end_group(child)

    def _end_group(self, dead: _Child) -> None:
        """End the other ranks of an engine. They start again with the dead one, and all after the same backoff.

        A rank that ended by itself may have done so because of another one, whose exit code shows the reason.
        """
        self._num_starts[dead.job.group] += 1
        others = [child for child in self._children if child.job.group == dead.job.group and child is not dead]
        deadline_s = time.monotonic() + (REASON_S if dead.process.returncode >= 0 else 0.0)
        for child in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            code = child.process.poll()
            if code is None:
                child.process.kill()
                child.process.wait()
            else:
                logger.warning("worker_died", worker=child.name, code=code)
            child.failures, child.restart_s, child.blamed = dead.failures, dead.restart_s, dead
            self._free_slots(child)
            if code == EXIT_CONFIG and not child.was_ready:
                raise ChildFailed(f"{child.name} cannot run with this configuration")

    def _free_slots(self, child: _Child) -> None:
        """Release the leases of a dead child, so that other workers need not wait until they expire."""
        child.status, held, child.held = None, child.held, ()
        if not held:
            return
        from pipeline.log.protocol import Owner

        for status in held:
            epoch, _, nonce = status.owner.partition(":")
            try:
                self._log.release(Owner(status.slot, int(epoch), nonce))
            except LogError as error:
                logger.warning("lease_not_released", slot=status.slot, error=str(error))

    def _restart(self, child: _Child) -> None:
        child.restart_s = float("inf")
        child.ready_s = float("inf")
        child.process = self._spawn(child.job, child.slot)

    def _read_statuses(self) -> None:
        from pipeline.stage.slots import read_statuses

        try:
            roles = {child.job.role for child in self._children} | {rank_stage(0) for job in self._jobs if job.group}
            found = [status for role in roles for status in read_statuses(self._log, role)]
        except LogError as error:
            logger.warning("log_unavailable", error=str(error))
            self._looked_s = time.monotonic() + SETTLED_POLL_S  # asking more often is no use
            return
        # A status that a worker announced under another slot, before it had its own, stays for some seconds.
        found.sort(key=lambda status: bool(status.owner))
        found = [status for status in found if status.run == self._run]
        said = {(slot_stage(status.slot), status.pid): status for status in found}
        for child in self._children:
            status = said.get((child.job.role, child.process.pid))
            if not child.is_down:
                child.held = [each for each in found if each.pid == child.process.pid and each.owner] or child.held
            if status is not None and not child.is_down:
                child.status = status
                if status.owner:  # else it only announces itself
                    child.slot = slot_index(status.slot)
                if status.phase == "ready" and child.ready_s == float("inf"):
                    child.ready_s, child.was_ready = time.monotonic(), True
                    logger.info("worker_ready", worker=child.name, **_facts(status))

    def _end(self, child: _Child, deadline_s: float) -> None:
        while child.process.poll() is None:
            if time.monotonic() > deadline_s or self.signals > 1:
                logger.warning("worker_killed", worker=child.name)
                child.process.kill()
                child.process.wait()
                return
            time.sleep(POLL_S / 4)


def _facts(status: Status) -> dict[str, object]:
    """Return the fields of a ready worker's log line; for an engine what it serves, and how it computes."""
    if not status.models:
        return {}
    dtype_quantization_kernels = "/".join(status.numerics.split("/")[:3])
    return {"model": status.models[0], "context": status.context, "numerics": dtype_quantization_kernels}


def _why(child: _Child) -> str:
    if child.is_down:
        return f"{child.name} (ended with {child.process.returncode})"
    if child.status is None:
        return f"{child.name} (starting)"
    progress = f" {child.status.progress:.0%}" if child.status.phase == "loading" else ""
    return f"{child.name} ({child.status.phase} {child.status.detail}{progress})".replace(" )", ")")
