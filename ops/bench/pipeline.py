"""`minisgl bench pipeline`: what the log and the web process cost. Commits in a tight loop, the real stages around an
engine that computes nothing, the CPU time of the web process before them, and the bytes that a finished request leaves.
No model, no GPU.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import redis
import structlog
from rich.console import Console
from rich.status import Status
from rich.table import Table

from ops.bench import nonsense, report
from ops.bench.pipeline_commits import COMMITS, Lives
from ops.bench.pipeline_way import PROMPT, Way, WayTimes
from ops.bench.pipeline_web import WebTimes, web_process
from ops.bench.report import Spread, spread_of
from pipeline.config import at_least, flag, parse_flags, seconds
from pipeline.errors import LogUnavailable
from pipeline.log.address import connect, without_password
from pipeline.log.check import check_server
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process.redis_server import EmbeddedRedis

ABOUT: Final = """\
Measures the log and the web process, without a model: each commit in a tight loop; what tokenizer, log and detokenizer
add to every step of an engine that computes nothing, against the same schedule in a plain loop; the CPU time of the web
process for a streamed token and for a request; and how many bytes a finished request leaves.
"""
PACKAGES: Final = ("redis", "hiredis", "pydantic", "orjson", "quart", "hypercorn")
REMEMBERED_TOKENS: Final = 200
"""Of the request whose bytes are counted."""
DEFAULT_STEP_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """What is measured, where, and how often."""

    redis_url: str = flag(
        "--redis-url", default="", help="redis:// or unix:// URL; its keys there are removed again [an embedded one]"
    )
    rows: tuple[int, ...] = flag(
        "--rows", default=(1, 16, 64, 256), parse=at_least(1), repeated=True, help="requests at once [1 16 64 256]"
    )
    way_rows: tuple[int, ...] = flag(
        "--way-rows",
        default=(1, 16, 64),
        parse=at_least(1),
        repeated=True,
        help="the same, through the real stages [1 16 64]",
    )
    samples: int = flag("--samples", default=200, parse=at_least(1), help="steps of a run, in the tight loop")
    tokens: int = flag("--tokens", default=400, parse=at_least(8), help="tokens of a request, through the stages")
    web_tokens: int = flag(
        "--web-tokens",
        default=1200,
        parse=at_least(1),
        help="tokens that the web process streams in a run, at least",
    )
    web_requests: int = flag(
        "--web-requests",
        default=400,
        parse=at_least(1),
        help="requests of one token that it answers in a run, streamed and not",
    )
    step_s: float = flag(
        "--step-time", default=DEFAULT_STEP_S, parse=seconds, help="seconds of a step; steps of no time are tried too"
    )
    runs: int = flag("--runs", default=3, parse=at_least(1), help="runs, of which the medians are shown")
    output: str = flag("--output", default="", help="file for the set-up and all figures, as JSON")


@dataclass(frozen=True, slots=True)
class CommitFigures:
    """One commit with so many requests at once."""

    commit: str
    rows: int
    per_s: float
    us: Spread
    runs: list[Spread]


@dataclass(frozen=True, slots=True)
class WayFigures:
    """So many requests through all stages. Times are from step to step, in microseconds."""

    rows: int
    step_us: float
    """What the engine itself takes."""
    alone_us: Spread
    way_us: Spread
    added_per_step_us: float
    """Of the means: what the log takes from the throughput."""
    added_p50_us: float
    added_per_token_us: float
    commit_us: Spread
    """Of a step, in place: beside a running engine, tokenizer and detokenizer."""
    runs: list[tuple[Spread, Spread, Spread]]
    """alone_us, way_us and commit_us of each."""


@dataclass(frozen=True, slots=True)
class WebFigures:
    """CPU time of the web process with so many requests at once: medians, and what each run took."""

    rows: int
    step_us: float
    median: WebTimes
    runs: list[WebTimes]
    rest_us_per_s: float
    """What it took of a second at rest, which is subtracted from the others."""


@dataclass(frozen=True, slots=True)
class RememberedRequest:
    """What a finished request leaves in Redis until its retention is over."""

    prompt_tokens: int
    output_tokens: int
    num_entries: int
    history_bytes: int


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the benchmark; return the exit code.

    Raises:
        ConfigError: The flags or the Redis cannot work; nothing was measured.
        PipelineStuck: A stage did not do its part.
    """
    (config,) = parse_flags("bench pipeline", [PipelineConfig], arguments, environment, about=ABOUT)
    check(config)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with redis_and_folder(config) as (url, folder), Console(stderr=True).status("starting") as status:
        server = server_of(url)
        names = f"bench-{secrets.token_hex(4)}"
        try:
            commits = measure_commits(config, url, Names(f"{names}-commits"), status)
            way, remembered, web = measure_stages(config, url, Names(f"{names}-way"), folder, status)
        finally:
            remove_keys(url, names)
    print_figures(commits, way, web, remembered, server)
    if config.output:
        shown = ["minisgl", "bench", "pipeline", *map(without_password, arguments)]
        document = {
            "setup": report.setup(shown, PACKAGES) | {"redis": server},
            "options": options_of(config),
            "commits": commits,
            "way": way,
            "web": web,
            "finished_request": remembered,
        }
        report.write_json(Path(config.output), document)
    return 0


def check(config: PipelineConfig) -> None:
    """Refuse what would be found only after the measurement.

    Raises:
        ConfigError: The output cannot be written, or the Redis cannot hold a log.
    """
    report.check_can_write("--output", config.output)
    if config.redis_url:
        check_server(config.redis_url)


@contextlib.contextmanager
def redis_and_folder(config: PipelineConfig) -> Iterator[tuple[str, Path]]:
    """Give the URL of the Redis to use, and a folder with the random model; what is ours is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as scratch, contextlib.ExitStack() as stack:
        folder = nonsense.ensure(Path(scratch))
        if config.redis_url:
            yield config.redis_url, folder
            return
        server = EmbeddedRedis(Path(scratch) / "redis")
        stack.callback(server.stop)
        yield server.url, folder


def measure_commits(config: PipelineConfig, url: str, names: Names, status: Status) -> list[CommitFigures]:
    """Time every commit at every number of rows."""
    figures = []
    with contextlib.closing(RedisLog(url, names)) as log:
        for rows in config.rows:
            runs = []
            for run in range(config.runs):
                status.update(f"commits, {rows} rows, run {run + 1} of {config.runs}")
                with contextlib.closing(Lives(log, rows)) as lives:
                    runs.append(lives.times_us(config.samples))
            for commit in COMMITS:
                spreads = [spread_of(run[commit]) for run in runs]
                middle = median_of(spreads)
                figures.append(CommitFigures(commit, rows, 1e6 / middle.mean, middle, spreads))
    return figures


def measure_stages(
    config: PipelineConfig, url: str, names: Names, folder: Path, status: Status
) -> tuple[list[WayFigures], RememberedRequest, list[WebFigures]]:
    """Start the stages and measure the way through them, and the web process before them."""
    way = Way(url, names, folder)
    status.update("starting the stages")
    with way.stages():
        (uid,) = way.run(1, REMEMBERED_TOKENS, 0.0).uids  # the first run warms up the stages, too
        remembered = remembered_request(url, names, uid)
        return measure_way(config, way, status), remembered, measure_web(config, way, status)


def measure_way(config: PipelineConfig, way: Way, status: Status) -> list[WayFigures]:
    """Time the steps of an engine with the real stages around it."""
    figures = []
    for step_s in (0.0, config.step_s):
        for rows in config.way_rows:
            runs = []
            for run in range(config.runs):
                status.update(f"stages, {rows} rows, step of {step_s:g} s, run {run + 1} of {config.runs}")
                runs.append(way.run(rows, config.tokens, step_s))
            figures.append(way_figures(rows, step_s, runs))
    return figures


def measure_web(config: PipelineConfig, way: Way, status: Status) -> list[WebFigures]:
    """Measure the CPU time of a web process before the stages."""
    figures = []
    for step_s in (0.0, config.step_s):
        status.update(f"starting the web process, step of {step_s:g} s")
        with way.engine(max(config.way_rows), config.tokens, step_s), web_process(way) as web:
            for rows in config.way_rows:
                runs = []
                for run in range(config.runs):
                    status.update(f"web process, {rows} rows, step of {step_s:g} s, run {run + 1} of {config.runs}")
                    runs.append(web.run(rows, config.tokens, config.web_tokens, config.web_requests))
                figures.append(web_figures(rows, step_s, runs, web.rest_us_per_s))
    return figures


def web_figures(rows: int, step_s: float, runs: Sequence[WebTimes], rest_us_per_s: float) -> WebFigures:
    """Return the medians of *runs*."""
    median = WebTimes(*(statistics.median(getattr(run, name) for run in runs) for name in WebTimes.__slots__))
    return WebFigures(rows, step_s * 1e6, median, list(runs), rest_us_per_s)


def way_figures(rows: int, step_s: float, runs: Sequence[WayTimes]) -> WayFigures:
    """Return the medians of *runs*."""
    spreads = [tuple(map(spread_of, (run.alone_us, run.way_us, run.commits_us))) for run in runs]
    alone, through, commit = (median_of(column) for column in zip(*spreads, strict=True))
    added_us = statistics.median(through.mean - alone.mean for alone, through, _ in spreads)
    return WayFigures(
        rows=rows,
        step_us=step_s * 1e6,
        alone_us=alone,
        way_us=through,
        added_per_step_us=added_us,
        added_p50_us=statistics.median(through.p50 - alone.p50 for alone, through, _ in spreads),
        added_per_token_us=added_us / rows,
        commit_us=commit,
        runs=[(alone, through, commit) for alone, through, commit in spreads],
    )


def median_of(spreads: Sequence[Spread]) -> Spread:
    """Return the median of each figure."""
    return Spread(
        count=min(spread.count for spread in spreads),
        mean=statistics.median(spread.mean for spread in spreads),
        p50=statistics.median(spread.p50 for spread in spreads),
        p90=statistics.median(spread.p90 for spread in spreads),
        p99=statistics.median(spread.p99 for spread in spreads),
    )


def remembered_request(url: str, names: Names, uid: str) -> RememberedRequest:
    """Return what the history of a finished request takes."""
    key = names.request(uid)
    with connect(url) as client:
        return RememberedRequest(
            prompt_tokens=len(PROMPT),
            output_tokens=REMEMBERED_TOKENS,
            num_entries=int(client.execute_command("XLEN", key)),
            history_bytes=int(client.execute_command("MEMORY", "USAGE", key, "SAMPLES", 0)),
        )


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
    """Return which Redis it is."""
    with connect(url) as client:
        info = client.info()
        assert isinstance(info, dict)
        kept = {
            name: info.get(name) for name in ("redis_version", "os", "process_id", "aof_enabled", "io_threads_active")
        }
        return kept | {"over": "unix socket" if url.startswith("unix://") else "TCP"}


def options_of(config: PipelineConfig) -> dict[str, Any]:
    """Return every flag's value as it was used, but for the password in the URL."""
    shown = replace(config, redis_url=without_password(config.redis_url))
    return {name: getattr(shown, name) for name in PipelineConfig.__dataclass_fields__}


def print_figures(
    commits: Sequence[CommitFigures],
    way: Sequence[WayFigures],
    web: Sequence[WebFigures],
    remembered: RememberedRequest,
    server: Mapping[str, Any],
) -> None:
    """Print the tables."""
    console = Console(highlight=False)
    console.print(commit_table(commits, f"Commits in a tight loop, Redis {server['redis_version']}, {server['over']}"))
    console.print(
        "p50 / p99 in us, and how many in a second. submit, tokenized and end are one request each, step and produced "
        "all rows at once; a take brings up to 8.\n"
    )
    console.print(way_table(way))
    console.print(
        "Means from step to step in us: of an engine that computes nothing but waits, in a plain loop and with all "
        "stages; what those add to a step (mean, p50) and to a token; p50 / p99 of the commit of a step meanwhile.\n"
    )
    console.print(web_table(web))
    rest_ms = statistics.median(item.rest_us_per_s for item in web) / 1000
    console.print(
        "User and system, in us: of a streamed token after the first; of a request of one token, streamed and not, on "
        f"a connection that is there. What it takes at rest, {rest_ms:.1f} ms of a second, is not in it.\n"
    )
    console.print(
        f"A finished request of {remembered.prompt_tokens} + {remembered.output_tokens} tokens leaves "
        f"{remembered.history_bytes:,} bytes in Redis, {remembered.num_entries} entries, until its retention is over."
    )


def commit_table(commits: Sequence[CommitFigures], title: str) -> Table:
    """Return a row for each commit, a column for each number of rows."""
    table = Table("commit", title=title)
    for rows in dict.fromkeys(item.rows for item in commits):
        table.add_column(f"{rows} rows" if rows > 1 else "1 row", justify="right")
    for commit in COMMITS:
        cells = (item for item in commits if item.commit == commit)
        table.add_row(commit, *(f"{item.us.p50:,.0f} / {item.us.p99:,.0f}\n{item.per_s:,.0f}/s" for item in cells))
    return table


def way_table(way: Sequence[WayFigures]) -> Table:
    """Return a row for each number of rows and time of a step."""
    table = Table(title="What the stages add to a step")
    for name in ("rows", "wait", "loop", "stages", "+ step", "+ p50", "+ token", "commit"):
        table.add_column(name, justify="right")
    for item in way:
        table.add_row(
            f"{item.rows}",
            f"{item.step_us:,.0f}",
            f"{item.alone_us.mean:,.0f}",
            f"{item.way_us.mean:,.0f}",
            f"{item.added_per_step_us:+,.0f}",
            f"{item.added_p50_us:+,.0f}",
            f"{item.added_per_token_us:+,.1f}",
            f"{item.commit_us.p50:,.0f} / {item.commit_us.p99:,.0f}",
        )
    return table


def web_table(web: Sequence[WebFigures]) -> Table:
    """Return a row for each number of rows and time of a step."""
    table = Table(title="CPU time of the web process")
    for name in ("rows", "wait", "token", "streamed request", "other request"):
        table.add_column(name, justify="right")
    for item in web:
        times = (item.median.token_us, item.median.stream_us, item.median.whole_us)
        table.add_row(f"{item.rows}", f"{item.step_us:,.0f}", *(f"{time_us:,.0f}" for time_us in times))
    return table
