"""The time that the pipeline adds to a token: the real stages around an engine that computes nothing.

The engine's loop and its log thread run in this process, as they serve. Tokenizer, detokenizer and, if it is wanted,
the web process are processes, as `minisgl serve` starts them. For comparison the same schedule drives the same engine
in a plain loop. The clients of the web process are another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import orjson

from ops.bench.load import CHAT_PROMPT, PATHS, Client, Form, connected
from ops.bench.targets import MINISGL, Helper, answering, cpu_s, helper, last_line, program, started
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
Figures = dict[str, list[float]]
"""Figure -> its times in microseconds."""


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
        pairs = zip(self._began, self._began[1:], strict=False)
        full = (num_rows, num_rows)
        return [(later[0] - begun[0]) * 1e6 for begun, later in pairs if begun[1:] == later[1:] == full]


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


def added_us(num_rows: int, alone_us: list[float], way_us: list[float]) -> Figures:
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
    for number in range(num_rows):
        assert schedule.add(NewRequest(str(number), tuple(PROMPT.encode()), (), _sampling(num_tokens))) is None
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
        with contextlib.closing(self._log), contextlib.ExitStack() as stack:
            with self.engine(IdleEngine(0.0), 1, 1):  # the tokenizer waits for one, which tells the context length
                for stage in (TOKENIZE, DETOKENIZE):
                    stack.enter_context(self._started(stage, "--model", str(self._folder)))
                self._until_ready(TOKENIZE, DETOKENIZE)
            yield

    def run(self, num_rows: int, num_tokens: int, step_s: float) -> Figures:
        """Time the steps with and without the stages. Raises PipelineStuck."""
        alone_us = step_times_alone(num_rows, num_tokens, IdleEngine(step_s))
        engine = IdleEngine(step_s)
        _, log = self.send(num_rows, num_tokens, engine)
        commits_us = [time_us for rows, time_us in log.steps_us if rows == num_rows]
        return added_us(num_rows, alone_us, engine.intervals_us(num_rows)) | {"its commit": commits_us}

    def send(self, num_rows: int, num_tokens: int, engine: IdleEngine) -> tuple[list[str], TimedLog]:
        """Send *num_rows* requests of *num_tokens* tokens through all stages; return their uids and the engine's log.

        Raises:
            PipelineStuck: Not all of them ended.
        """
        uids = [new_uid() for _ in range(num_rows)]
        event = Submitted(endpoint="bench", frontend=FRONTEND, prompt=PROMPT, sampling=_sampling(num_tokens))

        def submit() -> None:
            self._log.open_replies(FRONTEND)
            for uid in uids:
                self._log.submit(uid, [event])
            tokenized = Inbox.tokenized(self._names)  # then they start together
            self._until(lambda: self._log.backlog(tokenized) == num_rows, READY_TIMEOUT_S)

        with self.engine(engine, num_rows, num_tokens, submit) as (loop, log):
            timeout_s = READY_TIMEOUT_S + num_tokens * (engine.step_s + LONGEST_STEP_S)
            self._until(lambda: not self._log.alive(uids) or loop.done(), timeout_s)
            if self._log.alive(uids):
                raise PipelineStuck(f"the engine's loop has ended; see {self._output}")
        return uids, log

    @contextlib.contextmanager
    def engine(
        self, engine: IdleEngine, num_rows: int, num_tokens: int, before: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Future[None], TimedLog]]:
        """Run the loop of *engine* in a thread until the block ends, in the engine's slot, under a new epoch.

        It has room for *num_rows* requests of *num_tokens* tokens. Its streams are there when *before* is called.
        """
        log, stop = TimedLog(self._url, self._names), Stop()
        with contextlib.ExitStack() as stack:
            lease_log = stack.enter_context(contextlib.closing(self._log.another()))
            stack.enter_context(contextlib.closing(log))
            lease = SlotLease(lease_log, acquire_slot(self._log, GENERATE, LEASE_MS, preferred=0), LEASE_MS)
            stack.callback(lease.leave)
            lease.report_progress(patience_s=READY_TIMEOUT_S)
            lease.say(phase="ready", models=("bench",), context=4096)
            for inbox in (Inbox.tokenized(log.names), Inbox.steps(log.names, lease.owner.slot)):
                log.prepare(inbox)
            before()
            schedule = _schedule(num_rows, num_tokens, lease.owner.slot, lease.owner.epoch, RecordedSchedule)
            log_thread = LogThread(log, lease.owner, lease_ms=LEASE_MS, report_progress=lease.report_progress)
            log_thread.start()
            with ThreadPoolExecutor(1) as pool:
                loop = pool.submit(GenerateWorker(engine, schedule, log_thread, lease).run, stop)
                try:
                    yield loop, log
                finally:
                    stop.set()
                    wait([loop])
                    log_thread.stop()
            loop.result()

    @contextlib.contextmanager
    def web(self) -> Iterator[Helper]:
        """Run a web process before the stages until the block ends, and give its clients; the engine must run."""
        with contextlib.ExitStack() as stack:
            with open_listener("127.0.0.1", 0) as listener:
                port, fd = listener.getsockname()[1], listener.fileno()
                process = stack.enter_context(self._started(WEB, "--listen-fd", str(fd), fds=(fd,)))
                self._until_ready(WEB)
            clients = stack.enter_context(helper("the client", program("pipeline_way:web_clients", process.pid, port)))
            clients.answer()  # the web process was watched at rest
            yield clients

    def _started(
        self, stage: str, *flags: str, fds: Sequence[int] = ()
    ) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        command = [*MINISGL, "stage", stage, "--slot", "0", *flags, "--namespace", self._names.namespace]
        environment = {"MINISGL_REDIS_URL": self._url, SUPERVISOR_VARIABLE: str(os.getpid())}
        return started(command, self._output, environment=environment, fds=fds)

    def _until_ready(self, *stages: str) -> None:
        def ready(stage: str) -> bool:
            return any(status.phase == "ready" for status in read_statuses(self._log, stage))

        self._until(lambda: all(map(ready, stages)), READY_TIMEOUT_S)

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise PipelineStuck(f"a stage is stuck for {timeout_s:.0f} s; its last line: {last_line(self._output)}")
            time.sleep(0.02)  # rare enough not to disturb the measurement


def web_clients(pid: str, port: str) -> None:
    """Be the clients of the web process *pid*: answer every question, the last arguments of `web_times`."""
    with answering() as answer:
        began_s, before_s = time.monotonic(), cpu_s(int(pid))
        time.sleep(REST_S)
        at_rest = (cpu_s(int(pid)) - before_s) / (time.monotonic() - began_s)
        answer(at_rest)
        for line in sys.stdin.buffer:
            answer(asyncio.run(web_times(int(pid), f"http://127.0.0.1:{port}", at_rest, *orjson.loads(line))))


async def web_times(
    pid: int, url: str, at_rest: float, num_rows: int, num_tokens: int, all_tokens: int, num_requests: int
) -> Figures:
    """Send *num_requests* of one token, as many streamed, and long streams of *all_tokens* together, *num_rows* at a
    time. The CPU time that the process takes *at_rest* is subtracted.

    Raises:
        MiniSGLError: An answer is missing or wrong.
    """
    async with connected(url, timeout_s=READY_TIMEOUT_S) as client:

        async def took_us(tokens: int, stream: bool, requests: int) -> float:
            """Return the CPU time of a request."""

            async def several() -> None:
                for _ in range(requests):
                    await _ask(client, tokens, stream=stream)

            began_s, before_s = time.monotonic(), cpu_s(pid)
            await asyncio.gather(*(several() for _ in range(num_rows)))
            spent_s = cpu_s(pid) - before_s - at_rest * (time.monotonic() - began_s)
            return spent_s * 1e6 / (num_rows * requests)

        for stream in (False, True):
            await took_us(8, stream, -(-WARM_UP // num_rows))
        whole_us, stream_us = [await took_us(1, stream, -(-num_requests // num_rows)) for stream in (False, True)]
        long_us = await took_us(num_tokens, True, -(-all_tokens // (num_rows * num_tokens)))
    token_us = (long_us - stream_us) / (num_tokens - 1)
    return {"streamed token": [token_us], "streamed request": [stream_us], "other request": [whole_us]}


async def _ask(client: Client, num_tokens: int, *, stream: bool) -> None:
    form, messages = Form(CHAT_PROMPT, "bench"), [{"role": "user", "content": PROMPT}]
    if stream:
        answer = await client.stream(form, messages, num_tokens)
        seen = answer.error or answer.reason
    else:
        body = form.body(messages, num_tokens, stream=False)
        seen = (await client.document("POST", PATHS[CHAT_PROMPT], body))["choices"][0]["finish_reason"]
    if seen != "length":
        raise PipelineStuck(f"the web process gave a wrong answer: {seen}")


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
