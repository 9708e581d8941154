"""`minisgl bench serve`: any OpenAI server under load. Checks, plans and reports; `load` sends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ops.bench import datasets, report
from ops.bench.datasets import Session, Span, Writer, length_flag
from ops.bench.load import CHAT, COMPLETIONS, FIX_LENGTH, Form, Load, Measured, ServerRefused, calibrate, connected
from ops.bench.report import Objective
from pipeline.errors import ConfigError
from pipeline.flags import above_zero, at_least, first_word, flag, parse_flags, seconds, temperature

ABOUT: Final = """\
Measures an OpenAI server under load: with a fixed concurrency (--concurrency), random arrivals (--rate), or the times
of a trace. Tokens are counted from `usage`, never from chunks: a chunk may hold several. Time to first token: from
sending to the first text. Time per token: from the first text to the last, divided by the number of tokens minus one.
Exits with 1 if a request failed, after the figures of the others.
"""
RANDOM, SHARED_PREFIX, MULTI_TURN = "random", "shared-prefix", "multi-turn"
TRACES: Final = tuple(datasets.TRACES)
DATASETS: Final = (RANDOM, SHARED_PREFIX, MULTI_TURN, *TRACES)
NUM_REQUESTS: Final = 64
CONCURRENCY: Final = 16
PACKAGES: Final = ("aiohttp",)


def objective(text: str) -> Objective:
    """Parse `ttft:200`, `tpot:50` or `e2e:5000`, in ms."""
    name, _, number = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in ("ttft", "tpot", "e2e") and 0 < float(number) < float("inf"):
            return Objective(name, float(number))
    raise argparse.ArgumentTypeError(f"{text!r}: must be ttft:MS, tpot:MS or e2e:MS")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The server, and the form of the requests."""

    url: str = flag("--url", default="http://127.0.0.1:1919", help="URL of the server")
    model: str = flag("--model", default="", help="name of the model [the first in /v1/models]")
    api_key: str = flag(
        "--api-key", default="", parse=first_word, help="key, sent as a bearer token; it is never printed"
    )
    endpoint: str = flag("--endpoint", default=CHAT, choices=(CHAT, COMPLETIONS), help="the API to use")
    fix_length: str = flag(
        "--fix-length",
        default=FIX_LENGTH[0],
        choices=FIX_LENGTH,
        help="field that fixes the length of answers; no: if the server refuses both",
    )
    temperature: float = flag("--temperature", default=0.0, parse=temperature, help="sampling temperature [0]")
    timeout_s: float = flag(
        "--timeout", default=600.0, parse=seconds, help="seconds without data after which a request counts as failed"
    )


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What is sent, and when."""

    dataset: str = flag("--dataset", default=RANDOM, choices=DATASETS, help="kind of requests")
    num_requests: int = flag(
        "--num-requests", default=0, parse=at_least(1), help=f"requests to send [{NUM_REQUESTS}, or the whole trace]"
    )
    inputs: Span = length_flag("--input-len", "user message")  # noqa: RUF009  # a Span is frozen
    outputs: Span = length_flag("--output-len", "answer")  # noqa: RUF009
    groups: int = flag("--groups", default=8, parse=at_least(1), help="shared-prefix: number of prefixes")
    prefix_tokens: int = flag(
        "--prefix-len", default=1024, parse=at_least(1), help="shared-prefix: tokens per prefix, before --input-len"
    )
    turns: int = flag("--turns", default=4, parse=at_least(1), help="multi-turn: requests per conversation")
    trace: str = flag("--trace", default="", help="mooncake, qwen: file of the trace, one JSON object per line")
    trace_scale: float = flag(
        "--trace-scale",
        default=1.0,
        parse=above_zero,
        help="mooncake, qwen: factor for all times; 0.5 is twice as fast",
    )
    concurrency: int = flag(
        "--concurrency", default=0, parse=at_least(1), help=f"requests under way at any time [{CONCURRENCY}]"
    )
    rate: float = flag(
        "--rate", default=0.0, parse=above_zero, help="random (Poisson) arrivals per second, instead of --concurrency"
    )
    warmup: int = flag("--warmup", default=2, parse=at_least(0), help="requests before the measured ones")
    seed: int = flag(
        "--seed",
        default=0,
        parse=at_least(0),
        help=("seed of lengths, texts and arrivals; the same seed hits the prefix cache of the last run"),
    )


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Where the figures go."""

    goodput: tuple[Objective, ...] = flag(
        "--goodput", default=(), parse=objective, repeated=True, help="limits of a good request: ttft:MS tpot:MS e2e:MS"
    )
    output: str = flag("--output", default="", help="JSON file for the setup and every request")
    plot: str = flag("--plot", default="", help="file for a plot (.png, .svg, .pdf); needs minisgl[bench]")


USED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "inputs": (RANDOM, SHARED_PREFIX, MULTI_TURN),
    "outputs": (RANDOM, SHARED_PREFIX, MULTI_TURN),
    "groups": (SHARED_PREFIX,),
    "prefix_tokens": (SHARED_PREFIX,),
    "turns": (MULTI_TURN,),
    "trace": TRACES,
    "trace_scale": TRACES,
}
"""The datasets that use a field; the others refuse it."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the benchmark; return the exit code. Raises MiniSGLError."""
    owners = (TargetConfig, LoadConfig, OutputConfig)
    target, load, output = parse_flags("bench serve", owners, arguments, environment, about=ABOUT)
    check(target, load, output)
    measured, model, numerics, writer = asyncio.run(_measured(target, load, planned(load)))
    summary, scheduled = report.summarize(measured, output.goodput), not _concurrency(load)
    headline = _headline(target, load, model)
    print(headline, *([f"numerics: {numerics}"] if numerics else []), "", sep="\n")
    print(report.table(summary, output.goodput, scheduled=scheduled))
    used = {"api_key": bool(target.api_key), "concurrency": _concurrency(load), "goodput": output.goodput}
    document = {
        "options": report.options_of(target, load) | used,
        "model": model,
        "numerics": numerics,
        "tokenizer": writer,
        "summary": summary,
        "kept_schedule": report.kept_schedule(summary["lag_ms"]) if scheduled else None,
        "requests": report.requests_of(measured),
    }
    report.save(output.output, ("minisgl", "bench", "serve", *arguments), PACKAGES, document)
    if output.plot and summary["num_failed"] < summary["num_requests"]:
        report.plot(Path(output.plot), measured, headline)
    if failed := report.failures(measured):
        print(f"minisgl: {failed}", file=sys.stderr)
    return 1 if failed else 0


def check(target: TargetConfig, load: LoadConfig, output: OutputConfig) -> None:
    """Raise ConfigError about the first flags that do not go together."""
    check_url(target.url)
    for item in dataclasses.fields(LoadConfig):
        names = USED_BY.get(item.name, DATASETS)
        if getattr(load, item.name) != item.default and load.dataset not in names:
            name = item.metadata["flags"][0]
            raise ConfigError(f"{name} is not used by --dataset {load.dataset}, only by {', '.join(names)}")
    if load.dataset in TRACES and not load.trace:
        raise ConfigError(f"--dataset {load.dataset} needs a file: pass --trace FILE")
    if load.rate and load.concurrency:
        raise ConfigError(f"--rate {load.rate:g} and --concurrency {load.concurrency}: pass one of them")
    if load.trace_scale != 1.0 and (load.rate or load.concurrency):
        raise ConfigError("--trace-scale changes the times of the trace, which --rate and --concurrency replace")
    report.check_can_write("--output", output.output)
    report.check_can_plot(output.plot)


def check_url(url: str, name: str = "--url") -> None:
    """Refuse what is no URL of a server, or has a password. Raises ConfigError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{name} {url}: must begin with http:// or https://")
    if "@" in urlsplit(url).netloc:
        raise ConfigError(f"{name}: has a password, which the outputs would show; pass --api-key")


def planned(load: LoadConfig) -> list[Session]:
    """Return the requests, from the flags and the seed alone. Raises ConfigError if the trace cannot be read."""
    count = load.num_requests or NUM_REQUESTS
    if load.dataset in TRACES:
        sessions = datasets.trace(load.dataset, Path(load.trace), load.trace_scale)[: load.num_requests or None]
    elif load.dataset == SHARED_PREFIX:
        sessions = datasets.shared_prefix(
            count, load.seed, load.inputs, load.outputs, groups=load.groups, prefix_tokens=load.prefix_tokens
        )
    elif load.dataset == MULTI_TURN:
        sessions = datasets.multi_turn(count, load.seed, load.inputs, load.outputs, turns=load.turns)
    else:
        sessions = datasets.drawn(count, load.seed, load.inputs, load.outputs)
    return datasets.poisson(sessions, load.rate, load.seed) if load.rate else sessions


def _concurrency(load: LoadConfig) -> int:
    """Return the fixed concurrency, or 0 if requests are sent when they are due."""
    if load.rate or (load.dataset in TRACES and not load.concurrency):
        return 0
    return load.concurrency or CONCURRENCY


async def _measured(
    target: TargetConfig, load: LoadConfig, sessions: Sequence[Session]
) -> tuple[list[Measured], str, str, Writer]:
    """Send everything; return the results, the model's name, its numerics and the writer for its tokenizer."""
    async with connected(target.url, api_key=target.api_key, timeout_s=target.timeout_s) as client:
        model, numerics = target.model or await client.served_model(), await client.numerics()
        form = Form(target.endpoint, model, target.fix_length, {"temperature": target.temperature})
        writer = await calibrate(client, form, datasets.WORDS)
        concurrency = _concurrency(load)
        warmup = datasets.drawn(load.warmup, -1 - load.seed, load.inputs, load.outputs)
        with bar("warm-up", len(warmup)) as advance:
            warm = await Load(client, form, writer.write, advance).at_once(warmup, concurrency or CONCURRENCY)
        if failed := report.failures(warm):
            raise ServerRefused(f"{target.url}: in the warm-up {failed}")
        with bar("requests", sum(len(session.turns) for session in sessions)) as advance:
            sender = Load(client, form, writer.write, advance)
            measured = await (sender.at_once(sessions, concurrency) if concurrency else sender.when_due(sessions))
        return measured, model, numerics, writer


@contextlib.contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[object], None]]:
    """Show a progress bar on a terminal; give the function that advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    show = console.is_terminal and total > 0
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=not show) as progress:
        task = progress.add_task(name, total=total)
        yield lambda _: progress.advance(task)


def _headline(target: TargetConfig, load: LoadConfig, model: str) -> str:
    """Return one line that says what was measured."""
    if concurrency := _concurrency(load):
        when = f"{concurrency} at a time"
    else:
        when = f"{load.rate:g} a second (Poisson)" if load.rate else f"at the trace's times x {load.trace_scale:g}"
    if load.dataset in TRACES:
        what = f"{load.dataset} {load.trace}"
    else:
        what = f"{load.dataset}, {load.inputs} tokens in, {load.outputs} out"
    return f"{target.url} {target.endpoint}, model {model}: {what}, {when}"
