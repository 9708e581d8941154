"""`minisgl bench pipeline`: the cost of the log and of the web process, without a model or a GPU.

It measures what the host does for a step, the way of a plan to another rank, commits in a tight loop, the real stages
around an engine that computes nothing, the CPU time of a web process before them, and the bytes that a finished request
leaves. All tables have the same form: a row for each figure, a column for each load.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import redis
import structlog
import torch
from rich.console import Console
from rich.status import Status

from ops.bench import report
from ops.bench.models import nonsense
from ops.bench.pipeline_way import PAGE_SIZE, PROMPT, Figures, IdleEngine, Way, length_of, step_times_alone
from ops.bench.report import Spread, spread_of
from ops.bench.targets import answering, helper, program
from pipeline.errors import LogUnavailable
from pipeline.events import (
    Cancelled,
    SamplingParams,
    StepCompleted,
    Submitted,
    Tokenized,
    TokenRow,
    TokensProduced,
    new_uid,
)
from pipeline.flags import at_least, flag, parse_flags, seconds
from pipeline.log.address import connect, without_password
from pipeline.log.check import check_server
from pipeline.log.protocol import Entry, Inbox, Owner, Produced, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.log.replies import server_of as version_of
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, Names, slot_name, tokens_id
from pipeline.process.redis_server import EmbeddedRedis
from stages.generate.batch import PageTables, build_batch
from stages.generate.ranks.channel import Follower, Leader, file_store
from stages.generate.ranks.channel import connect as connect_ranks
from stages.generate.ranks.frame import Kind
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

T = TypeVar("T")
ABOUT: Final = """\
Measures the log and the web process, without a model: what the host does for a decode step; how long its plan takes to
another rank; each commit in a tight loop; what tokenizer, log and detokenizer add to every step of an engine that
computes nothing, compared with the same schedule in a plain loop; the CPU time of the web process per streamed token
and per request; and the bytes that a finished request leaves.
"""
PACKAGES: Final = ("redis", "hiredis", "pydantic", "orjson", "quart", "hypercorn")
REMEMBERED_TOKENS: Final = 200
"""Output tokens of the request that is weighed."""
MOST_TAKEN: Final = 8
"""Most requests per `take`, as in an engine."""
STEPS_OF_A_LIFE: Final = 4
LIVE_PROMPT: Final = "A prompt of a usual length: thirty words or so, of which none matters here. " * 2
PROMPT_IDS: Final = tuple(range(32))
FRONTEND: Final = "web-0"
LIVE_LEASE_MS: Final = 600_000
LIMITS: Final = RequestLimits(timeout_s=600, retention_s=2, max_queued=sys.maxsize)
PAUSE_S: Final = 0.001
"""Between two plans: a follower waits for the next one before it comes."""


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """What is measured, where, and how often."""

    redis_url: str = flag(
        "--redis-url",
        default="",
        help=("redis:// or unix:// URL; the benchmark deletes its own keys there [an embedded server]"),
    )
    rows: tuple[int, ...] = flag(
        "--rows",
        default=(1, 16, 64, 256),
        parse=at_least(1),
        repeated=True,
        help="numbers of requests at once, in the tight loop [1 16 64 256]",
    )
    way_rows: tuple[int, ...] = flag(
        "--way-rows",
        default=(1, 16, 64),
        parse=at_least(1),
        repeated=True,
        help="numbers of requests at once, through the real stages [1 16 64]",
    )
    samples: int = flag("--samples", default=200, parse=at_least(1), help="steps per run, in the tight loop")
    tokens: int = flag("--tokens", default=400, parse=at_least(8), help="tokens per request, through the stages")
    web_tokens: int = flag(
        "--web-tokens", default=1200, parse=at_least(1), help="minimum tokens that the web process streams per run"
    )
    web_requests: int = flag(
        "--web-requests",
        default=400,
        parse=at_least(1),
        help="requests of one token per run for the web process; half of them are streamed",
    )
    step_s: float = flag(
        "--step-time",
        default=0.01,
        parse=seconds,
        help="seconds per step of the engine; a run with 0 s is always added",
    )
    runs: int = flag("--runs", default=3, parse=at_least(1), help="runs; their medians are shown")
    output: str = flag("--output", default="", help="JSON file for the setup and all figures")


TABLES: Final = {
    "host": (
        "Host time of a decode step",
        "To plan the step, to lay it out as tensors, and to complete it.",
    ),
    "frames": (
        "A plan on its way to another rank, over gloo on this machine",
        "Until rank 0 has packed it and may compute, and until the other rank has read it.",
    ),
    "commits": (
        "Commits in a tight loop",
        "A submit, tokenized or end is one request, a step or produced all rows; a take brings up to 8 requests.",
    ),
    "way": (
        "What the stages add to a step",
        "Of an engine that only waits: from step to step, and the difference of the means; the step's commit.",
    ),
    "web": (
        "CPU time of the web process",
        "Without what it takes at rest. A token is not the first one; a request has one token, on an open connection.",
    ),
}
"""Name -> title, and what is meant."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Takes figures, and keeps the median of all runs."""

    config: PipelineConfig
    status: Status
    figures: dict[str, dict[str, dict[str, Spread]]] = field(default_factory=lambda: {name: {} for name in TABLES})
    """Table -> figure -> load -> microseconds."""

    def take(self, table: str, load: str, run: Callable[[], Figures]) -> None:
        """Call *run* as often as the flags say."""
        runs = []
        for number in range(1, self.config.runs + 1):
            self.status.update(f"{TABLES[table][0]}: {load}, run {number} of {self.config.runs}")
            runs.append(run())
        for name in runs[0]:
            self.figures[table].setdefault(name, {})[load] = median_of([spread_of(each[name]) for each in runs])

    def for_rows(self, table: str, run: Callable[[int], Figures]) -> None:
        """Take the figures of *table* at every number of rows of the tight loop."""
        for rows in self.config.rows:
            self.take(table, rows_of(rows), partial(run, rows))

    def shown(self, table: str) -> str:
        """Return a row for each figure, a column for each load."""
        title, about = TABLES[table]
        figures = self.figures[table]
        rows = [["", *next(iter(figures.values()))], *([name, *map(cell, of.values())] for name, of in figures.items())]
        return f"{title}\n\n{report.aligned(rows)}\n\n{about}\n"


def cell(us: Spread) -> str:
    """Return the value that a run has, or p50 and p99 of its many."""
    return f"{us.p50:,.1f}" if us.count == 1 else f"{us.p50:,.0f} / {us.p99:,.0f}"


def median_of(spreads: Sequence[Spread]) -> Spread:
    """Return the median of each figure, and the smallest count."""
    figures = {name: [getattr(spread, name) for spread in spreads] for name in ("mean", "p50", "p90", "p99")}
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return Spread(min(spread.count for spread in spreads), **medians)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the benchmark; return the exit code. Raises MiniSGLError."""
    (config,) = parse_flags("bench pipeline", [PipelineConfig], arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    if config.redis_url:
        check_server(config.redis_url)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with redis_and_folder(config) as (url, folder), Console(stderr=True).status("starting") as status:
        server, names, measurement = server_of(url), f"bench-{secrets.token_hex(4)}", Measurement(config, status)
        try:
            measurement.for_rows("host", partial(host_times, config.tokens))
            status.update("starting another rank")
            with other_rank(folder / "ranks", config.samples) as send:
                send(1)  # the first ones warm up
                measurement.for_rows("frames", send)
            with contextlib.closing(RedisLog(url, Names(f"{names}-commits"), LIMITS)) as log:
                measurement.for_rows("commits", partial(commit_times, log, config.samples))
            remembered = measure_stages(measurement, url, Names(f"{names}-way"), folder)
        finally:
            remove_keys(url, names)
    print("Microseconds; p50 / p99 where a run has many.\n", *map(measurement.shown, TABLES), sep="\n")
    print(f"A finished request of {remembered['prompt_tokens']} + {remembered['output_tokens']} tokens leaves ", end="")
    print(f"{remembered['history_bytes']:,} bytes in {server['server']} {server['version']} ({server['over']}).")
    document = {
        "options": report.options_of(replace(config, redis_url=without_password(config.redis_url))),
        **measurement.figures,
        "finished_request": remembered,
    }
    command = ["minisgl", "bench", "pipeline", *map(without_password, arguments)]
    report.save(config.output, command, PACKAGES, document, redis=server)
    return 0


@contextlib.contextmanager
def redis_and_folder(config: PipelineConfig) -> Iterator[tuple[str, Path]]:
    """Give the URL of the Redis to use and a folder with the random model; remove the folder afterwards."""
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as scratch, contextlib.ExitStack() as stack:
        folder = nonsense(Path(scratch))
        if config.redis_url:
            yield config.redis_url, folder
            return
        server = EmbeddedRedis(Path(scratch) / "redis")
        stack.callback(server.stop)
        yield server.url, folder


def host_times(num_tokens: int, rows: int) -> Figures:
    """Time what the host does for a step."""
    tables = PageTables(rows, length_of(num_tokens), PAGE_SIZE)

    def pack(plan: BatchPlan) -> None:
        tables.update(plan.rows)
        build_batch(plan, tables, torch.device("cpu"))

    return {"step": step_times_alone(rows, num_tokens, IdleEngine(0.0, pack))}


@contextlib.contextmanager
def other_rank(meeting: Path, num_plans: int) -> Iterator[Callable[[int], Figures]]:
    """Run another rank until the block ends; give what sends it plans of so many decode rows, *num_plans* times."""
    with helper("the other rank", program("pipeline:follow", meeting)) as other:
        leader = Leader(connect_ranks(file_store(meeting, 2), 0, 2), lambda error: None)

        def send(num_rows: int) -> Figures:
            times: Figures = {"sent": [], "known": []}
            for step in range(num_plans):
                plan = decodes(step, num_rows)
                time.sleep(PAUSE_S)
                began_ns = time.perf_counter_ns()
                with leader.computing(plan):
                    sent_ns = time.perf_counter_ns()
                times["sent"].append((sent_ns - began_ns) / 1000)
                times["known"].append((other.answer() - began_ns) / 1000)
            return times

        yield send
        leader.leave()


def decodes(step: int, num_rows: int) -> BatchPlan:
    """Return a plan of decode rows. Each needs a new page every PAGE_SIZE steps, not all in the same one."""
    sample, rows = Sample(SamplingParams(temperature=0), 0, ()), []
    for table in range(num_rows):
        start = step + table
        new_pages = () if start % PAGE_SIZE else (table,)
        rows.append(PlanRow(table, start, (65,), new_pages, start // PAGE_SIZE, sample))
    return BatchPlan(step, tuple(rows), num_rows)


def follow(meeting: str) -> None:
    """Be the other rank: receive plans until rank 0 leaves, and say when each came."""
    with answering() as answer:
        follower = Follower(connect_ranks(file_store(Path(meeting), 2), 1, 2))
        while follower.receive()[0] is not Kind.STOP:
            answer(time.perf_counter_ns())


def measure_stages(measurement: Measurement, url: str, names: Names, folder: Path) -> dict[str, int]:
    """Start the stages; measure the way through them, and the web process before them. Return what a request leaves."""
    config, way = measurement.config, Way(url, names, folder)
    loads = [(f"{rows_of(rows)}, {{:g}} ms", rows) for rows in config.way_rows]
    steps_s = dict.fromkeys((0.0, config.step_s))
    measurement.status.update("starting the stages")
    with way.stages():
        (uid,), _ = way.send(1, REMEMBERED_TOKENS, IdleEngine(0.0))  # the first run warms up the stages, too
        remembered = remembered_request(url, names, uid)
        for step_s in steps_s:
            for load, rows in loads:
                measurement.take("way", load.format(step_s * 1000), partial(way.run, rows, config.tokens, step_s))
        for step_s in steps_s:
            with way.engine(IdleEngine(step_s), max(config.way_rows), config.tokens), way.web() as clients:
                for load, rows in loads:
                    asked = (rows, config.tokens, config.web_tokens, config.web_requests)
                    measurement.take("web", load.format(step_s * 1000), partial(clients.ask, asked))
    return remembered


def rows_of(number: int) -> str:
    """Return the name of a load."""
    return f"{number} rows" if number > 1 else "1 row"


def remembered_request(url: str, names: Names, uid: str) -> dict[str, int]:
    """Return what a finished request leaves in Redis until its retention is over."""
    key = names.request(uid)
    with connect(url, key) as client:
        return {
            "prompt_tokens": len(PROMPT),
            "output_tokens": REMEMBERED_TOKENS,
            "num_entries": int(client.execute_command("XLEN", key)),
            "history_bytes": int(client.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0)),
        }


def remove_keys(url: str, namespace: str) -> None:
    """Remove every key of the namespaces of a run, which begin with *namespace*.

    Raises:
        LogUnavailable: Redis went away meanwhile.
    """
    try:
        for names in (Names(f"{namespace}-commits"), Names(f"{namespace}-way")):
            with connect(url, names.live) as client:
                for key in client.scan_iter(match=f"{{{names.namespace}:*", count=1000):
                    client.unlink(key)
    except redis.RedisError as error:
        raise LogUnavailable(f"the keys {{{namespace}-* were not removed: {error}; remove them") from error


def server_of(url: str) -> dict[str, Any]:
    """Return a description of the Redis server."""
    with connect(url) as client:
        info = client.info()
        assert isinstance(info, dict)
        kept = ("redis_version", "os", "process_id", "aof_enabled", "io_threads_active")
        named = dict(zip(("server", "version"), version_of(info), strict=True))
        over = "unix socket" if url.startswith("unix://") else "TCP"
        return named | {name: info.get(name) for name in kept} | {"over": over}


def commit_times(log: RedisLog, num_samples: int, num_rows: int) -> Figures:
    """Time every commit of requests that live at the same time, until there are *num_samples* steps."""
    engine, detokenizer = _own(log, GENERATE), _own(log, DETOKENIZE)
    try:
        lives = Lives(log, engine, detokenizer)
        lives.live(num_rows)  # the scripts are loaded, the connection is open
        lives.times_us.clear()
        for _ in range(math.ceil(num_samples / STEPS_OF_A_LIFE)):
            lives.live(num_rows)
    finally:
        for owner in (engine, detokenizer):  # another number of rows may follow
            log.release(owner)
    return dict(lives.times_us)


def _own(log: RedisLog, stage: str) -> Owner:
    owner = log.acquire(slot_name(stage, 0), "bench", LIVE_LEASE_MS)
    assert owner is not None, "the namespace is this benchmark's own"
    return owner


class Lives:
    """Requests that live at the same time: submitted, tokenized, taken, some steps together, ended."""

    def __init__(self, log: RedisLog, engine: Owner, detokenizer: Owner) -> None:
        self._log, self._engine, self._detokenizer = log, engine, detokenizer
        self._submitted, self._steps = Inbox.submitted(log.names), Inbox.steps(log.names, engine.slot)
        for inbox in (self._submitted, Inbox.tokenized(log.names), self._steps):
            log.prepare(inbox)
        self.times_us: Figures = defaultdict(list)
        self._numbers = itertools.count(1)
        self._control_cursor = "0-0"

    def _timed(self, name: str, commit: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        done = commit()
        self.times_us[name].append((time.perf_counter() - began_s) * 1e6)
        return done

    def live(self, num_rows: int) -> None:
        """Let *num_rows* requests live once, and time every commit."""
        log, uids, consumer = self._log, [new_uid() for _ in range(num_rows)], slot_name(TOKENIZE, 0)
        log.open_replies(FRONTEND)
        submitted = Submitted(endpoint="bench", frontend=FRONTEND, prompt=LIVE_PROMPT, sampling=SamplingParams())
        for uid in uids:
            self._timed("submit", partial(log.submit, uid, [submitted]))
        tokenized = Tokenized(token_ids=PROMPT_IDS, fingerprint="bench", by=consumer)
        for entry in log.read(self._submitted, consumer, max_entries=num_rows, block_ms=0):
            self._timed("tokenized", partial(log.tokenized, entry, tokenized))
        taken: list[str] = []
        while len(taken) < num_rows:
            take = partial(log.take, self._engine, MOST_TAKEN, control_cursor=self._control_cursor)
            done = self._timed("take", take)
            self._control_cursor = done.control_cursor
            taken += [entry.id for entry in done.entries]
        for n in range(1, STEPS_OF_A_LIFE + 1):
            rows = tuple(TokenRow(uid=uid, n=n, token=40 + n) for uid in uids)
            self._timed("step", partial(self._step, StepCompleted(rows=rows), []))
            entry = self._read_step()
            event = TokensProduced(count=1, tokens=(40 + n,), text=" word", step=entry.id)
            produced = [Produced(uid, tokens_id(n), n, event, FRONTEND) for uid in uids]
            self._timed("produced", partial(log.produced, self._detokenizer, [entry], self._engine.slot, produced))
        for uid in uids:
            self._timed("end", partial(log.end, uid, Cancelled(by="bench"), frontend=FRONTEND))
        self._step(StepCompleted(rows=(), released=tuple(uids)), taken)
        log.produced(self._detokenizer, [self._read_step()], self._engine.slot, [])

    def _step(self, event: StepCompleted, ended: list[str]) -> None:
        cursor, steps = self._control_cursor, {next(self._numbers): event}
        done = self._log.step(self._engine, steps, ended=ended, control_cursor=cursor, lease_ms=LIVE_LEASE_MS)
        self._control_cursor = done.control_cursor

    def _read_step(self) -> Entry:
        (entry,) = self._log.read(self._steps, self._detokenizer.slot, max_entries=1, block_ms=0)
        return entry
