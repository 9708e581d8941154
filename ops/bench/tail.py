"""`minisgl bench tail`: how steady streams are while long prompts arrive.

The server is a real one, behind HTTP and Redis. Each run has streams of its own. They begin alone, then a prompt comes
every few seconds, then they are alone again. A gap counts as beside a prompt if any part of it lies between the sending
of a prompt and its first token. Gaps and pauses are compared with the median of the same streams without prompts. The
streams become slower as they grow, so that median is interpolated between the times without prompts.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import orjson

from ops.bench import report
from ops.bench.load import CHAT_PROMPT, DONE, Answer, Arrival, Client, Form, connected, timed_frames
from ops.bench.models import CheckpointConfig, Prompts
from ops.bench.targets import SILENCE_TIMEOUT_S, SideFailed, our_server, scratch_and_status
from pipeline.flags import above_zero, at_least, flag, parse_flags, seconds

ABOUT: Final = """\
Starts a server and measures the time per token of running streams with and without long prompts beside them. Exits with
1 if a bound is broken: the p99 beside a prompt, and the longest pause there, both as multiples of the p50 of the same
streams without prompts around that time; medians of all runs.
"""
POLL_S: Final = 0.05
BLOCK: Final = 200
"""Gaps without prompts that have one median."""
STREAM_PROMPT: Final = 32
"""Tokens of a stream's own prompt."""
FORM: Final = Form(CHAT_PROMPT, "default", fields={"temperature": 0, "return_token_ids": True})
"""Every token gets a piece of its own, even if it completes no letter: the ids of the tokens are asked for."""
BOUNDS: Final = (("p99", "The p99 beside a prompt"), ("pause", "The longest pause"))


@dataclass(frozen=True, slots=True)
class TailConfig(CheckpointConfig):
    """The load, and the bounds."""

    streams: int = flag("--streams", default=8, parse=at_least(1), help="number of running streams")
    prompt_tokens: int = flag("--prompt-len", default=2000, parse=at_least(1), help="tokens of each long prompt")
    every_s: float = flag("--every", default=10.0, parse=seconds, help="seconds from one prompt to the next")
    prompts: int = flag("--prompts", default=3, parse=at_least(1), help="number of long prompts per run")
    alone_s: float = flag(
        "--alone", default=5.0, parse=seconds, help="seconds without prompts at the start of a run, and at its end"
    )
    runs: int = flag("--runs", default=3, parse=at_least(1), help="runs; their medians are compared with the bounds")
    p99: float = flag("--p99", default=2.2, parse=above_zero, help="bound of the p99 beside a prompt")
    pause: float = flag("--pause", default=4.0, parse=above_zero, help="bound of the longest pause beside a prompt")
    seed: int = flag("--seed", default=0, parse=at_least(0), help="seed of the prompts")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for `minisgl serve`, as one quoted text")
    output: str = flag("--output", default="", help="JSON file for the setup and all runs")


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two pieces of a stream. The second one has *tokens* tokens."""

    began_s: float
    ended_s: float
    tokens: int

    @property
    def ms(self) -> float:
        return (self.ended_s - self.began_s) * 1000


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one run; times per token in ms."""

    alone: report.Spread
    beside: report.Spread
    longest_pause_ms: float
    """Beside a prompt, between two pieces of a stream."""
    p99: float
    """The p99 beside a prompt, as a multiple of the p50 without, around that time."""
    pause: float
    """The longest pause, as a multiple of the same."""
    ttft_ms: tuple[float, ...]
    """Of the prompts."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure; return the exit code. Raises MiniSGLError."""
    (config,) = parse_flags("bench tail", (TailConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    folder = config.folder(environment)
    prompts = Prompts(folder)
    # Tokens that are committed together come together, and then the time of a single step cannot be seen.
    flags = ["--model", str(folder), "--commit-interval", "0", *shlex.split(config.serve_flags)]
    runs: list[Run] = []
    with scratch_and_status() as (data, status), our_server(data, flags) as (served, _):
        numerics = served.numerics()
        for number in range(1, config.runs + 1):
            status.update(f"run {number} of {config.runs}")
            generator = random.Random(f"{config.seed}/{number}")
            runs.append(asyncio.run(measured(config, served.url, prompts, generator)))
    problems = broken(runs, config)
    print(f"{folder.name}, {config.streams} streams, a prompt of {config.prompt_tokens:,} tokens every ", end="")
    print(f"{config.every_s:g} s, on {report.cpu_model()}", f"numerics: {numerics}", "", table(runs, config), sep="\n")
    print("\n".join(["", *problems]) if problems else "\nNo bound is broken.")
    document = {
        "options": report.options_of(config),
        "checkpoint": str(folder),
        "numerics": numerics,
        "runs": [report.options_of(run) for run in runs],
        "p99": _median(runs, "p99"),
        "pause": _median(runs, "pause"),
        "broken": problems,
    }
    report.save(config.output, ("minisgl", "bench", "tail", *arguments), ("torch", "redis", "aiohttp"), document)
    return 1 if problems else 0


async def measured(config: TailConfig, url: str, prompts: Prompts, generator: random.Random) -> Run:
    """Make one run against the server at *url*.

    Raises:
        SideFailed: A request failed, or a stream ended while it was measured.
    """
    streams: list[list[Arrival]] = [[] for _ in range(config.streams)]
    try:
        async with connected(url, timeout_s=SILENCE_TIMEOUT_S) as client, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_stream(client, prompts.words(generator, STREAM_PROMPT), arrivals))
                for arrivals in streams
            ]
            while not all(streams):
                await asyncio.sleep(POLL_S)
            began_s = time.perf_counter()
            await asyncio.sleep(config.alone_s)
            asked = []
            for number in range(config.prompts):
                text = prompts.words(generator, config.prompt_tokens)
                asked.append(group.create_task(_prompt(client, text)))
                if number + 1 < config.prompts:
                    await asyncio.sleep(config.every_s)
            in_hand = [await one for one in asked]
            await asyncio.sleep(config.alone_s)
            for task in tasks:
                task.cancel()
    except* SideFailed as failed:
        error: BaseException = failed
        while isinstance(error, BaseExceptionGroup):  # groups may be in groups
            error = error.exceptions[0]
        raise error from None
    gaps = [gap for arrivals in streams for gap in gaps_of(arrivals) if gap.began_s >= began_s]
    return figures(gaps, in_hand)


async def _send(client: Client, text: str, max_tokens: int | None, arrivals: list[Arrival]) -> Answer:
    return await client.stream(FORM, [{"role": "user", "content": text}], max_tokens, arrivals)


async def _stream(client: Client, text: str, arrivals: list[Arrival]) -> None:
    """Keep what comes until the task is cancelled."""
    error = (await _send(client, text, None, arrivals)).error
    raise SideFailed(
        f"a stream ended while it was measured: {error or 'it filled the context'}; if it was too long, take fewer "
        "--prompts, or a shorter --every"
    )


async def _prompt(client: Client, text: str) -> tuple[float, float]:
    """Return when a prompt was sent, and when its first token came."""
    arrivals: list[Arrival] = []
    answer = await _send(client, text, 1, arrivals)
    came_s = next((came_s for came_s, _ in pieces_of(arrivals)), None)
    if answer.error or came_s is None:
        raise SideFailed(f"a prompt failed: {answer.error or 'its stream ended without a token'}")
    return answer.sent_s, came_s


def pieces_of(arrivals: Sequence[Arrival]) -> Iterator[tuple[float, int]]:
    """Yield when each piece of a stream came, and its number of tokens."""
    for came_s, frame in timed_frames(arrivals):
        choices = () if frame.data == DONE else orjson.loads(frame.data).get("choices") or ()
        if tokens := sum(len(choice.get("token_ids") or ()) for choice in choices):
            yield came_s, tokens


def gaps_of(arrivals: Sequence[Arrival]) -> list[Gap]:
    """Return the gaps of one stream."""
    return [Gap(before_s, came_s, tokens) for (before_s, _), (came_s, tokens) in pairwise(pieces_of(arrivals))]


def figures(gaps: Sequence[Gap], in_hand: Sequence[tuple[float, float]]) -> Run:
    """Return the figures of a run. *in_hand*: from when to when there was a prompt.

    Raises:
        SideFailed: No token came without a prompt, or none beside one.
    """
    beside: list[Gap] = []
    alone: list[Gap] = []
    for gap in gaps:
        overlaps = any(gap.began_s < until_s and sent_s < gap.ended_s for sent_s, until_s in in_hand)
        (beside if overlaps else alone).append(gap)
    if not alone or not beside:
        raise SideFailed(
            f"{len(alone)} tokens came without a prompt and {len(beside)} beside one, but both are compared; take a "
            "longer --alone, or a longer --prompt-len"
        )
    usual_ms = _usual_ms(alone, [gap.ended_s for gap in beside])
    if min(usual_ms) == 0:
        raise SideFailed("most tokens came together with others: the model is too fast; take a larger --model")
    ratios = [
        gap.ms / gap.tokens / usual for gap, usual in zip(beside, usual_ms, strict=True) for _ in range(gap.tokens)
    ]
    return Run(
        alone=_per_token(alone),
        beside=_per_token(beside),
        longest_pause_ms=max(gap.ms for gap in beside),
        p99=report.spread_of(ratios).p99,
        pause=max(gap.ms / usual for gap, usual in zip(beside, usual_ms, strict=True)),
        ttft_ms=tuple((until_s - sent_s) * 1000 for sent_s, until_s in in_hand),
    )


def _per_token(gaps: Sequence[Gap]) -> report.Spread:
    return report.spread_of([gap.ms / gap.tokens for gap in gaps for _ in range(gap.tokens)])


def _usual_ms(alone: Sequence[Gap], moments_s: Sequence[float]) -> list[float]:
    """Return the p50 per token without prompts at each moment: that of blocks of gaps, interpolated between them."""
    ordered = sorted(alone, key=lambda gap: gap.ended_s)
    num_blocks = max(len(ordered) // BLOCK, 1)
    borders = [len(ordered) * number // num_blocks for number in range(num_blocks + 1)]
    blocks = [ordered[begin:end] for begin, end in pairwise(borders)]
    centres_s = [statistics.fmean(gap.ended_s for gap in block) for block in blocks]
    medians_ms = [_per_token(block).p50 for block in blocks]
    return [float(usual) for usual in np.interp(moments_s, centres_s, medians_ms)]


def _median(runs: Sequence[Run], name: str) -> float:
    return float(statistics.median(getattr(run, name) for run in runs))


def broken(runs: Sequence[Run], config: TailConfig) -> list[str]:
    """Return a sentence for each bound that the median of *runs* breaks."""
    return [
        f"{what} is {_median(runs, name):.2f} times the p50 without prompts; the bound is {getattr(config, name):g}."
        for name, what in BOUNDS
        if _median(runs, name) > getattr(config, name)
    ]


def table(runs: Sequence[Run], config: TailConfig) -> str:
    """Return the figures of all runs, and the medians that are compared with the bounds."""
    rows: list[tuple[str, ...]] = [
        ("ms per token", "p50 alone", "p50 beside", "p99 beside", "longest pause", "first token of a prompt")
    ]
    for number, run in enumerate(runs, 1):
        times = (run.alone.p50, run.beside.p50, run.beside.p99, run.longest_pause_ms, statistics.median(run.ttft_ms))
        rows.append((f"run {number}", *(f"{value:,.1f}" for value in times)))
        rows.append(("  times the p50 alone at that time", "", "", *_ratios(run.p99, run.pause)))
    rows.append(("median", "", "", *_ratios(_median(runs, "p99"), _median(runs, "pause"))))
    rows.append(("bound", "", "", *_ratios(config.p99, config.pause)))
    return report.aligned(rows)


def _ratios(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:.2f}x" for value in values)
