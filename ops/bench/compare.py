"""`minisgl bench compare`, or `make bench`: our server and a peer in turn, on one checkpoint and the same requests.

Ours is a real server behind HTTP and Redis. The peer is transformers or llama.cpp in its own process, or any server by
its URL. Runs alternate. Each run has new prompts, the same for both sides, so no prefix cache remembers the run before.
While one side runs, the other must be idle, which is measured.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from rich.status import Status

from ops.bench import report
from ops.bench.datasets import Span, length_flag
from ops.bench.load import COMPLETIONS
from ops.bench.models import CheckpointConfig, Prompt, Prompts
from ops.bench.serve import check_url
from ops.bench.targets import (
    Helper,
    Served,
    SideFailed,
    answering,
    helper,
    last_line,
    our_server,
    program,
    scratch_and_status,
    served_at,
    started,
)
from pipeline.errors import ConfigError
from pipeline.flags import at_least, flag, parse_flags, yes_or_no

ABOUT: Final = """\
Compares minisgl with transformers, with llama.cpp (--llama-python), or with the server at --peer-url, on the same
checkpoint and requests: output tokens/s of many requests at once (transformers: one static batch) and of one at a time,
as medians of alternating runs, and the time to the first token of a repeated prefix (ours alone).
"""
PACKAGES: Final = ("torch", "transformers", "aiohttp", "redis")
SUFFIX_TOKENS: Final = 8
IDLE_CORES: Final = 0.05
"""An idle side uses at most this share of a core."""
LLAMA: Final = Path(__file__).with_name("llama.py")
GGUF_KINDS: Final = ("bf16", "q8_0", "q4_0", "q4_k_m")


@dataclass(frozen=True, slots=True)
class CompareConfig(CheckpointConfig):
    """What is compared."""

    peer_url: str = flag("--peer-url", default="", help="URL of an OpenAI server with the same model [transformers]")
    llama_python: str = flag(
        "--llama-python", default="", help="python with llama-cpp-python and gguf: the peer is llama.cpp [transformers]"
    )
    gguf: str = flag(
        "--gguf",
        default="",
        help="weights of llama.cpp: bf16, q8_0, q4_0 or q4_k_m, made from the checkpoint, or a GGUF file [bf16]",
    )
    both: bool = flag(
        "--both", default=False, parse=yes_or_no, help="minisgl computes the file of --gguf, too, not the checkpoint"
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

    def drawn(self, prompts: Prompts, seed: int, run: int) -> tuple[Prompt, ...]:
        """Return the prompts of *run*, the same for both sides."""
        return prompts.drawn(random.Random(f"{seed}/{self.name}/{run}"), self.lengths)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison."""

    name: str
    run: Callable[[Sequence[Prompt], int], dict[str, Any]]
    """Completes prompts, so many at a time; returns `duration_s` and the figures of all `requests`, if it has them."""
    cpu_s: Callable[[], float | None]
    """Returns the CPU time of all its processes, or None if they run elsewhere."""


def served_side(served: Served) -> Side:
    """Return a server as a side."""

    def run(prompts: Sequence[Prompt], concurrency: int) -> dict[str, Any]:
        measured = served.measure(prompts, concurrency)
        duration_s = report.summarize(measured)["duration_s"]
        return {"duration_s": duration_s, "requests": report.requests_of(measured)}

    return Side(served.name, run, served.cpu_s)


def library_side(library: Helper) -> Side:
    """Return a library as a side. It computes many requests as one batch, or one request after another."""

    def run(prompts: Sequence[Prompt], concurrency: int) -> dict[str, Any]:
        lengths = [prompt.output_tokens for prompt in prompts]
        question = {"ids": [prompt.ids for prompt in prompts], "output_tokens": lengths, "batch": concurrency > 1}
        return {"duration_s": library.ask(question)["duration_s"], "requests": []}

    return Side(library.name, run, library.cpu_s)


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
    """Compare; return the exit code. Raises MiniSGLError."""
    (config,) = parse_flags("bench compare", (CompareConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    if config.peer_url:
        check_url(config.peer_url, "--peer-url")
    python = checked_llama(config)
    folder = config.folder(environment)
    prompts, threads = Prompts(folder), config.threads or report.num_cores()
    flags = ["--model", str(folder), "--dtype", config.dtype, "--threads", str(threads)]
    flags += shlex.split(config.serve_flags)
    with contextlib.ExitStack() as stack:
        data, status = stack.enter_context(scratch_and_status())
        file = gguf_file(config, python, folder, data) if python else ""
        if config.both:
            flags[1:2] = [file, "--tokenizer", str(folder)]
        served, ready_s = stack.enter_context(our_server(data, flags))
        ours = served_side(served)
        status.update("starting the peer")
        with started_peer(config, python, folder, file, threads) as (peer, about):
            results = [_compared(task, prompts, config, (ours, peer), status) for task in tasks(config)]
            status.update("repeating prefixes")
            prefix = repeated_prefix(served, prompts, config)
            numerics = served.numerics()
    print(f"{folder.name}, {threads} threads each, on {report.cpu_model()}")
    print(f"medians of {config.runs} alternating runs, {ours.name} through HTTP and Redis")
    print(f"{ours.name}: {numerics}; {peer.name}: {about.get('dtype', config.peer_url)}\n")
    print(table(results, prefix, ours.name, peer.name))
    document = {
        "options": report.options_of(config),
        "checkpoint": str(folder),
        "threads": threads,
        "minisgl": {"flags": flags, "ready_s": ready_s, "numerics": numerics},
        "peer": {"name": peer.name, **about},
        "tasks": results,
        "prefix": prefix,
    }
    report.save(config.output, ("minisgl", "bench", "compare", *arguments), PACKAGES, document)
    return 0


def checked_llama(config: CompareConfig) -> str:
    """Return the path of the python that has llama.cpp; empty if it is not the peer.

    Raises:
        ConfigError: The flags cannot work.
    """
    if not config.llama_python:
        if given := "--both" if config.both else f"--gguf {config.gguf}" if config.gguf else "":
            raise ConfigError(f"{given}: is for llama.cpp; pass --llama-python, too")
        return ""
    if config.peer_url:
        raise ConfigError("--peer-url and --llama-python both name the peer; pass one of them")
    if config.gguf not in ("", *GGUF_KINDS) and not Path(config.gguf).expanduser().is_file():
        raise ConfigError(f"--gguf {config.gguf}: no such file; pass a GGUF file, or {' or '.join(GGUF_KINDS)}")
    found = shutil.which(config.llama_python)
    if found is None:
        raise ConfigError(
            f"--llama-python {config.llama_python}: no such program; pass the python of its environment, DIR/bin/python"
        )
    python = os.path.abspath(found)
    command = [python, "-I", "-c", "import gguf, llama_cpp, numpy"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"--llama-python {config.llama_python}: has no llama.cpp ({reason}); run {config.llama_python} -m pip "
            "install llama-cpp-python gguf"
        )
    return python


@contextlib.contextmanager
def started_peer(
    config: CompareConfig, python: str, folder: Path, file: str, threads: int
) -> Iterator[tuple[Side, dict[str, Any]]]:
    """Give the peer, and what it says of itself.

    Raises:
        MiniSGLError: It does not answer, or cannot load the checkpoint.
    """
    if config.peer_url:
        served = served_at("peer", config.peer_url, COMPLETIONS)
        yield served_side(served), {"url": served.url}
        return
    if python:
        name, command = "llama.cpp", [python, "-I", str(LLAMA), file, f"{threads}"]
    else:
        name, command = "transformers", program("compare:transformers_answers", folder, config.dtype, threads)
    with helper(name, command) as library:
        about = library.answer()  # the model is loaded
        yield library_side(library), about


def gguf_file(config: CompareConfig, python: str, folder: Path, scratch: Path) -> str:
    """Return the weights of llama.cpp: a GGUF file, or the checkpoint, converted into *scratch*.

    Raises:
        ConfigError: The checkpoint is a GGUF file, and another one is wanted.
        SideFailed: It cannot be converted.
    """
    kind = config.gguf or GGUF_KINDS[0]
    if kind not in GGUF_KINDS:
        return str(Path(kind).expanduser().absolute())
    if own := sorted(folder.glob("*.gguf")):  # a folder made of one or more files
        if config.gguf:
            raise ConfigError(f"--gguf {kind}: --model is a GGUF file, which is not converted; leave it out")
        return str(own[0])
    file, said = scratch / f"{kind}.gguf", scratch / "gguf.log"
    with started([python, "-I", str(LLAMA), str(folder), str(file), kind], said) as process:
        if process.wait():
            raise SideFailed(f"{folder} could not be converted for llama.cpp: {last_line(said)}")
    return str(file)


def transformers_answers(folder: str, dtype: str, threads: str) -> None:
    """Be transformers: load the model of *folder*, then answer questions until stdin ends."""
    with answering() as answer:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(int(threads))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # which also turns training off
        assert model.generation_config is not None
        model.generation_config.eos_token_id = None  # an answer has exactly the length that was asked
        answer({"transformers": transformers.__version__, "torch": torch.__version__, "dtype": str(model.dtype)})
        for line in sys.stdin.buffer:
            question = orjson.loads(line)
            requests = list(zip(question["ids"], question["output_tokens"], strict=True))
            began_s = time.perf_counter()
            for batch in [requests] if question["batch"] else [[request] for request in requests]:
                _generate(model, batch)
            answer({"duration_s": time.perf_counter() - began_s})


def _generate(model: Any, batch: Sequence[tuple[Sequence[int], int]]) -> None:
    """Generate greedily for a batch, padded on the left, until its longest answer is complete."""
    import torch

    longest = max(len(ids) for ids, _ in batch)
    most = max(output_tokens for _, output_tokens in batch)
    ids = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids, _ in batch])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch])
    with torch.inference_mode():
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
    assert made.shape == (len(batch), longest + most), f"{tuple(made.shape)} for {longest} + {most} tokens"


def _compared(
    task: Task, prompts: Prompts, config: CompareConfig, sides: tuple[Side, Side], status: Status
) -> dict[str, Any]:
    """Run *task* on both sides in turn; return every run, the medians and their ratio."""
    runs: list[dict[str, Any]] = []
    output_tokens = sum(output_tokens for _, output_tokens in task.lengths)
    for run in range(config.runs + 1):  # the first one warms up
        drawn = task.drawn(prompts, config.seed, run)
        for side, other in (sides, sides[::-1]):
            doing = f"{task.name}: {side.name}, {f'run {run} of {config.runs}' if run else 'warm-up'}"
            status.update(doing)
            before_s = other.cpu_s()
            done = side.run(drawn, task.concurrency)
            after_s = other.cpu_s()
            per_s = output_tokens / done["duration_s"]
            status.console.print(f"{doing}: {per_s:,.1f} tokens/s", highlight=False, soft_wrap=True)
            row = {"run": run, "side": side.name, "output_tokens": output_tokens, "output_tokens_per_s": per_s, **done}
            used = None if before_s is None or after_s is None else (after_s - before_s) / done["duration_s"]
            runs.append(row | {"cores_of_the_other_side": used})
    del runs[:2]
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


def repeated_prefix(ours: Served, prompts: Prompts, config: CompareConfig) -> dict[str, Any]:
    """Measure the time to the first token of new prefixes, and of the same prefixes with another end."""
    generator, length = random.Random(f"{config.seed}/prefix"), config.prefix_tokens
    rows = []
    for _ in range(config.num_prefixes + 1):
        prefix, row = prompts.words(generator, length), {}
        for name in ("first", "again"):
            text = prefix + prompts.words(generator, SUFFIX_TOKENS)
            (one,) = ours.measure([prompts.of(text, length + SUFFIX_TOKENS, 1)], 1)
            row[name] = {"ttft_ms": one.answer.ttft_ms, "cached_tokens": one.answer.cached_tokens}
        rows.append(row)
    del rows[0]  # it warms up
    first_ms, again_ms = (statistics.median(row[name]["ttft_ms"] for row in rows) for name in ("first", "again"))
    return {
        "prefix_tokens": length,
        "suffix_tokens": SUFFIX_TOKENS,
        "prefixes": rows,
        "first_ms": first_ms,
        "again_ms": again_ms,
        "share": again_ms / first_ms,
    }


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
