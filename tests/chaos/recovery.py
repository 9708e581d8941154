"""`make recovery`: how long streams pause when their engine is killed, compared with how long they may.

It starts a server and many streams; when all streams have begun, the engine gets SIGKILL. The client's clock measures
the pause. Redis, the server's log and the histories (Redis' clock) tell how it divides into lease, start and prefill.
Clients, server and Redis run on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import orjson
from chaos.measure import MeasureConfig, exit_code, parsed
from chaos.recovery_figures import (
    Pause,
    Problem,
    Recovery,
    StreamFigures,
    failures,
    figures,
    logged_since,
    longest_later_s,
    longest_pause,
    medians,
    must_have_hit,
    pauses_of,
    resumed,
    table,
    token_times_ms,
    verdict,
    what_is_wrong,
)
from rich.console import Console
from support.servers import run_command

from ops.bench import report
from ops.bench.datasets import Span, length_flag
from ops.bench.load import CHAT_PROMPT, PATHS, Arrival, Client, Form, connected, timed_frames
from ops.bench.models import Prompt, Prompts
from ops.bench.targets import (
    READY_TIMEOUT_S,
    SILENCE_TIMEOUT_S,
    Served,
    SideFailed,
    interrupt_on_sigterm,
    last_line,
    our_server,
)
from pipeline.errors import ConfigError
from pipeline.flags import at_least, flag, seconds
from pipeline.log.address import connect
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, Names
from pipeline.process.redis_server import EmbeddedRedis, socket_of, url_of
from pipeline.stage.slots import Status, parse_status, read_statuses

ABOUT: Final = """\
Kills the engine under many streams and measures the longest pause between two frames of each stream. The goal is
lease + start + prefill of the streams in flight + 0.5 s. With --peers 1 the supervisor releases the dead engine's
lease and starts a new engine, so the lease counts as 0. With --peers 2 the engine dies together with its supervisor,
and another engine takes over when the lease has expired, so the start counts as 0. Exits with 1 if a request did not
get all its tokens, once.
"""
IDS: Final = {"x-minisgl-event-ids": "1"}
PACKAGES: Final = ("torch", "aiohttp", "redis")
POLL_S: Final = 0.01
STATUS_POLL_S: Final = 0.1
PATIENCE_S: Final = 3600.0
"""A slow machine shows in the figures. It must not make a request fail, or its history expire."""
PROBE_TOKENS: Final = 1024
"""Length of the prompt that shows how fast the engine computes one alone."""


@dataclass(frozen=True, slots=True)
class RecoveryConfig(MeasureConfig):
    """What is in flight, and who is killed."""

    threads: int = flag("--threads", default=0, parse=at_least(1), help="CPU threads of each engine [the server's own]")
    peers: int = flag(
        "--peers", default=1, parse=at_least(1), choices=(1, 2), help="engines; with 2, one dies with its supervisor"
    )
    lease_s: float = flag("--lease", default=1.0, parse=seconds, help="the server's --lease, in seconds")
    requests: int = flag("--requests", default=100, parse=at_least(1), help="streams in flight")
    inputs: Span = length_flag("--input-len", "prompt")  # noqa: RUF009  # a Span is frozen
    output_tokens: int = flag(
        "--output-len", default=256, parse=at_least(2), help="tokens per answer; no answer may end before all begin"
    )
    runs: int = flag("--runs", default=3, parse=at_least(1), help="runs, each with a server of its own")


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure; return the exit code.

    Raises:
        ConfigError: The flags or the checkpoint cannot work.
        SideFailed: The server did not start or come back, a stream ended before the kill, or no stream was hit.
    """
    config = parsed("make recovery", RecoveryConfig, ABOUT, arguments, environment)
    report.check_can_write("--output", config.output)
    folder = config.folder(environment)
    prompts = Prompts(folder)
    interrupt_on_sigterm()
    runs = []
    with Console(stderr=True).status("", refresh_per_second=1) as status:
        for number in range(1, config.runs + 1):
            status.update(f"run {number} of {config.runs}")
            runs.append(measured(config, folder, prompts, number))
            status.console.print(f"run {number}: {runs[-1].longest_pause_s:.2f} s", highlight=False)
    print(f"{folder.name} on {report.cpu_model()}, {report.num_cores()} cores: {config.requests} streams of")
    engines = "1 engine" if config.peers == 1 else "2 engines; one is killed with its supervisor"
    print(f"{config.inputs} tokens in and {config.output_tokens} out, {engines}; lease {config.lease_s:g} s\n")
    print(table(runs))
    print(f"\n{verdict(runs)}")
    print("'Computed alone' uses the speed of a prompt that ran alone before the kill. After the kill, streams that")
    print("have their next token go on beside the prefill of the others.")
    document = {
        "options": report.options_of(config),
        "checkpoint": str(folder),
        "medians": medians(runs),
        "runs": [report.options_of(run) | figures(run) for run in runs],
    }
    report.save(config.output, ("make", "recovery", *arguments), PACKAGES, document)
    if wrong := failures([problem for run in runs for problem in run.problems], config.runs * config.requests):
        print(f"minisgl: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


def drawn(config: RecoveryConfig, prompts: Prompts, run: int) -> tuple[Prompt, ...]:
    """Return the prompts of *run*: every run has the same lengths and other words."""
    generator = random.Random(config.seed)
    lengths = [(config.inputs.draw(generator), config.output_tokens) for _ in range(config.requests)]
    return prompts.drawn(random.Random(f"{config.seed}/{run}"), lengths)


# the server


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server, and the engine to kill."""

    server: Served
    redis_url: str
    victim: Status
    kill: Callable[[], None]
    """Ends the engine at once, and its supervisor too where nothing shall start it again."""
    log_file: Path
    """The server's output."""


@contextlib.contextmanager
def one_engine(folder: Path, config: RecoveryConfig, data: Path) -> Iterator[Deployment]:
    """Run `minisgl serve`; its supervisor lives."""
    log_file, redis_url = data / "minisgl.log", url_of(socket_of(data))
    with our_server(data, _serve_flags(folder, config)) as (ours, _):
        victim = _engine_beside((), redis_url, log_file)
        yield Deployment(ours, redis_url, victim, lambda: os.kill(victim.pid, signal.SIGKILL), log_file)


@contextlib.contextmanager
def two_engines(folder: Path, config: RecoveryConfig, data: Path) -> Iterator[Deployment]:
    """Run `minisgl serve`, and a second engine with a detokenizer as `minisgl stage` commands around one Redis."""
    log_file = data / "minisgl.log"
    with contextlib.ExitStack() as stack:
        redis_server = EmbeddedRedis(data / "redis")
        stack.callback(redis_server.stop)
        where = ["--redis-url", redis_server.url]
        ours, _ = stack.enter_context(our_server(data, [*where, *_serve_flags(folder, config)]))
        survivor = _engine_beside((), redis_server.url, log_file)
        stages = {}
        for stage in (DETOKENIZE, GENERATE):
            command = ["stage", stage, *where, *_flags(folder, config, stage)]
            stages[stage] = run_command(command, data / stage)
            stack.callback(stages[stage].stop)
        supervisor = stages[GENERATE]
        victim = _engine_beside((survivor.pid,), redis_server.url, supervisor.output_file)

        def kill() -> None:
            supervisor.process.kill()  # first, or it would start another
            with contextlib.suppress(ProcessLookupError):  # it dies with its supervisor
                os.kill(victim.pid, signal.SIGKILL)

        yield Deployment(ours, redis_server.url, victim, kill, log_file)


def _serve_flags(folder: Path, config: RecoveryConfig) -> list[str]:
    return [*_flags(folder, config, GENERATE), "--request-timeout", f"{PATIENCE_S:g}"]


def _flags(folder: Path, config: RecoveryConfig, stage: str) -> list[str]:
    flags = ["--model", str(folder), "--lease", f"{config.lease_s:g}", "--retention", f"{PATIENCE_S:g}"]
    return [*flags, "--threads", str(config.threads)] if config.threads and stage == GENERATE else flags


def _engines(redis_url: str) -> list[Status]:
    """Return the engines that are ready and whose detokenizer is ready."""
    with contextlib.closing(RedisLog(redis_url, Names())) as log:
        heard = {one.slot.partition("-")[2] for one in read_statuses(log, DETOKENIZE) if one.phase == "ready"}
        ready = [one for one in read_statuses(log, GENERATE) if one.phase == "ready" and one.owner]
    return [one for one in ready if one.slot.partition("-")[2] in heard]


def _engine_beside(others: Sequence[int], redis_url: str, log_file: Path) -> Status:
    """Wait for a ready engine that is none of the processes *others*; its supervisor's output is in *log_file*.

    Raises:
        SideFailed: There is none in time.
    """
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        found = [one for one in _engines(redis_url) if one.pid not in others]
        if found:
            return found[0]
        if time.monotonic() > deadline_s:
            raise SideFailed(f"an engine was not ready in {READY_TIMEOUT_S:g} s; its last line: {last_line(log_file)}")
        time.sleep(STATUS_POLL_S)


# the streams


@dataclass(slots=True)
class Stream:
    """One client and its answer so far."""

    prompt: Prompt
    uid: str = ""
    arrivals: list[Arrival] = field(default_factory=list)
    error: str = ""
    begun: bool = False
    """It has text."""

    def came(self, arrival: Arrival, headers: Mapping[str, str]) -> None:
        """Keep a piece. Only pieces before the first text are parsed: the client shares its cores with the server."""
        self.arrivals.append(arrival)
        self.uid = headers["x-minisgl-uid"]
        if not self.begun:
            self.begun = any(_text_of(frame.data) for _, frame in timed_frames(self.arrivals))


def _text_of(chunk: str) -> str:
    if not chunk.startswith("{"):
        return ""
    choices = orjson.loads(chunk).get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


@dataclass(frozen=True, slots=True)
class Killed:
    """The time of the kill, on both clocks, and when Redis showed changes of the slot, in seconds after it."""

    at_s: float
    """By `time.perf_counter`, like the arrivals."""
    at_ms: float
    """By the wall clock, like Redis and the log."""
    freed_s: float
    owner_s: float
    ready_s: float | None
    """None: no engine was expected to come back."""


def measured(config: RecoveryConfig, folder: Path, prompts: Prompts, run: int) -> Recovery:
    """Start a server, kill its engine under streams, and return the figures.

    Raises:
        SideFailed: It did not start or come back, a stream ended before the kill, or no stream was hit.
        ConfigError: The requests are longer than the context.
    """
    started = one_engine if config.peers == 1 else two_engines
    with (
        tempfile.TemporaryDirectory(prefix="minisgl-bench-", ignore_cleanup_errors=True) as data,
        started(folder, config, Path(data)) as server,
    ):
        most = config.inputs.highest + 1 + config.output_tokens  # some tokenizers begin a prompt with a token of theirs
        if most > server.victim.context:
            raise ConfigError(
                f"--input-len {config.inputs} and --output-len {config.output_tokens} are up to {most} tokens, and the "
                f"server's context has {server.victim.context}; pass less"
            )
        alone_tokens_per_s = _speed_alone(server, prompts, random.Random(f"{config.seed}/{run}/alone"))
        streams = [Stream(prompt) for prompt in drawn(config, prompts, run)]
        killed = asyncio.run(_killed_under(server, streams, comes_back=config.peers == 1))
        with contextlib.closing(RedisLog(server.redis_url, Names())) as log:
            histories = log.histories([stream.uid for stream in streams])
        noticed_s, load_s = logged_since(server.log_file, killed.at_ms, server.victim.slot)
    recovery = Recovery(
        streams=_figures_of(streams, histories, killed),
        lease_s=0.0 if config.peers == 1 else config.lease_s,
        ready_s=killed.ready_s,
        freed_s=killed.freed_s,
        owner_s=killed.owner_s,
        noticed_s=noticed_s,
        load_s=load_s,
        alone_tokens_per_s=alone_tokens_per_s,
        problems=_problems(streams, histories),
    )
    must_have_hit(recovery)
    return recovery


def _speed_alone(server: Deployment, prompts: Prompts, generator: random.Random) -> float:
    """Return how many prompt tokens the engine computes per second while it does nothing else."""
    count = min(PROBE_TOKENS, server.victim.context // 2)
    for _ in range(2):  # the first is to warm up
        (one,) = server.server.measure(prompts.drawn(generator, [(count, 1)]), 1)
    return count * 1000 / one.answer.ttft_ms


async def _killed_under(server: Deployment, streams: Sequence[Stream], *, comes_back: bool) -> Killed:
    """Send all requests, kill the engine when all streams have begun, and wait until all have ended."""
    begun = asyncio.Event()

    async def listen(client: Client, stream: Stream) -> None:
        def came(arrival: Arrival, headers: Mapping[str, str]) -> None:
            stream.came(arrival, headers)
            if not begun.is_set() and all(stream.begun for stream in streams):
                begun.set()

        messages = [{"role": "user", "content": stream.prompt.text}]
        body = Form(CHAT_PROMPT, "default").body(messages, stream.prompt.output_tokens, stream=True)
        stream.error = await client.receive(PATHS[CHAT_PROMPT], body, came, headers=IDS)

    async with connected(server.server.url, timeout_s=SILENCE_TIMEOUT_S) as client:
        tasks = [asyncio.create_task(listen(client, stream)) for stream in streams]
        all_begun = asyncio.create_task(begun.wait())
        await asyncio.wait([all_begun, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if any(task.done() for task in tasks):
            for task in (all_begun, *tasks):
                task.cancel()
            why = next((stream.error for stream in streams if stream.error), "")
            raise SideFailed(f"a stream ended before all had begun: {why or 'pass a larger --output-len'}")
        at_s, at_ms = time.perf_counter(), time.time() * 1000
        server.kill()
        changes = await asyncio.to_thread(watch, server, at_s, comes_back=comes_back)
        await asyncio.gather(*tasks)
    return Killed(at_s, at_ms, *changes)


def watch(server: Deployment, killed_s: float, *, comes_back: bool) -> tuple[float, float, float | None]:
    """Poll Redis until the dead engine's slot has a new owner and, if one *comes_back*, a ready engine.

    Return how many seconds after the kill the lease was gone, and the owner and the engine were there.

    Raises:
        SideFailed: It does not get them in time.
    """
    names, victim = Names(), server.victim
    keys = [names.lease(victim.slot), names.owner(victim.slot), names.status(victim.slot)]
    freed_s = owner_s = ready_s = None
    with connect(server.redis_url, decode_responses=True) as client:
        while owner_s is None or (comes_back and ready_s is None):
            lease, owner, status_text = cast(list[str | None], client.mget(keys))
            now_s = time.perf_counter() - killed_s
            if freed_s is None and lease != victim.owner:
                freed_s = now_s
            if owner_s is None and owner != victim.owner:
                owner_s = now_s
            status = parse_status(status_text) if status_text else victim
            if status.pid != victim.pid and status.phase == "ready" and status.owner:
                ready_s = now_s
            if now_s > READY_TIMEOUT_S:
                raise SideFailed(f"{now_s:.0f} s after the kill nobody serves {victim.slot}; see {server.log_file}")
            time.sleep(POLL_S)
    return owner_s if freed_s is None else freed_s, owner_s, ready_s


def _figures_of(streams: Sequence[Stream], histories: Sequence[Sequence[Entry]], killed: Killed) -> list[StreamFigures]:
    again = [resumed(history, killed.at_ms) for history in histories]
    last_ms = max((one.next_token_ms for one in again if one is not None), default=math.inf)
    found = []
    for stream, history, one in zip(streams, histories, again, strict=True):
        pauses = pauses_of(timed_frames(stream.arrivals), token_times_ms(history))
        resumed_s = killed.at_s + ((one.next_token_ms if one else last_ms) - killed.at_ms) / 1000
        pause = longest_pause(pauses, killed.at_s, resumed_s) or Pause(killed.at_s, killed.at_s, 0.0)
        found.append(
            StreamFigures(
                uid=stream.uid,
                pause_s=pause.length_s,
                pause_began_s=pause.began_s - killed.at_s,
                pause_ended_s=pause.ended_s - killed.at_s,
                later_pause_s=longest_later_s(pauses, resumed_s),
                ended_s=stream.arrivals[-1][0] - killed.at_s if stream.arrivals else 0.0,
                taken_over_s=(one.taken_over_ms - killed.at_ms) / 1000 if one else None,
                resumed=one,
            )
        )
    return found


def _problems(streams: Sequence[Stream], histories: Sequence[Sequence[Entry]]) -> list[Problem]:
    return [
        Problem(stream.uid, wrong)
        for stream, history in zip(streams, histories, strict=True)
        if (wrong := stream.error or what_is_wrong(stream.arrivals, history, stream.prompt.output_tokens))
    ]


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
