"""The time that the pipeline adds to a token: the real stages around an engine that computes nothing.

The engine's loop and its log thread run in this process, as they serve. Tokenizer and detokenizer are processes, as
`minisgl serve` starts them. For comparison the same schedule drives the same engine in a plain loop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench.processes import MINISGL, last_line, started
from pipeline.errors import MiniSGLError
from pipeline.events import SamplingParams, StepCompleted, Submitted, new_uid
from pipeline.log.protocol import Inbox, Owner, RequestLimits, StepCommitted
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, Names
from pipeline.process.parent import SUPERVISOR_VARIABLE
from pipeline.stage.slots import SlotLease, acquire_slot, read_statuses
from pipeline.stage.worker import Stop
from stages.generate.kvcache import make_cache
from stages.generate.loop.log_thread import LogThread
from stages.generate.loop.worker import GenerateWorker
from stages.generate.schedule.plan import BatchPlan, Computed
from stages.generate.schedule.recorded import RecordedSchedule
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

PROMPT: Final = "A prompt of thirty-two letters!!"
TOKEN: Final = 65
"""The engine's output: the token of one letter, in the random model's tokenizer."""
VOCABULARY: Final = 256
PAGE_SIZE: Final = 64
FRONTEND: Final = "web-0"
LEASE_MS: Final = 3000
LIMITS: Final = RequestLimits(timeout_s=600, retention_s=10, max_queued=sys.maxsize)
READY_TIMEOUT_S: Final = 60.0
LONGEST_STEP_S: Final = 0.1
"""Beyond the engine's own time. A slower step, on average, counts as stuck."""


class PipelineStuck(MiniSGLError):
    """A stage made no progress in time."""


class IdleEngine:
    """A Forward that waits *step_s* seconds instead of computing, and keeps the time of each step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._began: list[tuple[float, int, int]] = []

    def forward(self, plan: BatchPlan) -> Computed:
        self._began.append((time.perf_counter(), len(plan.rows), plan.num_decode_rows))
        if self._step_s:
            time.sleep(self._step_s)
        return Computed([TOKEN] * sum(row.sample is not None for row in plan.rows))

    def intervals_us(self, num_rows: int) -> list[float]:
        """Return the times from one step to the next, if both decoded exactly *num_rows* requests."""
        full = [(rows, decodes) == (num_rows, num_rows) for _, rows, decodes in self._began]
        return [
            (self._began[index + 1][0] - self._began[index][0]) * 1e6
            for index in range(len(full) - 1)
            if full[index] and full[index + 1]
        ]


class TimedLog(RedisLog):
    """An engine's log that keeps how long each step takes to commit."""

    def __init__(self, url: str, names: Names) -> None:
        super().__init__(url, names)
        self.steps_us: list[tuple[int, float]] = []
        """(number of rows, time) of each step."""

    def step(self, owner: Owner, steps: Mapping[int, StepCompleted], **options: Any) -> StepCommitted:
        began_s = time.perf_counter()
        done = super().step(owner, steps, **options)
        self.steps_us.append((sum(len(event.rows) for event in steps.values()), (time.perf_counter() - began_s) * 1e6))
        return done


@dataclass(frozen=True, slots=True)
class WayTimes:
    """One run: times of the steps in which all requests decoded, in microseconds."""

    alone_us: list[float]
    way_us: list[float]
    commits_us: list[float]
    uids: list[str]


def step_times_alone(num_rows: int, num_tokens: int, engine: IdleEngine) -> list[float]:
    """Drive a schedule and *engine* in a loop; return the times from one step to the next, in microseconds."""
    schedule = _schedule(num_rows, num_tokens, "generate-0", 1)
    prompt = tuple(PROMPT.encode())
    for number in range(num_rows):
        assert schedule.add(NewRequest(str(number), prompt, (), _sampling(num_tokens))) is None
    while (planned := schedule.plan()) is not None:
        schedule.complete(engine.forward(planned[0]).token_ids)
    return engine.intervals_us(num_rows)


class Way:
    """The stages around an engine, on one Redis and in one namespace."""

    def __init__(self, url: str, names: Names, folder: Path) -> None:
        """*folder* is the random model; the stages' output goes there too."""
        self._url = url
        self._names = names
        self._folder = folder
        self._output = folder / "stages.log"
        self._log = RedisLog(url, names, LIMITS)

    @contextlib.contextmanager
    def stages(self) -> Iterator[None]:
        """Run a tokenizer and a detokenizer until the block ends."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._log.close)
            with self._slot_lease():  # the tokenizer waits for an engine, which tells the context length
                for stage in (TOKENIZE, DETOKENIZE):
                    stack.enter_context(self._started(stage, "--model", str(self._folder)))
                self._until(lambda: all(self._is_ready(stage) for stage in (TOKENIZE, DETOKENIZE)), READY_TIMEOUT_S)
            yield

    @contextlib.contextmanager
    def worker(self, stage: str, *flags: str, fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
        """Run one more worker until the block ends; give it when it is ready.

        Raises:
            PipelineStuck: It does not become ready.
        """
        with self._started(stage, *flags, fds=fds) as process:
            self._until(lambda: self._is_ready(stage), READY_TIMEOUT_S)
            yield process

    @contextlib.contextmanager
    def engine(self, num_rows: int, num_tokens: int, step_s: float) -> Iterator[None]:
        """Run an engine's loop until the block ends, with room for *num_rows* requests of *num_tokens* tokens."""
        engine = IdleEngine(step_s)
        with self._engine_slot() as (slot_lease, log), self._loop(slot_lease, log, engine, num_rows, num_tokens):
            yield

    def run(self, num_rows: int, num_tokens: int, step_s: float) -> WayTimes:
        """Send *num_rows* requests of *num_tokens* tokens through all stages.

        Raises:
            PipelineStuck: Not all of them ended.
        """
        alone_us = step_times_alone(num_rows, num_tokens, IdleEngine(step_s))
        engine = IdleEngine(step_s)
        with self._engine_slot() as (slot_lease, log):
            uids = self._submit(num_rows, num_tokens)
            with self._loop(slot_lease, log, engine, num_rows, num_tokens) as thread:
                self._until(
                    lambda: not self._log.alive(uids) or not thread.is_alive(),
                    READY_TIMEOUT_S + num_tokens * (step_s + LONGEST_STEP_S),
                )
                if self._log.alive(uids):
                    raise PipelineStuck(f"the engine's loop has ended; see {self._output}")
        commits_us = [time_us for rows, time_us in log.steps_us if rows == num_rows]
        return WayTimes(alone_us, engine.intervals_us(num_rows), commits_us, uids)

    @contextlib.contextmanager
    def _engine_slot(self) -> Iterator[tuple[SlotLease, TimedLog]]:
        """Hold the engine's slot; create its streams and the log for its loop."""
        log = TimedLog(self._url, self._names)
        with contextlib.closing(log), self._slot_lease() as slot_lease:
            for inbox in (Inbox.tokenized(log.names), Inbox.steps(log.names, slot_lease.owner.slot)):
                log.prepare(inbox)
            yield slot_lease, log

    @contextlib.contextmanager
    def _loop(
        self, slot_lease: SlotLease, log: TimedLog, engine: IdleEngine, num_rows: int, num_tokens: int
    ) -> Iterator[threading.Thread]:
        """Run the engine's loop in a thread until the block ends."""
        schedule = _schedule(num_rows, num_tokens, slot_lease.owner.slot, slot_lease.owner.epoch, RecordedSchedule)
        log_thread = LogThread(log, slot_lease.owner, lease_ms=LEASE_MS, report_progress=slot_lease.report_progress)
        worker, stop, errors = GenerateWorker(engine, schedule, log_thread, slot_lease), Stop(), list[BaseException]()

        def run() -> None:
            try:
                worker.run(stop)
            except BaseException as error:  # raised again below, in the thread that waits for it
                errors.append(error)

        thread = threading.Thread(target=run, name="engine")
        log_thread.start()
        thread.start()
        try:
            yield thread
        finally:
            stop.set()
            thread.join()
            log_thread.stop()
        if errors:
            raise errors[0]

    def _submit(self, num_rows: int, num_tokens: int) -> list[str]:
        """Submit requests and wait until all are tokenized, so that they start together."""
        self._log.open_replies(FRONTEND)
        event = Submitted(endpoint="bench", frontend=FRONTEND, prompt=PROMPT, sampling=_sampling(num_tokens))
        uids = [new_uid() for _ in range(num_rows)]
        for uid in uids:
            self._log.submit(uid, [event])
        self._until(lambda: self._log.backlog(Inbox.tokenized(self._names)) == num_rows, READY_TIMEOUT_S)
        return uids

    @contextlib.contextmanager
    def _slot_lease(self) -> Iterator[SlotLease]:
        """Hold the engine's slot, each time under a new epoch."""
        with contextlib.closing(self._log.another()) as lease_log:
            slot_lease = SlotLease(lease_log, acquire_slot(self._log, GENERATE, LEASE_MS, preferred=0), LEASE_MS)
            try:
                slot_lease.report_progress(patience_s=READY_TIMEOUT_S)
                slot_lease.say(phase="ready", models=("bench",), context=4096)
                yield slot_lease
            finally:
                slot_lease.leave()

    def _started(
        self, stage: str, *flags: str, fds: Sequence[int] = ()
    ) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        command = [*MINISGL, "stage", stage, "--slot", "0", *flags, "--namespace", self._names.namespace]
        environment = {"MINISGL_REDIS_URL": self._url, SUPERVISOR_VARIABLE: str(os.getpid())}
        return started(command, self._output, environment=environment, fds=fds)

    def _is_ready(self, stage: str) -> bool:
        return any(status.phase == "ready" for status in read_statuses(self._log, stage))

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise PipelineStuck(f"a stage is stuck for {timeout_s:.0f} s; its last line: {last_line(self._output)}")
            time.sleep(0.02)  # rare enough not to disturb the measurement


def length_of(num_tokens: int) -> int:
    """Return the most tokens that a request of *num_tokens* output tokens may have."""
    return len(PROMPT) + num_tokens + 1


def _schedule(num_rows: int, num_tokens: int, slot: str, epoch: int, kind: type[Schedule] = Schedule) -> Schedule:
    length = length_of(num_tokens)
    limits = ScheduleLimits(
        context=length,
        max_prefill_length=8192,
        mixed_prefill_length=512,
        max_running_requests=num_rows,
        vocab_size=VOCABULARY,
    )
    num_pages = num_rows * -(-length // PAGE_SIZE)
    return kind(make_cache("radix", num_pages, PAGE_SIZE), limits, [], Identity(slot, epoch, "idle"))


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
