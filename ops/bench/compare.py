"""Ours and a peer in turn, on one checkpoint and the same requests: `minisgl bench compare`, or `make bench`.

Ours is a real server, through HTTP and Redis. The peer is transformers in a process of its own, or any server by its
URL. Runs alternate, and each has prompts of its own, so that no prefix cache remembers the run before; both sides get
the same ones. While one side runs the other is idle, which is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import shlex
import signal
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.status import Status
from tokenizers import Tokenizer

from ops.bench import models, report
from ops.bench.datasets import Span
from ops.bench.peers import Prompt, Run, Served, Side, Workload, our_server, served_at, transformers_process
from ops.bench.serve import span
from pipeline.config import at_least, flag, parse_flags
from pipeline.errors import ConfigError

ABOUT: Final = """\
Compares minisgl with transformers, or with the server at --peer-url, on the same checkpoint and requests: output
tokens/s of many requests at once (transformers: one static batch) and of one at a time, as medians of alternating runs,
and what a repeated prefix costs ours.
"""
PACKAGES: Final = ("torch", "transformers", "aiohttp", "redis")
SUFFIX_TOKENS: Final = 8
IDLE_CORES: Final = 0.05
"""A side that uses more than this share of a core while the other runs is not idle."""
POOL_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """What is compared."""

    model: str = flag(
        "--model", default="95m", help=f"{' or '.join(models.SHAPES)}, made on the spot, or the folder of a checkpoint"
    )
    checkpoints: str = flag("--checkpoints", default="", help="where they are made [cache folder/minisgl]")
    peer_url: str = flag("--peer-url", default="", help="an OpenAI server with that model, not transformers")
    dtype: str = flag(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of both; auto: checkpoint's",
    )
    threads: int = flag("--threads", default=0, parse=at_least(1), help="CPU threads of either model [all cores]")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for `minisgl serve`, as one text")
    runs: int = flag("--runs", default=3, parse=at_least(1), help="measured runs of each side, after one to warm up")
    seed: int = flag("--seed", default=0, parse=at_least(0), help="of lengths and prompts")
    num_requests: int = flag("--num-requests", default=32, parse=at_least(1), help="requests at once")
    inputs: Span = flag(  # noqa: RUF009  # a Span is frozen
        "--input-len", default=Span(32, 256), parse=span, help="tokens of their prompts, MIN-MAX"
    )
    outputs: Span = flag(  # noqa: RUF009
        "--output-len", default=Span(32, 256), parse=span, help="tokens of their answers, MIN-MAX"
    )
    num_singles: int = flag("--num-singles", default=4, parse=at_least(1), help="requests one after another")
    single_tokens: int = flag("--single-len", default=128, parse=at_least(2), help="tokens of each of them, in and out")
    num_prefixes: int = flag("--num-prefixes", default=5, parse=at_least(1), help="prefixes that are repeated")
    prefix_tokens: int = flag("--prefix-len", default=2048, parse=at_least(1), help="tokens of such a prefix")
    output: str = flag("--output", default="", help="file for the set-up and all runs, as JSON")


class Prompts:
    """Texts of exactly as many tokens as are wanted, for the tokenizer of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Find words that are one token each, whatever is before them: they begin with a blank.

        Raises:
            ConfigError: The folder has no tokenizer, or it has too few of them.
        """
        self._folder = folder
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library has no class for its errors
            raise ConfigError(f"{folder / 'tokenizer.json'}: not a tokenizer ({error})") from error
        candidates = [" " + token[1:] for token in self._tokenizer.get_vocab() if re.fullmatch("[Ġ▁][A-Za-z]+", token)]
        candidates = sorted(candidates)[:: max(len(candidates) // POOL_SIZE, 1)]
        encoded = self._tokenizer.encode_batch(candidates, add_special_tokens=False)
        self._pool = [text for text, one in zip(candidates, encoded, strict=True) if len(one.ids) == 1]
        self._num_special = len(self._tokenizer.encode("").ids)
        if len(self._pool) < 8:
            raise ConfigError(f"{folder / 'tokenizer.json'}: {len(self._pool)} words are one token, at least 8 needed")

    def words(self, generator: random.Random, num_tokens: int) -> str:
        """Return the text of *num_tokens* words."""
        return "".join(generator.choices(self._pool, k=num_tokens))

    def of(self, text: str, num_tokens: int, output_tokens: int) -> Prompt:
        """Return the prompt that *text* is, of *num_tokens* without what the tokenizer itself adds.

        Raises:
            ConfigError: It is another number of tokens.
        """
        ids = tuple(self._tokenizer.encode(text).ids)
        if len(ids) != num_tokens + self._num_special:
            raise ConfigError(
                f"{self._folder}: its tokenizer makes {len(ids)} tokens of {num_tokens} words of one each"
            )
        return Prompt(text, ids, output_tokens)

    def drawn(self, generator: random.Random, lengths: Sequence[tuple[int, int]]) -> tuple[Prompt, ...]:
        """Return a prompt for each (tokens in, tokens out)."""
        return tuple(self.of(self.words(generator, inputs), inputs, outputs) for inputs, outputs in lengths)


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of workload: the same lengths in every run, other words."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    concurrency: int

    def workload(self, prompts: Prompts, seed: int, run: int) -> Workload:
        """Return what both sides do in *run*."""
        return Workload(prompts.drawn(random.Random(f"{seed}/{self.name}/{run}"), self.lengths), self.concurrency)


def tasks(config: CompareConfig) -> tuple[Task, Task]:
    """Return what is compared: many requests at once, and one at a time."""
    generator = random.Random(config.seed)
    many = tuple((config.inputs.draw(generator), config.outputs.draw(generator)) for _ in range(config.num_requests))
    one = (config.single_tokens, config.single_tokens)
    return (
        Task(
            f"{config.num_requests} requests of {config.inputs} in, {config.outputs} out, at once",
            many,
            config.num_requests,
        ),
        Task(
            f"{config.num_singles} requests of {config.single_tokens} in and out, one by one",
            (one,) * config.num_singles,
            1,
        ),
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
    folder = checkpoint(config, environment)
    prompts = Prompts(folder)
    threads = config.threads or report.num_cores()
    flags = ["--model", str(folder), "--dtype", config.dtype, "--threads", str(threads)]
    flags += shlex.split(config.serve_flags)
    signal.signal(signal.SIGTERM, _interrupt)  # so that what was started is ended too
    with _status() as status, _both(config, folder, threads, flags, status) as (ours, peer, about):
        results = [_compared(task, prompts, config, (ours, peer), status) for task in tasks(config)]
        status.update("repeating prefixes")
        prefix = repeated_prefix(ours, prompts, config)
    print(f"{folder.name}, {about['peer'].get('dtype', config.dtype)}, {threads} threads each, on {report.cpu_model()}")
    print(f"medians of {config.runs} alternating runs, {ours.name} through HTTP and Redis\n")
    print(table(results, prefix, ours.name, peer.name))
    if config.output:
        document = {
            "setup": report.setup(("minisgl", "bench", "compare", *arguments), PACKAGES),
            "options": {**dataclasses.asdict(config), "inputs": str(config.inputs), "outputs": str(config.outputs)},
            "checkpoint": str(folder),
            "threads": threads,
            **about,
            "tasks": results,
            "prefix": prefix,
        }
        report.write_json(Path(config.output), document)
    return 0


@contextlib.contextmanager
def _both(
    config: CompareConfig, folder: Path, threads: int, flags: Sequence[str], status: Status
) -> Iterator[tuple[Served, Side, dict[str, dict[str, Any]]]]:
    """Start our server with *flags*, and the peer; give both and what is to be known of them."""
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-bench-", ignore_cleanup_errors=True))
        status.update("starting minisgl")
        ours, ready_s = stack.enter_context(our_server(Path(data), flags))
        about: dict[str, dict[str, Any]] = {"minisgl": {"flags": flags, "ready_s": ready_s}}
        status.update("starting the peer")
        if config.peer_url:
            served = served_at("peer", config.peer_url)
            yield ours, served, about | {"peer": {"name": served.name, "url": served.url}}
        else:
            transformers = stack.enter_context(transformers_process(folder, config.dtype, threads))
            yield ours, transformers, about | {"peer": {"name": transformers.name, **transformers.about}}


def checkpoint(config: CompareConfig, environment: Mapping[str, str]) -> Path:
    """Return the folder of the model; one of ours is made first where it is not there.

    Raises:
        ConfigError: There is no such folder.
    """
    if config.model in models.SHAPES:
        cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minisgl"
        return models.ensure(config.model, Path(config.checkpoints).expanduser() if config.checkpoints else cache)
    folder = Path(config.model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {config.model}: no checkpoint; pass a folder, or {' or '.join(models.SHAPES)}")
    return folder


@contextlib.contextmanager
def _status() -> Iterator[Status]:
    """Show on a terminal what is going on."""
    with Console(stderr=True).status("", refresh_per_second=1) as status:  # the cores are needed elsewhere
        yield status


def _compared(
    task: Task, prompts: Prompts, config: CompareConfig, sides: tuple[Side, Side], status: Status
) -> dict[str, Any]:
    """Run *task* on both sides in turn; return every run, the medians and their ratio."""
    runs: list[dict[str, Any]] = []
    for run in range(config.runs + 1):  # the first is to warm up
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
    """Return the time to the first token of fresh prefixes, and of the same again with another end."""
    generator = random.Random(f"{config.seed}/prefix")
    rows = []
    for index in range(config.num_prefixes + 1):  # the first is to warm up
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
    """Return the comparison for people."""
    rows = [("output tokens/s", ours, peer, "ratio")]
    for result in results:
        medians = result["output_tokens_per_s"]
        figures = (f"{medians[ours]:,.1f}", f"{medians[peer]:,.1f}", f"{result['ratio']:.2f}x")
        rows.append((result["name"], *figures))
    times = f"first token after {prefix['first_ms']:,.0f} ms, repeated after {prefix['again_ms']:,.0f} ms"
    lines = [
        report.aligned(rows),
        "",
        f"A prefix of {prefix['prefix_tokens']:,} tokens: {times}, {prefix['share']:.1%} of it",
    ]
    busiest = max((row["cores_of_the_other_side"] or 0.0 for result in results for row in result["runs"]), default=0.0)
    if busiest > IDLE_CORES:
        lines.append(f"The other side was not idle: it used up to {busiest:.2f} cores. Take these figures with care.")
    return "\n".join(lines)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
