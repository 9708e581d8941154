"""`minisgl bench pipeline`: the cost of the log, of ranks and of the web process, without a model or a GPU.

It measures what the host does for a step, the way of a plan to another rank, a step of one layer with one rank and with
two, commits in a tight loop, the real stages around an engine that computes nothing, the CPU time of a web process
before them, and the bytes that a finished request leaves. The weights of the layer are random.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import redis
import structlog
from rich.console import Console
from rich.status import Status

from ops.bench import report
from ops.bench.models import nonsense
from ops.bench.pipeline_commits import COMMITS, LIMITS, Lives
from ops.bench.pipeline_frames import other_rank
from ops.bench.pipeline_host import host_times_us
from ops.bench.pipeline_ranks import one_rank, two_ranks, write_layer
from ops.bench.pipeline_way import PROMPT, Way, WayTimes
from ops.bench.pipeline_web import WebTimes, web_process
from ops.bench.report import Spread, spread_of
from pipeline.errors import LogUnavailable
from pipeline.flags import at_least, flag, parse_flags, seconds
from pipeline.log.address import connect, without_password
from pipeline.log.check import check_server
from pipeline.log.redis import RedisLog
from pipeline.log.replies import server_of as version_of
from pipeline.names import Names
from pipeline.process.redis_server import EmbeddedRedis

ABOUT: Final = """\
Measures the log and the web process, without a model: what the host does for a decode step; how long its plan takes to
another rank; a step of one layer with one rank and with two; each commit in a tight loop; what tokenizer, log and
detokenizer add to every step of an engine that computes nothing, compared with the same schedule in a plain loop; the
CPU time of the web process per streamed token and per request; and the bytes that a finished request leaves.
"""
PACKAGES: Final = ("redis", "hiredis", "pydantic", "orjson", "quart", "hypercorn")
REMEMBERED_TOKENS: Final = 200
"""Output tokens of the request that is weighed."""
DEFAULT_STEP_S: Final = 0.01


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
        default=DEFAULT_STEP_S,
        parse=seconds,
        help="seconds per step of the engine; a run with 0 s is always added",
    )
    runs: int = flag("--runs", default=3, parse=at_least(1), help="runs; their medians are shown")
    output: str = flag("--output", default="", help="JSON file for the setup and all figures")


Figures: TypeAlias = dict[str, Any]
"""A row of the JSON. Times are in microseconds, those of the way from step to step."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the benchmark; return the exit code.

    Raises:
        ConfigError: The flags or the Redis cannot work; nothing was measured.
        PipelineStuck: A stage made no progress.
    """
    (config,) = parse_flags("bench pipeline", [PipelineConfig], arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    if config.redis_url:
        check_server(config.redis_url)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with redis_and_folder(config) as (url, folder), Console(stderr=True).status("starting") as status:
        server = server_of(url)
        names = f"bench-{secrets.token_hex(4)}"
        try:
            host = measure_host(config, status)
            frames = measure_frames(config, folder, status)
            ranks = measure_ranks(config, folder, status)
            commits = measure_commits(config, url, Names(f"{names}-commits"), status)
            way, remembered, web = measure_stages(config, url, Names(f"{names}-way"), folder, status)
        finally:
            remove_keys(url, names)
    print_figures(host, frames, ranks, commits, way, web, remembered, server)
    document = {
        "options": report.options_of(replace(config, redis_url=without_password(config.redis_url))),
        "host": host,
        "frames": frames,
        "ranks": ranks,
        "commits": commits,
        "way": way,
        "web": web,
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


def _repeated(config: PipelineConfig, status: Status, what: str) -> Iterator[int]:
    """Yield the number of each run, and show it."""
    for run in range(1, config.runs + 1):
        status.update(f"{what}, run {run} of {config.runs}")
        yield run


def measure_host(config: PipelineConfig, status: Status) -> list[Figures]:
    """Time what the host does for a step at every number of rows."""
    figures = []
    for rows in config.rows:
        repeated = _repeated(config, status, f"host, {rows} rows")
        spreads = [spread_of(host_times_us(rows, config.tokens)) for _ in repeated]
        figures.append({"rows": rows, "us": median_of(spreads), "runs": spreads})
    return figures


def measure_frames(config: PipelineConfig, folder: Path, status: Status) -> list[Figures]:
    """Time the way of a plan to another rank at every number of rows."""
    figures = []
    status.update("starting another rank")
    with other_rank(folder) as send:
        send(1, config.samples)  # the first ones warm up
        for rows in config.rows:
            runs = [send(rows, config.samples) for _ in _repeated(config, status, f"another rank, {rows} rows")]
            sent, known = ([spread_of(times) for times in each] for each in zip(*map(astuple, runs), strict=True))
            middle = {"sent_us": median_of(sent), "known_us": median_of(known)}
            figures.append({"rows": rows, **middle, "runs": [*zip(sent, known, strict=True)]})
    return figures


def measure_ranks(config: PipelineConfig, folder: Path, status: Status) -> list[Figures]:
    """Time the steps of a model of one layer with one rank and with two, at every number of rows."""
    layer, most_rows = write_layer(folder / "layer"), max(config.rows)
    figures: list[Figures] = [{"rows": rows} for rows in config.rows]
    for name, ranks in (("one", one_rank), ("two", two_ranks)):
        status.update(f"loading a layer, {name}")
        with ranks(layer, most_rows) as compute:
            compute(most_rows, config.samples)  # the first ones warm up
            for row in figures:
                repeated = _repeated(config, status, f"a layer with ranks: {name}, {row['rows']} rows")
                runs = [spread_of(compute(row["rows"], config.samples)) for _ in repeated]
                row |= {f"{name}_us": median_of(runs), f"{name}_runs": runs}
    return figures


def measure_commits(config: PipelineConfig, url: str, names: Names, status: Status) -> list[Figures]:
    """Time every commit at every number of rows."""
    figures = []
    with contextlib.closing(RedisLog(url, names, LIMITS)) as log:
        for rows in config.rows:
            runs = []
            for _ in _repeated(config, status, f"commits, {rows} rows"):
                with contextlib.closing(Lives(log, rows)) as lives:
                    runs.append(lives.times_us(config.samples))
            for commit in COMMITS:
                spreads = [spread_of(run[commit]) for run in runs]
                middle = median_of(spreads)
                row = {"commit": commit, "rows": rows, "per_s": 1e6 / middle.mean, "us": middle, "runs": spreads}
                figures.append(row)
    return figures


def measure_stages(
    config: PipelineConfig, url: str, names: Names, folder: Path, status: Status
) -> tuple[list[Figures], Figures, list[Figures]]:
    """Start the stages; measure the way through them, and the web process before them."""
    way = Way(url, names, folder)
    status.update("starting the stages")
    with way.stages():
        (uid,) = way.run(1, REMEMBERED_TOKENS, 0.0).uids  # the first run warms up the stages, too
        remembered = remembered_request(url, names, uid)
        return measure_way(config, way, status), remembered, measure_web(config, way, status)


def measure_way(config: PipelineConfig, way: Way, status: Status) -> list[Figures]:
    """Time the steps of an engine with the real stages around it."""
    figures = []
    for step_s in (0.0, config.step_s):
        for rows in config.way_rows:
            repeated = _repeated(config, status, f"stages, {rows} rows, step of {step_s:g} s")
            figures.append(way_figures(rows, step_s, [way.run(rows, config.tokens, step_s) for _ in repeated]))
    return figures


def measure_web(config: PipelineConfig, way: Way, status: Status) -> list[Figures]:
    """Measure the CPU time of a web process before the stages."""
    figures = []
    for step_s in (0.0, config.step_s):
        status.update(f"starting the web process, step of {step_s:g} s")
        with way.engine(max(config.way_rows), config.tokens, step_s), web_process(way) as web:
            for rows in config.way_rows:
                repeated = _repeated(config, status, f"web process, {rows} rows, step of {step_s:g} s")
                runs = [web.run(rows, config.tokens, config.web_tokens, config.web_requests) for _ in repeated]
                figures.append(web_figures(rows, step_s, runs, web.rest_us_per_s))
    return figures


def web_figures(rows: int, step_s: float, runs: Sequence[WebTimes], rest_us_per_s: float) -> Figures:
    """Return the medians of *runs*. They do not contain the time at rest."""
    median = WebTimes(*_medians(runs))
    return {"rows": rows, "step_us": step_s * 1e6, "median": median, "runs": runs, "rest_us_per_s": rest_us_per_s}


def way_figures(rows: int, step_s: float, runs: Sequence[WayTimes]) -> Figures:
    """Return the medians of *runs*. What the log costs in throughput is the difference of the means."""
    spreads = [(spread_of(run.alone_us), spread_of(run.way_us), spread_of(run.commits_us)) for run in runs]
    alone, through, commit = (median_of(column) for column in zip(*spreads, strict=True))
    added_us = statistics.median(through.mean - alone.mean for alone, through, _ in spreads)
    return {
        "rows": rows,
        "step_us": step_s * 1e6,
        "alone_us": alone,
        "way_us": through,
        "added_per_step_us": added_us,
        "added_p50_us": statistics.median(through.p50 - alone.p50 for alone, through, _ in spreads),
        "added_per_token_us": added_us / rows,
        "commit_us": commit,
        "runs": spreads,
    }


def median_of(spreads: Sequence[Spread]) -> Spread:
    """Return the median of each figure, and the smallest count."""
    return replace(Spread(*_medians(spreads)), count=min(spread.count for spread in spreads))


def _medians(runs: Sequence[Any]) -> list[Any]:
    """Return the median of each field of dataclasses."""
    return [
        statistics.median(column) for column in zip(*(report.options_of(run).values() for run in runs), strict=True)
    ]


def remembered_request(url: str, names: Names, uid: str) -> Figures:
    """Return what a finished request leaves in Redis until its retention is over."""
    key = names.request(uid)
    with connect(url) as client:
        return {
            "prompt_tokens": len(PROMPT),
            "output_tokens": REMEMBERED_TOKENS,
            "num_entries": int(client.execute_command("XLEN", key)),
            "history_bytes": int(client.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0)),
        }


def remove_keys(url: str, namespace: str) -> None:
    """Remove every key of the namespaces that begin with *namespace*.

    Raises:
        LogUnavailable: Redis went away meanwhile.
    """
    try:
        with connect(url) as client:
            for key in client.scan_iter(match=f"{{{namespace}-*", count=1000):
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


def print_figures(
    host: Sequence[Figures],
    frames: Sequence[Figures],
    ranks: Sequence[Figures],
    commits: Sequence[Figures],
    way: Sequence[Figures],
    web: Sequence[Figures],
    remembered: Figures,
    server: Figures,
) -> None:
    """Print the tables."""
    rest_ms = statistics.median(item["rest_us_per_s"] for item in web) / 1000
    print(f"""\
Host time of a decode step

{host_table(host)}

p50 / p99 in us, to plan the step, to lay it out as tensors, and to complete it.

A plan on its way to another rank, over gloo on this machine

{frame_table(frames)}

p50 / p99 in us, until rank 0 has packed it and may compute, and until the other rank has read it.

A decode step of a model of one layer, computed by one rank and by two

{rank_table(ranks)}

p50 / p99 in us. The layer is that of the Qwen3 of 95 M. The ranks divide the threads.

Commits in a tight loop, {server["server"]} {server["version"]}, {server["over"]}

{commit_table(commits)}

p50 / p99 in us, and commits per second. A submit, tokenized or end is one request, a step or produced is all rows; a
take brings up to 8 requests.

What the stages add to a step

{way_table(way)}

Mean times from step to step in us, of an engine that only waits: in a plain loop, and with all stages; what the stages
add per step (mean, p50) and per token; p50 / p99 of the step's commit with all stages.

CPU time of the web process

{web_table(web)}

User and system time in us: of a streamed token after the first; of a request of one token, streamed and not, on an open
connection. The {rest_ms:.1f} ms per second that the process takes at rest are subtracted.

A finished request of {remembered["prompt_tokens"]} + {remembered["output_tokens"]} tokens leaves \
{remembered["history_bytes"]:,} bytes in Redis, {remembered["num_entries"]} entries, until its retention is over.""")


def host_table(host: Sequence[Figures]) -> str:
    """Return a column for each number of rows."""
    return report.aligned([_columns(item["rows"] for item in host), ["step", *(_p50_p99(item["us"]) for item in host)]])


def frame_table(frames: Sequence[Figures]) -> str:
    """Return a column for each number of rows."""
    rows = [[name, *(_p50_p99(item[f"{name}_us"]) for item in frames)] for name in ("sent", "known")]
    return report.aligned([_columns(item["rows"] for item in frames), *rows])


def rank_table(ranks: Sequence[Figures]) -> str:
    """Return a column for each number of rows."""
    rows = [[name, *(_p50_p99(item[f"{name}_us"]) for item in ranks)] for name in ("one", "two")]
    return report.aligned([_columns(item["rows"] for item in ranks), *rows])


def commit_table(commits: Sequence[Figures]) -> str:
    """Return a row for each commit, a column for each number of rows."""
    cells = {(item["commit"], item["rows"]): f"{_p50_p99(item['us'])}, {item['per_s']:,.0f}/s" for item in commits}
    columns = dict.fromkeys(item["rows"] for item in commits)
    rows = ([commit, *(cells[commit, number] for number in columns)] for commit in COMMITS)
    return report.aligned([_columns(columns), *rows])


def way_table(way: Sequence[Figures]) -> str:
    """Return a row for each number of rows and time of a step."""
    rows = [["rows", "wait", "loop", "stages", "+ step", "+ p50", "+ token", "commit"]]
    for item in way:
        times = [f"{time_us:,.0f}" for time_us in (item["step_us"], item["alone_us"].mean, item["way_us"].mean)]
        added = [f"{item[name]:+,.0f}" for name in ("added_per_step_us", "added_p50_us")]
        last = [f"{item['added_per_token_us']:+,.1f}", _p50_p99(item["commit_us"])]
        rows.append([f"{item['rows']}", *times, *added, *last])
    return report.aligned(rows)


def web_table(web: Sequence[Figures]) -> str:
    """Return a row for each number of rows and time of a step."""
    rows = [["rows", "wait", "token", "streamed request", "other request"]]
    for item in web:
        times = (item["step_us"], *report.options_of(item["median"]).values())
        rows.append([f"{item['rows']}", *(f"{time_us:,.0f}" for time_us in times)])
    return report.aligned(rows)


def _columns(numbers: Iterable[int]) -> list[str]:
    return ["", *(f"{rows} rows" if rows > 1 else "1 row" for rows in numbers)]


def _p50_p99(us: Spread) -> str:
    return f"{us.p50:,.0f} / {us.p99:,.0f}"
