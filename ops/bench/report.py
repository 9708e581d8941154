"""Measurements as figures, tables, JSON and a plot. Sends nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from ops.bench.load import Answer, Measured
from pipeline.errors import ConfigError

SECRETS: Final = ("--api-key",)
LATE_MS: Final = 20.0
"""The schedule was missed if half of the requests were later than this, or one in a hundred five times later."""
KINDS_OF_FAILURE_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a measurement; all 0 without values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


def spread_of(values: Sequence[float]) -> Spread:
    """Return mean and percentiles of *values*; percentiles are interpolated."""
    if not values:
        return Spread(0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Spread(len(values), float(np.mean(values)), p50, p90, p99)


def ttft_ms(answer: Answer) -> float:
    """Time to the first text."""
    return (answer.content_s[0] - answer.sent_s) * 1000


def tpot_ms(answer: Answer) -> float | None:
    """Time per token after the first; None if the answer has one token."""
    if answer.output_tokens < 2:
        return None
    return (answer.content_s[-1] - answer.content_s[0]) * 1000 / (answer.output_tokens - 1)


def itl_ms(answer: Answer) -> list[float]:
    """Times between chunks with text."""
    return [(later - earlier) * 1000 for earlier, later in pairwise(answer.content_s)]


def e2e_ms(answer: Answer) -> float:
    """Time to the end of the stream."""
    return (answer.ended_s - answer.sent_s) * 1000


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit that good requests keep: `ttft`, `tpot` or `e2e` of at most *most_ms*."""

    name: str
    most_ms: float

    def holds(self, answer: Answer) -> bool:
        """Return whether *answer* keeps the limit; an answer of one token keeps every `tpot`."""
        value = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}[self.name](answer)
        return value is None or value <= self.most_ms

    def __str__(self) -> str:
        return f"{self.name}:{self.most_ms:g}"


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Throughput: tokens of complete answers over the time of all requests."""

    num_requests: int
    num_failed: int
    duration_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    lag_ms: Spread
    prompt_tokens: int
    planned_prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    planned_output_tokens: int
    tokens_per_chunk: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_share: float
    """Share of all planned requests; a failed request is not good."""
    good_per_s: float


def summarize(measured: Sequence[Measured], objectives: Sequence[Objective] = ()) -> Summary:
    """Return the figures of a run of at least one request."""
    whole = [one for one in measured if not one.answer.error]
    answers = [one.answer for one in whole]
    started_s = min(one.answer.sent_s for one in measured)
    duration_s = max(one.answer.ended_s for one in measured) - started_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    num_good = sum(all(objective.holds(answer) for objective in objectives) for answer in answers)
    return Summary(
        num_requests=len(measured),
        num_failed=len(measured) - len(whole),
        duration_s=duration_s,
        ttft_ms=spread_of([ttft_ms(answer) for answer in answers]),
        tpot_ms=spread_of([time_ms for answer in answers if (time_ms := tpot_ms(answer)) is not None]),
        itl_ms=spread_of([gap_ms for answer in answers for gap_ms in itl_ms(answer)]),
        e2e_ms=spread_of([e2e_ms(answer) for answer in answers]),
        lag_ms=spread_of([one.lag_s * 1000 for one in measured if one.turn == 0]),
        prompt_tokens=prompt_tokens,
        planned_prompt_tokens=planned_prompt_tokens(measured),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        output_tokens=output_tokens,
        planned_output_tokens=sum(one.output_tokens for one in whole),
        tokens_per_chunk=output_tokens / max(sum(len(answer.content_s) for answer in answers), 1),
        requests_per_s=len(whole) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        good_share=num_good / len(measured),
        good_per_s=num_good * per_s,
    )


def planned_prompt_tokens(measured: Sequence[Measured]) -> int:
    """Return the planned prompt tokens of complete answers: a turn's prompt holds all turns before it."""
    total = before = 0
    for one in measured:  # in the order of their sessions and turns
        if one.turn == 0:
            before = 0
        if not one.answer.error:
            total += before + one.input_tokens
        before += one.input_tokens + one.output_tokens
    return total


def failures(measured: Sequence[Measured]) -> str:
    """Return in one line how many requests failed and why; empty if none did."""
    errors = [one.answer.error for one in measured if one.answer.error]
    return f"{len(errors)} of {len(measured)} requests failed: {most_common(errors)}" if errors else ""


def most_common(errors: Sequence[str]) -> str:
    """Return how often the most common of *errors* came, and how many other kinds there are; empty without errors."""
    counts = Counter(errors)
    kinds = [f"{count}x {error}" for error, count in counts.most_common(KINDS_OF_FAILURE_SHOWN)]
    more = len(counts) - len(kinds)
    return "; ".join([*kinds, *([f"and {more} other errors"] if more else [])])


def kept_schedule(lag_ms: Spread) -> bool:
    """Return whether requests were sent on time."""
    return lag_ms.p50 <= LATE_MS and lag_ms.p99 <= 5 * LATE_MS


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return *rows* as lines, the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[place]) for row in rows if place < len(row)) for place in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[place]) if place else cell.ljust(widths[place]) for place, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def table(summary: Summary, objectives: Sequence[Objective], *, scheduled: bool) -> str:
    """Return the figures as a table."""
    times = (
        ("time to first token, ms", summary.ttft_ms),
        ("time per token after it, ms", summary.tpot_ms),
        ("between chunks, ms", summary.itl_ms),
        ("whole request, ms", summary.e2e_ms),
    )
    rows: list[tuple[str, ...]] = [("", "mean", "p50", "p90", "p99")]
    for name, spread in times:
        figures = (spread.mean, spread.p50, spread.p90, spread.p99)
        rows.append((name, *(f"{value:,.1f}" if spread.count else "-" for value in figures)))
    whole = summary.num_requests - summary.num_failed
    lines = [
        aligned(rows),
        f"A chunk has {summary.tokens_per_chunk:.2f} tokens on average; tokens are counted from `usage`.",
        "",
        aligned(
            [
                ("output tokens/s", f"{summary.output_tokens_per_s:,.1f}"),
                ("total tokens/s", f"{summary.total_tokens_per_s:,.1f}"),
                ("requests/s", f"{summary.requests_per_s:,.2f}"),
                ("seconds", f"{summary.duration_s:,.1f}"),
                ("complete answers", f"{whole:,} of {summary.num_requests:,}"),
                ("prompt tokens", f"{summary.prompt_tokens:,} ({summary.planned_prompt_tokens:,} planned)"),
                ("  cached", f"{summary.cached_tokens:,}"),
                ("output tokens", f"{summary.output_tokens:,} ({summary.planned_output_tokens:,} planned)"),
            ]
        ),
    ]
    if objectives:
        named = " ".join(map(str, objectives))
        lines.append(f"\ngood ({named}): {summary.good_share:.1%} of the requests, {summary.good_per_s:,.2f} a second")
    if scheduled:
        lag = summary.lag_ms
        lines.append(f"sent late by: p50 {lag.p50:.1f} ms, p99 {lag.p99:.1f} ms")
        if not kept_schedule(lag):
            lines.append(
                "The schedule was not kept: the sender had no time. Send fewer requests, or send from another machine."
            )
    return "\n".join(lines)


def setup(arguments: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """Return the command line without secrets, the machine, and the versions of *packages*."""
    return {
        "command": without_secrets(arguments),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in ("minisgl", *packages)},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": num_cores(),
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return *arguments* with the values of secret flags hidden."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide:
            argument = "***"
        elif name in SECRETS and equals:
            argument = f"{name}=***"
        shown.append(argument)
        hide = argument in SECRETS
    return shown


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    """Return the name of the CPU, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def requests_of(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return every request for the JSON: times in ms, from the first sending on."""
    start_s = min(one.answer.sent_s for one in measured)
    return [_request(one, start_s) for one in measured]


def _request(one: Measured, start_s: float) -> dict[str, Any]:
    answer = one.answer
    row: dict[str, Any] = {
        "session": one.session,
        "turn": one.turn,
        "planned_input_tokens": one.input_tokens,
        "planned_output_tokens": one.output_tokens,
        "lag_ms": round(one.lag_s * 1000, 3),
        "sent_ms": round((answer.sent_s - start_s) * 1000, 3),
        "e2e_ms": round(e2e_ms(answer), 3),
    }
    if answer.error:
        return row | {"error": answer.error}
    tpot = tpot_ms(answer)
    return row | {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "ttft_ms": round(ttft_ms(answer), 3),
        "tpot_ms": None if tpot is None else round(tpot, 3),
        "itl_ms": [round(gap, 3) for gap in itl_ms(answer)],
    }


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write *document*; a dataclass with a text form of its own, such as a Span, becomes text."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_PASSTHROUGH_DATACLASS
    path.write_bytes(orjson.dumps(document, option=option, default=_as_json) + b"\n")


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__str__ is object.__str__:
        return options_of(value)
    return str(value)


def options_of(*configs: Any) -> dict[str, Any]:
    """Return the fields of dataclasses: every flag's value, as it was used."""
    return {item.name: getattr(config, item.name) for config in configs for item in dataclasses.fields(config)}


def save(
    path: str, command: Sequence[str], packages: Sequence[str], document: Mapping[str, Any], **more_setup: Any
) -> None:
    """Write the set-up and *document* to *path*, if there is one."""
    if path:
        write_json(Path(path), {"setup": setup(command, packages) | more_setup, **document})


def check_can_write(flag: str, path: str) -> None:
    """Check that the file can be written, before anything is measured.

    Raises:
        ConfigError: Its folder does not exist, or it is a folder.
    """
    if path and (not Path(path).absolute().parent.is_dir() or Path(path).is_dir()):
        raise ConfigError(f"{flag} {path}: not a file in a folder that exists; make the folder, or pass another path")


def check_can_plot(path: str) -> None:
    """Check that the plot can be drawn, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    check_can_write("--plot", path)
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; run: pip install 'minisgl[bench]'")
    if path and Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: must end in .png, .svg or .pdf")


def plot(path: Path, measured: Sequence[Measured], title: str) -> None:
    """Draw the latencies and the output tokens/s over time; at least one answer is complete."""
    from matplotlib.figure import Figure

    answers = [one.answer for one in measured if not one.answer.error]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    latency, rate = figure.subplots(1, 2)
    for name, values in (
        ("time to first token", [ttft_ms(answer) for answer in answers]),
        ("between chunks", [gap for answer in answers for gap in itl_ms(answer)]),
    ):
        if values:
            latency.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=name)
    latency.set(xscale="log", xlabel="ms", ylabel="share of requests, or of gaps", ylim=(0, 1.02))
    latency.grid(alpha=0.3)
    latency.legend(loc="best")
    starts_s, tokens_per_s = tokens_over_time(answers)
    rate.step(starts_s, tokens_per_s, where="post")
    rate.set(xlabel="s since the first request", ylabel="output tokens/s", ylim=(0, None))
    rate.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def tokens_over_time(answers: Sequence[Answer], num_bins: int = 60) -> tuple[list[float], list[float]]:
    """Return the start of each interval and its output tokens/s; all chunks of an answer have equally many tokens."""
    start_s = min(answer.sent_s for answer in answers)
    end_s = max(answer.ended_s for answer in answers)
    came_s = [came_s - start_s for answer in answers for came_s in answer.content_s]
    weights = [answer.output_tokens / len(answer.content_s) for answer in answers for _ in answer.content_s]
    tokens, edges_s = np.histogram(came_s, bins=num_bins, range=(0, max(end_s - start_s, 1e-9)), weights=weights)
    return edges_s[:-1].tolist(), (tokens / np.diff(edges_s)).tolist()
