"""`minisgl bench cost`: what something costs. A server answers the same load with it and without it, in turn.

The machine varies more than most things cost, so seconds lie between the two halves of a pair, and the median of many
pairs counts. CPU time is that of all processes of the server and of its Redis. All but the engines is also shown alone:
forward passes vary most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from ops.bench import report
from ops.bench.load import COMPLETIONS, Client, Form, connected
from ops.bench.models import CheckpointConfig
from ops.bench.targets import (
    SILENCE_TIMEOUT_S,
    Served,
    SideFailed,
    cpu_s,
    our_server,
    scratch_and_status,
    started,
    tree_of,
)
from pipeline.flags import at_least, flag, parse_flags

FOLDER: Final = "FOLDER"
"""In flags of a server: a folder of its own."""
SETTLE_S: Final = 2.5
"""After the answers: an archiver writes what ended up to a second ago, and statuses are said each second."""
NUM_TABS: Final = 5
PICTURES: Final = "/v1/pipeline/events"
SCHEMA: Final = {"type": "array", "items": {"type": "string"}, "minItems": 4096}
"""No answer of some hundred tokens is over, so all have the same length."""


@contextlib.asynccontextmanager
async def tabs(client: Client) -> AsyncIterator[None]:
    """Read the stream of pictures as so many tabs of /pipeline do."""

    async def tab() -> None:
        async with client.session.get(client.url + PICTURES) as response:
            response.raise_for_status()
            while await response.content.readany():
                pass

    reading = [asyncio.create_task(tab()) for _ in range(NUM_TABS)]
    try:
        await asyncio.sleep(1.0)
        yield
    finally:
        for each in reading:
            each.cancel()
        results = await asyncio.gather(*reading, return_exceptions=True)
    if failed := [error for error in results if isinstance(error, Exception)]:
        raise SideFailed(f"a tab could not read {PICTURES}: {failed[0]}")


@contextlib.asynccontextmanager
async def busy_core(_: Client) -> AsyncIterator[None]:
    """Keep one core busy."""
    with started([sys.executable, "-c", "while True: pass"], None) as loop:
        os.sched_setaffinity(loop.pid, {max(os.sched_getaffinity(0))})
        yield


@contextlib.asynccontextmanager
async def nothing(_: Client) -> AsyncIterator[None]:
    """Do nothing beside the requests."""
    yield


Beside = Callable[[Client], contextlib.AbstractAsyncContextManager[None]]
"""What runs beside the requests."""
PLAIN: Final = Form(COMPLETIONS, "default")
"""Requests with a known cost: greedy, of a fixed length."""
BOUND: Final = {"type": "json_schema", "json_schema": {"name": "texts", "schema": SCHEMA}}


@dataclass(frozen=True, slots=True)
class Case:
    """What differs between the two halves of a pair."""

    about: str
    flags: tuple[str, ...] = ()
    """Of the server with it."""
    flags_without: tuple[str, ...] = ()
    form: Form = PLAIN
    """Of the requests with it."""
    beside: Beside = nothing


CASES: Final[Mapping[str, Case]] = {
    "journal": Case("journals of the engine's steps", flags_without=("--journal-bytes", "0")),
    "archive": Case("an archive of what has ended", flags=("--archive", FOLDER)),
    "schema": Case(
        "answers bound to a JSON schema", form=replace(PLAIN, fix_length="no", fields={"response_format": BOUND})
    ),
    "sampling": Case("sampled answers", form=replace(PLAIN, fields={"temperature": 0.8, "top_p": 0.9, "top_k": 50})),
    "tabs": Case(f"{NUM_TABS} tabs of /pipeline", beside=tabs),
    "busy-core": Case("another program that keeps one core busy", beside=busy_core),
}
ABOUT: Final = """\
Starts servers, and compares CPU time per output token and output tokens per second with something and without it:

""" + "\n".join(f"  {name:<10} {case.about}" for name, case in CASES.items())


@dataclass(frozen=True, slots=True)
class CostConfig(CheckpointConfig):
    """What is compared, and the load."""

    of: str = flag("--of", default="journal", choices=tuple(CASES), help="what is measured")
    pairs: int = flag("--pairs", default=5, parse=at_least(1), help="pairs of halves, after one to warm up")
    requests: int = flag("--requests", default=32, parse=at_least(1), help="requests of each half, all at once")
    tokens: int = flag("--tokens", default=128, parse=at_least(2), help="tokens of each answer")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for `minisgl serve`, as one quoted text")
    output: str = flag("--output", default="", help="JSON file for the setup and all pairs")


@dataclass(frozen=True, slots=True)
class Half:
    """The figures of one half."""

    cpu_us: float
    """CPU time of all processes per output token."""
    beside_us: float
    """The same without the engines."""
    tokens_per_s: float


Pair = tuple[Half, Half]
"""Without it, and with it."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure; return the exit code. Raises MiniSGLError."""
    (config,) = parse_flags("bench cost", (CostConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    folder, case = config.folder(environment), CASES[config.of]
    with scratch_and_status() as (data, status), both(config, folder, data) as servers:
        pairs = []
        for number in range(config.pairs + 1):
            status.update(f"{case.about}: pair {number} of {config.pairs}")
            pairs.append(pair(config, *servers, number))
    del pairs[0]  # it warms up
    print(f"{case.about}: {folder.name}, {config.requests} requests of {config.tokens} tokens, {config.pairs} pairs")
    print(f"on {report.cpu_model()}", "", table(pairs), sep="\n")
    document = {
        "options": report.options_of(config),
        "pairs": [{"without": asdict(without), "with": asdict(with_it)} for without, with_it in pairs],
    }
    report.save(config.output, ("minisgl", "bench", "cost", *arguments), ("torch", "redis"), document)
    return 0


@contextlib.contextmanager
def both(config: CostConfig, model: Path, data: Path) -> Iterator[tuple[Served, Served]]:
    """Run a server without it and one with it; one for both if they have the same flags."""
    case, servers = CASES[config.of], dict[tuple[str, ...], Served]()
    with contextlib.ExitStack() as stack:
        for flags in (case.flags_without, case.flags):
            if flags not in servers:
                folder = data / str(len(servers))
                folder.mkdir()
                words = [str(folder / "kept") if word == FOLDER else word for word in flags]
                words += ["--model", str(model), *shlex.split(config.serve_flags)]
                servers[flags], _ = stack.enter_context(our_server(folder, words))
        yield servers[case.flags_without], servers[case.flags]


def pair(config: CostConfig, without: Served, with_it: Served, number: int) -> Pair:
    """Measure both halves, in an order that changes from pair to pair: what changes steadily falls out."""
    case = CASES[config.of]
    texts = [f"Tell me story number {number * config.requests + each}." for each in range(config.requests)]
    sides = {"with": (with_it, case.form, case.beside), "without": (without, PLAIN, nothing)}
    order = sorted(sides, reverse=number % 2 == 0)
    halves = {name: asyncio.run(measured(*sides[name], texts, config.tokens)) for name in order}
    return halves["without"], halves["with"]


async def measured(server: Served, form: Form, beside: Beside, texts: Sequence[str], num_tokens: int) -> Half:
    """Let *server* answer *texts*, all at once.

    Raises:
        SideFailed: A request failed, or an answer has another number of tokens.
    """
    async with connected(server.url, timeout_s=SILENCE_TIMEOUT_S) as client, beside(client):
        before = {pid: cpu_s(pid) for pid in tree_of(server.pid)}
        engines, began_s = [pid for pid in before if is_engine(pid)], time.monotonic()
        asked = (client.stream(form, [{"role": "user", "content": text}], num_tokens) for text in texts)
        answers = await asyncio.gather(*asked)
        took_s = time.monotonic() - began_s
        await asyncio.sleep(SETTLE_S)
        spent = {pid: cpu_s(pid) - before_s for pid, before_s in before.items()}
    for answer in answers:
        if answer.error or answer.output_tokens != num_tokens:
            seen = answer.error or f"{answer.output_tokens} tokens came, {num_tokens} were asked for"
            raise SideFailed(f"a request failed: {seen}")
    all_tokens = len(texts) * num_tokens
    cpu_us = sum(spent.values()) * 1e6 / all_tokens
    return Half(cpu_us, cpu_us - sum(spent[pid] for pid in engines) * 1e6 / all_tokens, all_tokens / took_s)


def is_engine(pid: int) -> bool:
    """Return whether a process of the server is an engine."""
    return b"generate" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def table(pairs: Sequence[Pair]) -> str:
    """Return a table: the medians of all pairs, and the range of their ratios."""
    all_us = statistics.median(without.cpu_us for without, _ in pairs)
    more = [(with_it.beside_us - without.beside_us) / all_us for without, with_it in pairs]
    rows: list[tuple[str, ...]] = [("", "without", "with", "ratio", "range")]
    for name, figure in (("CPU time of a token, us", "cpu_us"), ("output tokens/s", "tokens_per_s")):
        values = [(getattr(without, figure), getattr(with_it, figure)) for without, with_it in pairs]
        medians = [f"{statistics.median(column):,.1f}" for column in zip(*values, strict=True)]
        ratios = [with_it / without for without, with_it in values]
        rows.append((name, *medians, f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"))
    shares = f"{statistics.median(more):+.2%}", f"{min(more):+.2%} to {max(more):+.2%}"
    beside = [f"{statistics.median(half.beside_us for half in column):,.1f}" for column in zip(*pairs, strict=True)]
    rows.append(("without the engines, us", *beside, *shares))
    return report.aligned(rows) + "\n\nThe last line says by how much of all CPU time the rest takes more."
