"""What the pipeline adds to the time of a token: the real stages around an engine that computes nothing.

The engine's loop with its courier, as it is served, runs in this process; tokenizer and detokenizer are processes of
their own, as `minisgl serve` starts them. Beside it the same schedule drives the same engine in a plain loop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import minisgl
from pipeline.errors import MiniSGLError
from pipeline.events import SamplingParams, StepCompleted, Submitted, new_uid
from pipeline.log.protocol import Inbox, Owner, StepCommitted
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, Names
from pipeline.process.parent import SUPERVISOR_VARIABLE
from pipeline.slots import SlotLease, acquire_slot, read_statuses
from pipeline.worker import Stop
from stages.generate.kvcache import make_cache
from stages.generate.log_thread import LogThread
from stages.generate.schedule.plan import BatchPlan, Computed
from stages.generate.schedule.schedule import Identity, NewRequest, Schedule, ScheduleLimits
from stages.generate.worker import GenerateWorker

PROMPT: Final = "A prompt of thirty-two letters!!"
TOKEN: Final = 65
"""What the engine says: the token of one letter, in the random model's tokenizer."""
VOCABULARY: Final = 256
PAGE_SIZE: Final = 64
FRONTEND: Final = "web-0"
LEASE_MS: Final = 3000
TIMEOUT_MS: Final = 600_000
RETENTION_MS: Final = 10_000
READY_TIMEOUT_S: Final = 60.0
LONGEST_STEP_S: Final = 0.1
"""Beyond the engine's own time; who is slower on average does not get on."""


class PipelineStuck(MiniSGLError):
    """A stage did not do its part in time."""


class IdleEngine:
    """A Forward that computes nothing, for *step_s* seconds, and notes when each step began."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._began: list[tuple[float, int, int]] = []

    def forward(self, plan: BatchPlan) -> Computed:
        self._began.append((time.perf_counter(), len(plan.rows), plan.num_decode_rows))
        if self._step_s:
            time.sleep(self._step_s)
        return Computed([TOKEN] * sum(row.sample is not None for row in plan.rows))

    def intervals_us(self, num_rows: int) -> list[float]:
        """Return the times from one step to the next where both decoded *num_rows* requests and nothing else."""
        full = [(rows, decodes) == (num_rows, num_rows) for _, rows, decodes in self._began]
        return [
            (self._began[index + 1][0] - self._began[index][0]) * 1e6
            for index in range(len(full) - 1)
            if full[index] and full[index + 1]
        ]


class TimedLog(RedisLog):
    """The log of an engine, which notes how long each step takes to commit."""

    def __init__(self, url: str, names: Names) -> None:
        super().__init__(url, names)
        self.steps_us: list[tuple[int, float]] = []
        """Number of rows, and time."""

    def step(
        self,
        owner: Owner,
        number: int,
        event: StepCompleted,
        *,
        ended: Sequence[str],
        control_cursor: str,
        lease_ms: int,
    ) -> StepCommitted:
        began_s = time.perf_counter()
        done = super().step(owner, number, event, ended=ended, control_cursor=control_cursor, lease_ms=lease_ms)
        self.steps_us.append((len(event.rows), (time.perf_counter() - began_s) * 1e6))
        return done


@dataclass(frozen=True, slots=True)
class WayTimes:
    """One run of so many requests at once; times of the steps in which all of them decoded, in microseconds."""

    alone_us: list[float]
    way_us: list[float]
    commits_us: list[float]
    uids: list[str]


def step_times_alone(num_rows: int, num_tokens: int, step_s: float) -> list[float]:
    """Drive a schedule and an idle engine in a loop; return the times from one step to the next."""
    schedule, engine = _schedule(num_rows, num_tokens, "generate-0", 1), IdleEngine(step_s)
    prompt = tuple(PROMPT.encode())
    for number in range(num_rows):
        assert schedule.add(NewRequest(str(number), prompt, (), _sampling(num_tokens))) is None
    while (planned := schedule.plan()) is not None:
        schedule.complete(engine.forward(planned[0]).token_ids)
    return engine.intervals_us(num_rows)


class Way:
    """The stages around an engine, on one Redis and in one namespace."""

    def __init__(self, url: str, names: Names, folder: Path) -> None:
        """*folder* holds the random model and takes what the stages print."""
        self._url = url
        self._names = names
        self._folder = folder
        self._log = RedisLog(url, names)

    @contextlib.contextmanager
    def stages(self) -> Iterator[None]:
        """Run a tokenizer and a detokenizer until the block ends."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._log.close)
            with self._place():  # the tokenizer waits for an engine, which says how long a prompt may be
                for stage in (TOKENIZE, DETOKENIZE):
                    stack.enter_context(self._started(stage, "--model", str(self._folder)))
                self._until(lambda: all(self._is_ready(stage) for stage in (TOKENIZE, DETOKENIZE)), READY_TIMEOUT_S)
            yield

    @contextlib.contextmanager
    def worker(self, stage: str, *flags: str, fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
        """Run one more worker until the block ends; give it once it is ready.

        Raises:
            PipelineStuck: It is not.
        """
        with self._started(stage, *flags, fds=fds) as process:
            self._until(lambda: self._is_ready(stage), READY_TIMEOUT_S)
            yield process

    @contextlib.contextmanager
    def engine(self, num_rows: int, num_tokens: int, step_s: float) -> Iterator[None]:
        """Run the loop of an engine until the block ends, with room for so many requests of so many tokens."""
        engine = IdleEngine(step_s)
        with self._engine_place() as (place, log), self._loop(place, log, engine, num_rows, num_tokens):
            yield

    def run(self, num_rows: int, num_tokens: int, step_s: float) -> WayTimes:
        """Bring *num_rows* requests of *num_tokens* tokens through all stages.

        Raises:
            PipelineStuck: They did not all end.
        """
        alone_us = step_times_alone(num_rows, num_tokens, step_s)
        engine = IdleEngine(step_s)
        with self._engine_place() as (place, log):
            uids = self._submit(num_rows, num_tokens)
            with self._loop(place, log, engine, num_rows, num_tokens) as thread:
                self._until(
                    lambda: not self._log.alive(uids) or not thread.is_alive(),
                    READY_TIMEOUT_S + num_tokens * (step_s + LONGEST_STEP_S),
                )
                if self._log.alive(uids):
                    raise PipelineStuck(f"the engine's loop has ended; see {self._folder / 'stages.log'}")
        commits_us = [time_us for rows, time_us in log.steps_us if rows == num_rows]
        return WayTimes(alone_us, engine.intervals_us(num_rows), commits_us, uids)

    @contextlib.contextmanager
    def _engine_place(self) -> Iterator[tuple[SlotLease, TimedLog]]:
        """Hold the engine's slot, with a log for its loop and all streams that it reads."""
        log = TimedLog(self._url, self._names)
        with contextlib.closing(log), self._place() as place:
            for inbox in (Inbox.tokenized(log.names), Inbox.steps(log.names, place.owner.slot)):
                log.prepare(inbox)
            yield place, log

    @contextlib.contextmanager
    def _loop(
        self, place: SlotLease, log: TimedLog, engine: IdleEngine, num_rows: int, num_tokens: int
    ) -> Iterator[threading.Thread]:
        schedule = _schedule(num_rows, num_tokens, place.owner.slot, place.owner.epoch)
        courier = LogThread(log, place.owner, lease_ms=LEASE_MS, retention_ms=RETENTION_MS, came_round=place.came_round)
        with _running(GenerateWorker(engine, schedule, courier, place), courier) as thread:
            yield thread

    def _submit(self, num_rows: int, num_tokens: int) -> list[str]:
        """Submit requests and wait until all are tokenized, so that they decode together."""
        self._log.open_replies(FRONTEND)
        event = Submitted(endpoint="bench", frontend=FRONTEND, prompt=PROMPT, sampling=_sampling(num_tokens))
        uids = [new_uid() for _ in range(num_rows)]
        for uid in uids:
            self._log.submit(uid, event, timeout_ms=TIMEOUT_MS, retention_ms=RETENTION_MS, max_queued=10 * num_rows)
        self._until(lambda: self._log.backlog(Inbox.tokenized(self._names)) == num_rows, READY_TIMEOUT_S)
        return uids

    @contextlib.contextmanager
    def _place(self) -> Iterator[SlotLease]:
        """Hold the engine's slot, under a new epoch each time."""
        with contextlib.closing(self._log.another()) as lease_log:
            place = SlotLease(lease_log, acquire_slot(self._log, GENERATE, LEASE_MS, preferred=0), LEASE_MS)
            try:
                place.came_round(patience_s=READY_TIMEOUT_S)
                place.say(phase="ready", models=("bench",), context=4096)
                yield place
            finally:
                place.leave()

    @contextlib.contextmanager
    def _started(self, stage: str, *flags: str, fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
        assert minisgl.__file__ is not None
        command = [sys.executable, minisgl.__file__, "stage", stage, "--slot", "0", *flags]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
        with (self._folder / "stages.log").open("ab") as output:
            process = subprocess.Popen(
                [*command, "--namespace", self._names.namespace],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=kept | {"MINISGL_REDIS_URL": self._url, SUPERVISOR_VARIABLE: str(os.getpid())},
                pass_fds=fds,
            )
        try:
            yield process
        finally:
            _end(process)

    def _is_ready(self, stage: str) -> bool:
        return any(status.phase == "ready" for status in read_statuses(self._log, stage))

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                words = (self._folder / "stages.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise PipelineStuck(f"a stage did not do its part within {timeout_s:.0f} s; {' '.join(words)}")
            time.sleep(0.02)  # seldom enough to take nothing from what is measured


@contextlib.contextmanager
def _running(worker: GenerateWorker, courier: LogThread) -> Iterator[threading.Thread]:
    """Run an engine's loop in a thread until the block ends."""
    stop, errors = Stop(), list[BaseException]()

    def run() -> None:
        try:
            worker.run(stop)
        except BaseException as error:  # raised again below, in the thread that waits for it
            errors.append(error)

    thread = threading.Thread(target=run, name="engine")
    courier.start()
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()
        courier.stop()
    if errors:
        raise errors[0]


def _schedule(num_rows: int, num_tokens: int, slot: str, epoch: int) -> Schedule:
    length = len(PROMPT) + num_tokens + 1
    limits = ScheduleLimits(
        context=length,
        max_prefill_length=8192,
        mixed_prefill_length=512,
        max_running_requests=num_rows,
        vocab_size=VOCABULARY,
    )
    num_pages = num_rows * -(-length // PAGE_SIZE)
    return Schedule(make_cache("radix", num_pages, PAGE_SIZE), limits, [], Identity(slot, epoch, "idle"))


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
