"""`minisgl bench compare`, or `make bench`: our server and a peer in turn, on one checkpoint and the same requests.

Ours is a real server behind HTTP and Redis. The peer is transformers or llama.cpp in its own process, or any server by
its URL. Runs alternate. Each run has new prompts, the same for both sides, so no prefix cache remembers the run before.
While one side runs, the other must be idle, which is measured.
"""

from __future__ import annotations

import contextlib
import random
import shlex
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from ops.bench import report
from ops.bench.datasets import Span, length_flag
from ops.bench.models import CheckpointConfig, Prompts, Workload
from ops.bench.peers import (
    GGUF_KINDS,
    Run,
    Served,
    Side,
    find_llama,
    llama_process,
    numerics_of,
    our_server,
    served_at,
    transformers_process,
)
from ops.bench.processes import interrupt_on_sigterm
from pipeline.errors import ConfigError
from pipeline.flags import at_least, flag, parse_flags

ABOUT: Final = """\
Compares minisgl with transformers, with llama.cpp (--llama-python), or with the server at --peer-url, on the same
checkpoint and requests: output tokens/s of many requests at once (transformers: one static batch) and of one at a time,
as medians of alternating runs, and the time to the first token of a repeated prefix (ours alone).
"""
PACKAGES: Final = ("torch", "transformers", "aiohttp", "redis")
SUFFIX_TOKENS: Final = 8
IDLE_CORES: Final = 0.05
"""An idle side uses at most this share of a core."""


@dataclass(frozen=True, slots=True)
class CompareConfig(CheckpointConfig):
    """What is compared."""

    peer_url: str = flag("--peer-url", default="", help="URL of an OpenAI server with the same model [transformers]")
    llama_python: str = flag(
        "--llama-python", default="", help="python with llama-cpp-python and gguf: the peer is llama.cpp [transformers]"
    )
    gguf: str = flag(
        "--gguf", default="", help="weights of llama.cpp: q8_0 or bf16, made from the checkpoint, or a GGUF file [bf16]"
    )
    dtype: str = flag(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help=(
            "dtype of minisgl and of transformers; auto: the checkpoint's, but minisgl takes float32 if torch computes "
            "on a CPU without instructions for bfloat16"
        ),
    )
    threads: int = flag("--threads", default=0, parse=at_least(1), help="CPU threads of each side [all cores]")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for `minisgl serve`, as one quoted text")
    runs: int = flag("--runs", default=3, parse=at_least(1), help="measured runs of each side, after a warm-up run")
    seed: int = flag("--seed", default=0, parse=at_least(0), help="seed of lengths and prompts")
    num_requests: int = flag("--num-requests", default=32, parse=at_least(1), help="requests at once")
    inputs: Span = length_flag("--input-len", "prompt")  # noqa: RUF009  # a Span is frozen
    outputs: Span = length_flag("--output-len", "answer")  # noqa: RUF009
    num_singles: int = flag("--num-singles", default=4, parse=at_least(1), help="number of requests sent one by one")
    single_tokens: int = flag("--single-len", default=128, parse=at_least(2), help="tokens in and out of each of these")
    num_prefixes: int = flag("--num-prefixes", default=5, parse=at_least(1), help="number of repeated prefixes")
    prefix_tokens: int = flag("--prefix-len", default=2048, parse=at_least(1), help="tokens per prefix")
    output: str = flag("--output", default="", help="JSON file for the setup and all runs")


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of workload: every run has the same lengths and other words."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    concurrency: int

    def workload(self, prompts: Prompts, seed: int, run: int) -> Workload:
        """Return the workload of *run*, the same for both sides."""
        return Workload(prompts.drawn(random.Random(f"{seed}/{self.name}/{run}"), self.lengths), self.concurrency)


def tasks(config: CompareConfig) -> tuple[Task, Task]:
    """Return the two workloads: many requests at once, and one at a time."""
    generator = random.Random(config.seed)
    count, singles, single = config.num_requests, config.num_singles, config.single_tokens
    many = tuple((config.inputs.draw(generator), config.outputs.draw(generator)) for _ in range(count))
    return (
        Task(f"{count} requests of {config.inputs} in, {config.outputs} out, at once", many, count),
        Task(f"{singles} requests of {single} in and out, one by one", ((single, single),) * singles, 1),
    )


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Compare; return the exit code.

    Raises:
        ConfigError: The flags or the checkpoint cannot work.
        MiniSGLError: A side failed.
    """
    (config,) = parse_flags("bench compare", (CompareConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    if config.peer_url and not config.peer_url.startswith(("http://", "https://")):
        raise ConfigError(f"--peer-url {config.peer_url}: must begin with http:// or https://")
    llama = _llama(config)
    folder = config.folder(environment)
    prompts = Prompts(folder)
    threads = config.threads or report.num_cores()
    interrupt_on_sigterm()
    status = Console(stderr=True).status("", refresh_per_second=1)  # the measurement needs the cores
    with status, _both(config, folder, threads, llama, status) as (ours, peer, about):
        results = [_compared(task, prompts, config, (ours, peer), status) for task in tasks(config)]
        status.update("repeating prefixes")
        prefix = repeated_prefix(ours, prompts, config)
    print(f"{folder.name}, {threads} threads each, on {report.cpu_model()}")
    print(f"medians of {config.runs} alternating runs, {ours.name} through HTTP and Redis")
    print(f"{ours.name}: {about['minisgl']['numerics']}; {peer.name}: {about['peer'].get('dtype', config.peer_url)}\n")
    print(table(results, prefix, ours.name, peer.name))
    document = {
        "options": report.options_of(config),
        "checkpoint": str(folder),
        "threads": threads,
        **about,
        "tasks": results,
        "prefix": prefix,
    }
    report.save(config.output, ("minisgl", "bench", "compare", *arguments), PACKAGES, document)
    return 0


def _llama(config: CompareConfig) -> tuple[str, str] | None:
    """Return the python that has llama.cpp, and its weights; None: it is not the peer.

    Raises:
        ConfigError: The flags cannot work.
    """
    if not config.llama_python:
        if config.gguf:
            raise ConfigError(f"--gguf {config.gguf}: is for llama.cpp; pass --llama-python, too")
        return None
    if config.peer_url:
        raise ConfigError("--peer-url and --llama-python both name the peer; pass one of them")
    weights = config.gguf or GGUF_KINDS[0]
    if weights not in GGUF_KINDS:
        weights = str(Path(weights).expanduser().absolute())
        if not Path(weights).is_file():
            raise ConfigError(f"--gguf {config.gguf}: no such file; pass a GGUF file, or {' or '.join(GGUF_KINDS)}")
    return find_llama(config.llama_python), weights


@contextlib.contextmanager
def _both(
    config: CompareConfig, folder: Path, threads: int, llama: tuple[str, str] | None, status: Status
) -> Iterator[tuple[Served, Side, dict[str, dict[str, Any]]]]:
    """Start our server and the peer; give both, and their descriptions for the JSON."""
    flags = ["--model", str(folder), "--dtype", config.dtype, "--threads", str(threads)]
    flags += shlex.split(config.serve_flags)
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-bench-", ignore_cleanup_errors=True))
        status.update("starting minisgl")
        ours, ready_s = stack.enter_context(our_server(Path(data), flags))
        ours_alone = {"flags": flags, "ready_s": ready_s, "numerics": numerics_of(ours)}
        about: dict[str, dict[str, Any]] = {"minisgl": ours_alone}
        status.update("starting the peer")
        if config.peer_url:
            served = served_at("peer", config.peer_url)
            yield ours, served, about | {"peer": {"name": served.name, "url": served.url}}
            return
        if llama:
            library = stack.enter_context(llama_process(*llama, folder, Path(data), threads))
        else:
            library = stack.enter_context(transformers_process(folder, config.dtype, threads))
        yield ours, library, about | {"peer": {"name": library.name, **library.about}}


def _compared(
    task: Task, prompts: Prompts, config: CompareConfig, sides: tuple[Side, Side], status: Status
) -> dict[str, Any]:
    """Run *task* on both sides in turn; return every run, the medians and their ratio."""
    runs: list[dict[str, Any]] = []
    for run in range(config.runs + 1):  # the first one warms up
        workload = task.workload(prompts, config.seed, run)
        for side, other in (sides, sides[::-1]):
            doing = f"{task.name}: {side.name}, {f'run {run} of {config.runs}' if run else 'warm-up'}"
            status.update(doing)
            before_s = other.cpu_s()
            done = side.run(workload)
            after_s = other.cpu_s()
            status.console.print(f"{doing}: {done.output_tokens_per_s:,.1f} tokens/s", highlight=False, soft_wrap=True)
            if run:
                runs.append(_run_row(run, side, done, before_s, after_s))
    medians = {
        side.name: statistics.median(row["output_tokens_per_s"] for row in runs if row["side"] == side.name)
        for side in sides
    }
    return {
        "name": task.name,
        "concurrency": task.concurrency,
        "lengths": task.lengths,
        "runs": runs,
        "output_tokens_per_s": medians,
        "ratio": medians[sides[0].name] / medians[sides[1].name],
    }


def _run_row(run: int, side: Side, done: Run, before_s: float | None, after_s: float | None) -> dict[str, Any]:
    used = None if before_s is None or after_s is None else (after_s - before_s) / done.duration_s
    return {
        "run": run,
        "side": side.name,
        "duration_s": done.duration_s,
        "output_tokens": done.output_tokens,
        "output_tokens_per_s": done.output_tokens_per_s,
        "cores_of_the_other_side": used,
        "requests": done.requests,
    }


def repeated_prefix(ours: Served, prompts: Prompts, config: CompareConfig) -> dict[str, Any]:
    """Measure the time to the first token of new prefixes, and of the same prefixes with another end."""
    generator = random.Random(f"{config.seed}/prefix")
    rows = []
    for index in range(config.num_prefixes + 1):  # the first one warms up
        prefix = prompts.words(generator, config.prefix_tokens)
        first, again = (_first_token(ours, prompts, prefix, generator, config.prefix_tokens) for _ in range(2))
        if index:
            rows.append({"first": first, "again": again})
    medians = {name: statistics.median(row[name]["ttft_ms"] for row in rows) for name in ("first", "again")}
    return {
        "prefix_tokens": config.prefix_tokens,
        "suffix_tokens": SUFFIX_TOKENS,
        "prefixes": rows,
        "first_ms": medians["first"],
        "again_ms": medians["again"],
        "share": medians["again"] / medians["first"],
    }


def _first_token(
    ours: Served, prompts: Prompts, prefix: str, generator: random.Random, prefix_tokens: int
) -> dict[str, float]:
    text = prefix + prompts.words(generator, SUFFIX_TOKENS)
    prompt = prompts.of(text, prefix_tokens + SUFFIX_TOKENS, 1)
    (one,) = ours.measure(Workload((prompt,), 1))
    return {"ttft_ms": report.ttft_ms(one.answer), "cached_tokens": one.answer.cached_tokens}


def table(results: Sequence[Mapping[str, Any]], prefix: Mapping[str, Any], ours: str, peer: str) -> str:
    """Return the comparison as a table."""
    rows = [("output tokens/s", ours, peer, "ratio")]
    for result in results:
        medians = result["output_tokens_per_s"]
        rows.append((result["name"], f"{medians[ours]:,.1f}", f"{medians[peer]:,.1f}", f"{result['ratio']:.2f}x"))
    times = f"first token after {prefix['first_ms']:,.0f} ms, repeated after {prefix['again_ms']:,.0f} ms"
    lines = [
        report.aligned(rows),
        "",
        f"A prefix of {prefix['prefix_tokens']:,} tokens: {times} ({prefix['share']:.1%})",
    ]
    busiest = max((row["cores_of_the_other_side"] or 0.0 for result in results for row in result["runs"]), default=0.0)
    if busiest > IDLE_CORES:
        lines.append(f"The other side was not idle: it used up to {busiest:.2f} cores. Take these figures with care.")
    return "\n".join(lines)
