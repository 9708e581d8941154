"""Measurements as figures, tables, JSON and a plot. Sends nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from ops.bench.load import Answer, Measured
from pipeline.errors import ConfigError
from stages.generate.machine import usable_cpus

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


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit that good requests keep: `ttft`, `tpot` or `e2e` of at most *most_ms*."""

    name: str
    most_ms: float

    def holds(self, answer: Answer) -> bool:
        """Return whether *answer* keeps the limit; an answer of one token keeps every `tpot`."""
        value = getattr(answer, f"{self.name}_ms")
        return value is None or bool(value <= self.most_ms)

    def __str__(self) -> str:
        return f"{self.name}:{self.most_ms:g}"


def summarize(measured: Sequence[Measured], objectives: Sequence[Objective] = ()) -> dict[str, Any]:
    """Return the figures of a run of at least one request.

    Throughput is tokens of complete answers over the time of all requests. The share of good ones is of all requests.
    """
    whole = [one for one in measured if not one.answer.error]
    answers = [one.answer for one in whole]
    duration_s = max(one.answer.ended_s for one in measured) - min(one.answer.sent_s for one in measured)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    counted = ("prompt_tokens", "cached_tokens", "output_tokens")
    tokens = {name: sum(getattr(answer, name) for answer in answers) for name in counted}
    num_good = sum(all(objective.holds(answer) for objective in objectives) for answer in answers)
    return {
        "num_requests": len(measured),
        "num_failed": len(measured) - len(whole),
        "duration_s": duration_s,
        "ttft_ms": spread_of([answer.ttft_ms for answer in answers]),
        "tpot_ms": spread_of([time_ms for answer in answers if (time_ms := answer.tpot_ms) is not None]),
        "itl_ms": spread_of([gap_ms for answer in answers for gap_ms in answer.itl_ms]),
        "e2e_ms": spread_of([answer.e2e_ms for answer in answers]),
        "lag_ms": spread_of([one.lag_s * 1000 for one in measured if one.turn == 0]),
        **tokens,
        "planned_prompt_tokens": planned_prompt_tokens(measured),
        "planned_output_tokens": sum(one.output_tokens for one in whole),
        "tokens_per_chunk": tokens["output_tokens"] / max(sum(len(answer.content_s) for answer in answers), 1),
        "requests_per_s": len(whole) * per_s,
        "output_tokens_per_s": tokens["output_tokens"] * per_s,
        "total_tokens_per_s": (tokens["prompt_tokens"] + tokens["output_tokens"]) * per_s,
        "good_share": num_good / len(measured),
        "good_per_s": num_good * per_s,
    }


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
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


TIMES: Final = {
    "time to first token, ms": "ttft_ms",
    "time per token after it, ms": "tpot_ms",
    "between chunks, ms": "itl_ms",
    "whole request, ms": "e2e_ms",
}
COUNTS: Final = {
    "output tokens/s": "{output_tokens_per_s:,.1f}",
    "total tokens/s": "{total_tokens_per_s:,.1f}",
    "requests/s": "{requests_per_s:,.2f}",
    "seconds": "{duration_s:,.1f}",
    "complete answers": "{num_whole:,} of {num_requests:,}",
    "prompt tokens": "{prompt_tokens:,} ({planned_prompt_tokens:,} planned)",
    "  cached": "{cached_tokens:,}",
    "output tokens": "{output_tokens:,} ({planned_output_tokens:,} planned)",
}


def table(summary: Mapping[str, Any], objectives: Sequence[Objective], *, scheduled: bool) -> str:
    """Return the figures as a table."""
    rows: list[tuple[str, ...]] = [("", "mean", "p50", "p90", "p99")]
    for title, name in TIMES.items():
        _, *figures = astuple(summary[name])
        rows.append((title, *(f"{value:,.1f}" if summary[name].count else "-" for value in figures)))
    num_whole = summary["num_requests"] - summary["num_failed"]
    lines = [
        aligned(rows),
        f"A chunk has {summary['tokens_per_chunk']:.2f} tokens on average; tokens are counted from `usage`.",
        "",
        aligned([(title, text.format(num_whole=num_whole, **summary)) for title, text in COUNTS.items()]),
    ]
    if objectives:
        good = "{good_share:.1%} of the requests, {good_per_s:,.2f} a second".format(**summary)
        lines.append(f"\ngood ({' '.join(map(str, objectives))}): {good}")
    if scheduled:
        lag = summary["lag_ms"]
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
    shown: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = argument.partition("=")
        hidden = f"{name}=***" if name in SECRETS and equals else argument
        shown.append("***" if before in SECRETS else hidden)
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
    return len(usable_cpus())


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
        "lag_ms": one.lag_s * 1000,
        "sent_ms": (answer.sent_s - start_s) * 1000,
        "e2e_ms": answer.e2e_ms,
    }
    if answer.error:
        row["error"] = answer.error
    else:
        names = ("prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "tpot_ms", "itl_ms")
        row |= {name: getattr(answer, name) for name in names}
    return {name: _rounded(value) if name.endswith("_ms") else value for name, value in row.items()}


def _rounded(ms: float | list[float] | None) -> Any:
    if isinstance(ms, list):
        return [round(each, 3) for each in ms]
    return ms if ms is None else round(ms, 3)


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
        ("time to first token", [answer.ttft_ms for answer in answers]),
        ("between chunks", [gap for answer in answers for gap in answer.itl_ms]),
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
