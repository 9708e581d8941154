"""The time that the pipeline adds to a token: the real stages around an engine that computes nothing.

The engine's loop and its log thread run in this process, as they serve. Tokenizer, detokenizer and, if it is wanted,
the web process are processes, as `minisgl serve` starts them. For comparison the same schedule drives the same engine
in a plain loop. The clients of the web process are another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ops.bench import pipeline_clients
from ops.bench.processes import MINISGL, cpu_s, last_line, started
from pipeline.errors import MiniSGLError
from pipeline.events import SamplingParams, StepCompleted, Submitted, new_uid
from pipeline.log.protocol import Inbox, Owner, RequestLimits, StepCommitted
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB, Names
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
from web.http.listener import open_listener

PROMPT: Final = "A prompt of thirty-two letters!!"
TOKEN: Final = 65
"""The engine's output: the token of one letter, in the random model's tokenizer."""
VOCABULARY: Final = 256
PAGE_SIZE: Final = 64
FRONTEND: Final = "web-0"
LEASE_MS: Final = 3000
LIMITS: Final = RequestLimits(timeout_s=600, retention_s=10, max_queued=sys.maxsize)
READY_TIMEOUT_S: Final = 60.0
REST_S: Final = 2.0
"""How long a web process is measured at rest."""
WARM_UP: Final = 50
LONGEST_STEP_S: Final = 0.1
"""Beyond the engine's own time. A slower step, on average, counts as stuck."""


class PipelineStuck(MiniSGLError):
    """A stage made no progress in time."""


class IdleEngine:
    """A Forward that waits *step_s* seconds instead of computing, and keeps the time of each step. It calls *host* with
    each plan."""

    def __init__(self, step_s: float, host: Callable[[BatchPlan], None] = lambda plan: None) -> None:
        self.step_s = step_s
        self._host = host
        self._began: list[tuple[float, int, int]] = []

    def forward(self, plan: BatchPlan) -> Computed:
        self._began.append((time.perf_counter(), len(plan.rows), plan.num_decode_rows))
        if self.step_s:
            time.sleep(self.step_s)
        self._host(plan)
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
        self.uids: list[str] = []

    def step(self, owner: Owner, steps: Mapping[int, StepCompleted], **options: Any) -> StepCommitted:
        began_s = time.perf_counter()
        done = super().step(owner, steps, **options)
        self.steps_us.append((sum(len(event.rows) for event in steps.values()), (time.perf_counter() - began_s) * 1e6))
        return done


def added_us(num_rows: int, alone_us: Sequence[float], way_us: Sequence[float]) -> dict[str, Sequence[float]]:
    """Return what the stages add to a step: what the log costs in throughput is the difference of the means."""
    added = statistics.fmean(way_us) - statistics.fmean(alone_us)
    return {
        "plain loop": alone_us,
        "with the stages": way_us,
        "added to a step": [added],
        "added to a token": [added / num_rows],
    }


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
    def engine(self, num_rows: int, num_tokens: int, step_s: float) -> Iterator[None]:
        """Run an engine's loop until the block ends, with room for *num_rows* requests of *num_tokens* tokens."""
        engine = IdleEngine(step_s)
        with self._engine_slot() as (slot_lease, log), self._loop(slot_lease, log, engine, num_rows, num_tokens):
            yield

    def run(self, num_rows: int, num_tokens: int, step_s: float) -> dict[str, Sequence[float]]:
        """Time the steps with and without the stages, in microseconds. Raises PipelineStuck."""
        alone_us = step_times_alone(num_rows, num_tokens, IdleEngine(step_s))
        engine = IdleEngine(step_s)
        log = self.send(num_rows, num_tokens, engine)
        commits_us = [time_us for rows, time_us in log.steps_us if rows == num_rows]
        return added_us(num_rows, alone_us, engine.intervals_us(num_rows)) | {"its commit": commits_us}

    def send(self, num_rows: int, num_tokens: int, engine: IdleEngine) -> TimedLog:
        """Send *num_rows* requests of *num_tokens* tokens through all stages.

        Raises:
            PipelineStuck: Not all of them ended.
        """
        with self._engine_slot() as (slot_lease, log):
            log.uids = self._submit(num_rows, num_tokens)
            with self._loop(slot_lease, log, engine, num_rows, num_tokens) as thread:
                self._until(
                    lambda: not self._log.alive(log.uids) or not thread.is_alive(),
                    READY_TIMEOUT_S + num_tokens * (engine.step_s + LONGEST_STEP_S),
                )
                if self._log.alive(log.uids):
                    raise PipelineStuck(f"the engine's loop has ended; see {self._output}")
        return log

    @contextlib.contextmanager
    def web(self) -> Iterator[WebProcess]:
        """Run a web process before the stages until the block ends; the engine must run."""
        with contextlib.ExitStack() as stack:
            with open_listener("127.0.0.1", 0) as listener:
                port, fd = listener.getsockname()[1], listener.fileno()
                flags = ("--listen-fd", str(fd))
                process = stack.enter_context(self._started(WEB, *flags, fds=(fd,)))
                self._until(lambda: self._is_ready(WEB), READY_TIMEOUT_S)
            web = WebProcess(process.pid, port)
            web.watch_at_rest()
            yield web

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


class WebProcess:
    """A running web process and its CPU time."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid = pid
        self._port = port
        self._rest_us_per_s = 0.0

    def watch_at_rest(self) -> None:
        """Measure the CPU time without requests. It is subtracted from all that follows."""
        began_s, before_s = time.monotonic(), cpu_s(self._pid)
        time.sleep(REST_S)
        self._rest_us_per_s = (cpu_s(self._pid) - before_s) * 1e6 / (time.monotonic() - began_s)

    def run(self, num_rows: int, num_tokens: int, all_tokens: int, num_requests: int) -> dict[str, Sequence[float]]:
        """Send *num_requests* of one token, as many streamed, and long streams of *all_tokens* together.

        Raises:
            PipelineStuck: An answer is missing or wrong.
        """
        each, long_ones = -(-num_requests // num_rows), -(-all_tokens // (num_rows * num_tokens))
        command = [sys.executable, "-P", pipeline_clients.__file__, str(self._port), str(num_rows)]
        with started(command, None) as clients:

            def took_us(tokens: int, stream: bool, requests: int) -> float:
                """Return the CPU time of a request."""
                assert clients.stdin is not None and clients.stdout is not None
                began_s, before_s = time.monotonic(), cpu_s(self._pid)
                fields = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
                with contextlib.suppress(BrokenPipeError):  # their last line is read below
                    clients.stdin.write(json.dumps([fields, requests]).encode() + b"\n")
                    clients.stdin.flush()
                said = clients.stdout.readline().decode(errors="replace").strip()
                if said != pipeline_clients.DONE:
                    raise PipelineStuck(f"the web process did not answer: {said or 'the clients have ended'}")
                rest_us = self._rest_us_per_s * (time.monotonic() - began_s)
                return ((cpu_s(self._pid) - before_s) * 1e6 - rest_us) / (num_rows * requests)

            for stream in (False, True):
                took_us(8, stream, -(-WARM_UP // num_rows))
            whole_us, stream_us = (took_us(1, stream, each) for stream in (False, True))
            token_us = (took_us(num_tokens, True, long_ones) - stream_us) / (num_tokens - 1)
        return {"streamed token": [token_us], "streamed request": [stream_us], "other request": [whole_us]}


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
