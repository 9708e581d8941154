"""`minisgl bench tail`: what a first token costs under load, and how steady streams are meanwhile.

Servers are real ones, behind HTTP and Redis. A run measures three loads, one after the other:

| load | who is measured |
|---|---|
| many requests at once | all; also at a server that computes whole prompts first, at once after or before |
| a long prompt beside streams | its first token, compared with the same alone; the gaps of the streams meanwhile |
| a question beside two documents | its first token |
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import orjson

from ops.bench import report
from ops.bench.load import CHAT_PROMPT, DONE, Arrival, Client, Form, connected, timed_frames
from ops.bench.models import CheckpointConfig, Prompts
from ops.bench.targets import SILENCE_TIMEOUT_S, SideFailed, our_server, scratch_and_status
from pipeline.flags import at_least, flag, parse_flags

ABOUT: Final = """\
Starts two servers and measures first tokens and pauses of streams under three loads. One of the servers computes whole
prompts first, for comparison. Exits with 1 if the median of all runs breaks a bound.
"""
POLL_S: Final = 0.02
SETTLE_S: Final = 1.0
STREAM_PROMPT: Final = 32
"""Tokens of a stream's own prompt."""
MANY: Final = (32, 256)
"""Fewest and most tokens of a prompt, and of an answer, of many requests at once."""
QUESTION: Final = 30
DOCUMENT: Final = 4000
PROMPTS_FIRST: Final = "--mixed-prefill-length 2048"
FORM: Final = Form(CHAT_PROMPT, "default", fields={"temperature": 0, "return_token_ids": True})
"""Every token gets a piece of its own, even if it completes no letter: the ids of the tokens are asked for."""


@dataclass(frozen=True, slots=True)
class TailConfig(CheckpointConfig):
    """The loads."""

    requests: int = flag("--requests", default=32, parse=at_least(1), help="number of requests at once")
    streams: int = flag("--streams", default=8, parse=at_least(1), help="number of streams beside a long prompt")
    prompt_tokens: int = flag("--prompt-len", default=2000, parse=at_least(1), help="tokens of a long prompt")
    runs: int = flag("--runs", default=5, parse=at_least(1), help="runs; their medians are compared with the bounds")
    seed: int = flag("--seed", default=0, parse=at_least(0), help="seed of the prompts")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for both servers, as one quoted text")
    output: str = flag("--output", default="", help="JSON file for the setup and all runs")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run, and the bound of its median."""

    name: str
    about: str
    bound: float
    is_least: bool = False
    """Whether the bound is the smallest allowed median, not the largest."""


FIGURES: Final = (
    Figure("ttft_p50", "many at once: p50 of the first token, times that of prompts first", 1.35),
    Figure("ttft_p99", "many at once: p99 of the first token, times that of prompts first", 1.4),
    Figure("itl_p99_ms", "many at once: p99 between two pieces of a stream, ms", 160),
    Figure("throughput", "many at once: output tokens per second, times those of prompts first", 0.98, is_least=True),
    Figure("long_ttft", "a long prompt beside streams: its first token, times that of alone", 1.6),
    Figure("beside_p99_ms", "a long prompt beside streams: p99 between two pieces of a stream, ms", 110),
    Figure("question_s", "a question beside two documents: its first token, s", 0.5),
)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure; return the exit code. Raises MiniSGLError."""
    (config,) = parse_flags("bench tail", (TailConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    folder = config.folder(environment)
    prompts, runs = Prompts(folder), []
    # Tokens that are committed together come together, and then the time of a single step cannot be seen.
    flags = ["--model", str(folder), "--commit-interval", "0", *shlex.split(config.serve_flags)]
    with scratch_and_status() as (data, status), contextlib.ExitStack() as servers:
        (data / "ours").mkdir()
        (data / "first").mkdir()
        ours, _ = servers.enter_context(our_server(data / "ours", flags))
        first, _ = servers.enter_context(our_server(data / "first", [*flags, *shlex.split(PROMPTS_FIRST)]))
        numerics = ours.numerics()
        for number in range(1, config.runs + 1):
            status.update(f"run {number} of {config.runs}")
            generator = random.Random(f"{config.seed}/{number}")
            runs.append(
                asyncio.run(measured(config, ours.url, first.url, prompts, generator, ours_first=number % 2 > 0))
            )
    problems = broken(runs)
    print(f"{folder.name}, on {report.cpu_model()}", f"numerics: {numerics}", "", table(runs), sep="\n")
    print("\n".join(["", *problems]) if problems else "\nNo bound is broken.")
    document = {
        "options": report.options_of(config),
        "checkpoint": str(folder),
        "numerics": numerics,
        "runs": runs,
        "broken": problems,
    }
    report.save(config.output, ("minisgl", "bench", "tail", *arguments), ("torch", "redis", "aiohttp"), document)
    return 1 if problems else 0


async def measured(
    config: TailConfig, url: str, prompts_first: str, prompts: Prompts, generator: random.Random, *, ours_first: bool
) -> dict[str, float]:
    """Make one run; return its figures by name.

    Raises:
        SideFailed: A request failed, or a stream ended while it was measured.
    """
    lengths = [(generator.randint(*MANY), generator.randint(*MANY)) for _ in range(config.requests)]
    async with (
        connected(url, timeout_s=SILENCE_TIMEOUT_S) as client,
        connected(prompts_first, timeout_s=SILENCE_TIMEOUT_S) as other,
    ):
        many: dict[Client, dict[str, float]] = {}
        for each in (client, other) if ours_first else (other, client):
            many[each] = await _many(each, [(prompts.words(generator, tokens), length) for tokens, length in lengths])
            await asyncio.sleep(SETTLE_S)
        figures = {name: many[client][name] / many[other][name] for name in ("ttft_p50", "ttft_p99", "throughput")}
        figures["itl_p99_ms"] = many[client]["itl_p99_ms"]
        figures |= await _long(config, client, prompts, generator)
        await asyncio.sleep(SETTLE_S)
        documents = [asyncio.create_task(_sent(client, prompts.words(generator, DOCUMENT), 1, [])) for _ in range(2)]
        await asyncio.sleep(generator.uniform(0.3, 0.8))  # at any moment of a step
        figures["question_s"] = await _first_token_s(client, prompts.words(generator, QUESTION))
        await asyncio.gather(*documents)
        await asyncio.sleep(SETTLE_S)
    return figures


async def _many(client: Client, requests: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Send all requests at once; return their figures."""
    all_arrivals: list[list[Arrival]] = [[] for _ in requests]
    sent = zip(requests, all_arrivals, strict=True)
    began_s = await asyncio.gather(*(_sent(client, text, length, arrivals) for (text, length), arrivals in sent))
    pieces = [list(pieces_of(arrivals)) for arrivals in all_arrivals]
    ttft = report.spread_of([of_one[0][0] - sent_s for of_one, sent_s in zip(pieces, began_s, strict=True)])
    num_tokens = sum(tokens for of_one in pieces for _, tokens in of_one)
    seconds = max(of_one[-1][0] for of_one in pieces) - min(began_s)
    gaps_ms = [(after - before) * 1000 for of_one in pieces for (before, _), (after, _) in pairwise(of_one)]
    itl = report.spread_of(gaps_ms)
    return {"ttft_p50": ttft.p50, "ttft_p99": ttft.p99, "itl_p99_ms": itl.p99, "throughput": num_tokens / seconds}


async def _long(config: TailConfig, client: Client, prompts: Prompts, generator: random.Random) -> dict[str, float]:
    """Send a long prompt alone, and one beside streams; return the figures."""
    alone_s = await _first_token_s(client, prompts.words(generator, config.prompt_tokens))
    streams: list[list[Arrival]] = [[] for _ in range(config.streams)]
    tasks = [
        asyncio.create_task(_sent(client, prompts.words(generator, STREAM_PROMPT), None, arrivals))
        for arrivals in streams
    ]
    try:
        while not all(streams) and not any(task.done() for task in tasks):
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLE_S)
        num_before = [len(list(pieces_of(arrivals))) for arrivals in streams]
        beside_s = await _first_token_s(client, prompts.words(generator, config.prompt_tokens))
        gaps_ms = [
            (after - before) * 1000
            for arrivals, num in zip(streams, num_before, strict=True)
            for (before, _), (after, _) in pairwise(list(pieces_of(arrivals))[max(num - 1, 0) :])
        ]
        if any(task.done() for task in tasks):
            raise SideFailed("a stream ended while it was measured: it filled the context; take a shorter --prompt-len")
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if failed := next((result for result in results if isinstance(result, SideFailed)), None):
        raise failed
    return {"long_ttft": beside_s / alone_s, "beside_p99_ms": report.spread_of(gaps_ms).p99}


async def _sent(client: Client, text: str, max_tokens: int | None, arrivals: list[Arrival]) -> float:
    """Send one request and wait for its end; return when it was sent."""
    answer = await client.stream(FORM, [{"role": "user", "content": text}], max_tokens, arrivals)
    if answer.error or next(pieces_of(arrivals), None) is None:
        raise SideFailed(f"a request failed: {answer.error or 'its stream ended without a token'}")
    return answer.sent_s


async def _first_token_s(client: Client, text: str) -> float:
    arrivals: list[Arrival] = []
    sent_s = await _sent(client, text, 1, arrivals)
    return next(pieces_of(arrivals))[0] - sent_s


def pieces_of(arrivals: Sequence[Arrival]) -> Iterator[tuple[float, int]]:
    """Yield when each piece of a stream came, and its number of tokens."""
    for came_s, frame in timed_frames(arrivals):
        choices = () if frame.data == DONE else orjson.loads(frame.data).get("choices") or ()
        if tokens := sum(len(choice.get("token_ids") or ()) for choice in choices):
            yield came_s, tokens


def _median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def broken(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence for each bound that the median of *runs* breaks."""
    medians = [(figure, _median(runs, figure.name)) for figure in FIGURES]
    return [
        f"{figure.about}: {median:.2f}; the bound is {figure.bound:g}."
        for figure, median in medians
        if (median < figure.bound if figure.is_least else median > figure.bound)
    ]


def table(runs: Sequence[Mapping[str, float]]) -> str:
    """Return the figures of all runs, their medians and the bounds."""
    rows: list[tuple[str, ...]] = [("", *(f"run {number}" for number in range(1, len(runs) + 1)), "median", "bound")]
    for figure in FIGURES:
        values = [run[figure.name] for run in runs] + [_median(runs, figure.name)]
        bound = f"{'>=' if figure.is_least else '<='} {figure.bound:g}"
        rows.append((figure.about, *(f"{value:.2f}" for value in values), bound))
    return report.aligned(rows)
