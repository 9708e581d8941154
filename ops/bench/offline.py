"""`minisgl bench offline`: what the engine alone does, in this process and over the log in memory, beside what the
machine could do. Sends no request anywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ops.bench import report
from ops.bench.datasets import Span
from ops.bench.serve import span
from ops.bench.shares import Step, cost_of, decode_share, prefill_share
from pipeline.config import EngineConfig, ModelConfig, at_least, flag, parse_flags
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.events import SamplingParams
from stages.generate.model.checkpoint import model_id
from stages.generate.model.spec import read_spec
from stages.generate.schedule.plan import BatchPlan, Computed

if TYPE_CHECKING:  # torch comes with them: only once the flags are known to be good
    from ops.bench.probes import Rate
    from ops.offline import LLM
    from stages.generate.worker import Forward

ABOUT: Final = """\
Generates from random prompts to fixed lengths in this process, without Redis or HTTP, and compares the time with the
limits of the machine. One run warms up, the prefix cache is flushed before each, and the median of the runs counts.
Each forward pass is clocked: decode steps, prefill steps, and mixed ones, whose time is not shared out but told apart.
Decode is limited by memory: its share is the bytes that decode steps must read (the weights once a step, and the keys
and values of its rows) over the best read bandwidth measured here, over the time they took. Prefill is limited by
arithmetic: its share is two operations per weight and token of the prefill and mixed steps (those of the head only for
rows that sample, those of attention not at all) over the best rate of a linear layer measured here, over the time they
took. Both limits are measured after the runs, by several methods that go round buffers larger than the caches, with as
many threads as the engine has. Nobody watches these streams, so --mixed-prefill-length is --max-prefill-length unless
it is given.
"""
PACKAGES: Final = ("torch", "numpy")
LARGEST_ID: Final = 10_000
"""Of the tokens in the prompts; modulo the vocabulary where that is smaller."""
TEMPERATURE: Final = 0.6
PHASES: Final = ("decode", "prefill", "mixed")
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Preset:
    """How many prompts, and how long they and their answers are."""

    num_prompts: int
    inputs: Span
    outputs: Span


PRESETS: Final[Mapping[str, Preset]] = {
    "small": Preset(32, Span(32, 256), Span(32, 256)),
    "nano": Preset(256, Span(100, 1024), Span(100, 1024)),  # the protocol of nano-vllm's bench.py
}


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """What is generated, and how often."""

    preset: str = flag(
        "--preset",
        default="auto",
        choices=("auto", *PRESETS),
        help="small: 32 prompts of 32-256 tokens and as many out; nano: 256 of 100-1024, as nano-vllm's benchmark;"
        " auto is nano on CUDA, else small",
    )
    num_prompts: int = flag("--num-prompts", default=0, parse=at_least(1), help="prompts [the preset's]")
    inputs: Span | None = flag(  # noqa: RUF009  # a Span is frozen
        "--input-len", default=None, parse=span, help="tokens of a prompt, MIN-MAX [the preset's]"
    )
    outputs: Span | None = flag(  # noqa: RUF009
        "--output-len", default=None, parse=span, help="tokens of an answer, MIN-MAX [the preset's]"
    )
    seed: int = flag("--seed", default=0, parse=at_least(0), help="of lengths and tokens")
    runs: int = flag("--runs", default=3, parse=at_least(1), help="measured runs, after one to warm up")
    output: str = flag("--output", default="", help="JSON file for the set-up, every run and every probe")


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how long the answer to each is."""

    prompts: Sequence[Sequence[int]]
    output_lengths: Sequence[int]

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lengths, strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the whole workload."""

    seconds: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: tuple[Step, ...]

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds


class StepClock:
    """An engine that clocks each step. It reads the clock twice and adds up lengths; it waits for nothing."""

    def __init__(self, engine: Forward) -> None:
        self._engine = engine
        self.steps: list[Step] = []

    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step, which is over when its tokens are on the host."""
        began_s = time.perf_counter()
        computed = self._engine.forward(plan)
        seconds = time.perf_counter() - began_s
        decodes, prefills = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
        step = Step(
            seconds=seconds,
            decode_rows=len(decodes),
            decode_context=sum(row.start + 1 for row in decodes),
            prefill_tokens=sum(len(row.token_ids) for row in prefills),
            prefill_samples=sum(row.sample is not None for row in prefills),
        )
        self.steps.append(step)
        return computed


def draw(preset: Preset, seed: int, vocab_size: int) -> Workload:
    """Return the prompts and lengths that *seed* gives, drawn in the order of nano-vllm's benchmark."""
    generator = random.Random(seed)
    prompts = [
        [generator.randint(0, LARGEST_ID) % vocab_size for _ in range(preset.inputs.draw(generator))]
        for _ in range(preset.num_prompts)
    ]
    return Workload(prompts, [preset.outputs.draw(generator) for _ in range(preset.num_prompts)])


def chosen(config: OfflineConfig, device: str) -> Preset:
    """Return the preset for *device*, with what the flags say instead."""
    name = config.preset if config.preset != "auto" else "nano" if device == "cuda" else "small"
    preset = PRESETS[name]
    return Preset(
        config.num_prompts or preset.num_prompts, config.inputs or preset.inputs, config.outputs or preset.outputs
    )


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the benchmark, print its table and write its JSON; return the exit code.

    Raises:
        ConfigError: The flags, the model and the machine do not go together.
    """
    model, engine, config = parse_flags(
        "bench offline", [ModelConfig, EngineConfig, OfflineConfig], arguments, environment, about=ABOUT
    )
    report.check_can_write("--output", config.output)
    from ops.bench import probes

    clocks: list[StepClock] = []

    def clocked(wrapped: Forward) -> Forward:
        clocks.append(StepClock(wrapped))
        return clocks[0]

    with _llm(model, engine, clocked) as llm:
        settings = llm.settings
        workload = draw(chosen(config, settings.device.type), config.seed, settings.limits.vocab_size)
        _check_fits(workload, settings.limits.context)
        runs = [_run(llm, clocks[0], workload) for _ in range(1 + config.runs)][1:]
    peak_bytes = peak_rss_bytes()
    bandwidth = probes.read_bandwidth(settings.device, settings.threads)
    gemm = probes.gemm_rate(settings.device, settings.dtype, settings.threads)
    cost = cost_of(read_spec(llm.folder), settings.dtype.itemsize)
    steps = [step for run in runs for step in run.steps]
    document = {
        **report.setup(["minisgl", "bench", "offline", *arguments], PACKAGES),
        "model": _model(llm),
        "engine": _engine(llm),
        "workload": {
            "num_prompts": len(workload.prompts),
            "input_tokens": workload.input_tokens,
            "output_tokens": workload.output_tokens,
            "seed": config.seed,
        },
        "output_tokens_per_s": statistics.median(run.output_tokens_per_s for run in runs),
        "total_tokens_per_s": statistics.median(run.total_tokens_per_s for run in runs),
        "peak_rss_bytes": peak_bytes,
        "decode_share": decode_share(steps, cost, probes.best(bandwidth).per_s),
        "prefill_share": prefill_share(steps, cost, probes.best(gemm).per_s),
        "read_bandwidth": bandwidth,
        "gemm_rate": gemm,
        "runs": [_run_row(run) for run in runs],
    }
    print(table(document))
    if config.output:
        report.write_json(Path(config.output), document)
    return 0


def _llm(model: ModelConfig, engine: EngineConfig, wrap: Callable[[Forward], Forward]) -> LLM:
    from ops.offline import LLM

    options = {
        item.name: value for item in dataclasses.fields(engine) if (value := getattr(engine, item.name)) != item.default
    }
    return LLM(model.model, wrap_engine=wrap, **options)


def _check_fits(workload: Workload, context: int) -> None:
    if workload.longest > context:
        raise ConfigError(
            f"a prompt and its answer have {workload.longest} tokens, but the served context is {context}; "
            "pass shorter --input-len and --output-len, or another --model"
        )


def _run(llm: LLM, clock: StepClock, workload: Workload) -> Run:
    parameters = [
        SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=length)
        for length in workload.output_lengths
    ]
    llm.flush_cache()
    clock.steps = []
    began_s = time.perf_counter()
    completions = llm.generate(workload.prompts, parameters)
    seconds = time.perf_counter() - began_s
    output_tokens = sum(len(completion.token_ids) for completion in completions)
    if output_tokens != workload.output_tokens:
        raise MiniSGLError(f"{output_tokens} tokens came out, expected {workload.output_tokens}: a bug of ours")
    cached_tokens = sum(completion.cached_tokens for completion in completions)
    return Run(seconds, workload.input_tokens, cached_tokens, output_tokens, tuple(clock.steps))


def _model(llm: LLM) -> dict[str, Any]:
    config = (llm.folder / "config.json").read_bytes()
    return {
        "name": model_id(llm.folder),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "fingerprint": llm.fingerprint,
    }


def _engine(llm: LLM) -> dict[str, Any]:
    """Return the settings, as text where they are no numbers."""
    settings = dataclasses.asdict(llm.settings)
    return settings | {name: str(settings[name]).removeprefix("torch.") for name in ("device", "dtype")}


def _run_row(run: Run) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "output_tokens_per_s": run.output_tokens_per_s,
        "total_tokens_per_s": run.total_tokens_per_s,
        "cached_tokens": run.cached_tokens,
        "phases": {phase: _phase_row([step for step in run.steps if step.phase == phase]) for phase in PHASES},
        "outside_s": run.seconds - sum(step.seconds for step in run.steps),
    }


def _phase_row(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "seconds": sum(step.seconds for step in steps),
        "steps": len(steps),
        "decode_rows": sum(step.decode_rows for step in steps),
        "prefill_tokens": sum(step.prefill_tokens for step in steps),
    }


def table(document: Mapping[str, Any]) -> str:
    """Return the figures for people; *document* is what goes into the JSON."""
    model, engine, workload = document["model"], document["engine"], document["workload"]
    header = ["run", "seconds", "output tok/s", "total tok/s", *(f"{phase} s" for phase in PHASES), "outside s"]
    rows = [header, *(_table_row(str(number), run) for number, run in enumerate(document["runs"], 1))]
    return f"""\
{model["name"]}, {engine["dtype"]} on {engine["device"]}, {engine["threads"]} threads, {document["cpu"]}
{workload["num_prompts"]} prompts, {workload["input_tokens"]:,} tokens in and {workload["output_tokens"]:,} out

{report.aligned(rows)}

median: {document["output_tokens_per_s"]:,.1f} output tokens/s, {document["total_tokens_per_s"]:,.1f} total tokens/s
peak memory: {document["peak_rss_bytes"] / MIB:,.0f} MiB (resident set)

decode steps: {_share(document["decode_share"])} of the read bandwidth
    {_rates(document["read_bandwidth"], "GB/s")}
steps with prompts: {_share(document["prefill_share"])} of the rate of a linear layer
    {_rates(document["gemm_rate"], "GFLOP/s")}"""


def _table_row(name: str, run: Mapping[str, Any]) -> list[str]:
    times_s = [*(run["phases"][phase]["seconds"] for phase in PHASES), run["outside_s"]]
    return [
        name,
        f"{run['seconds']:.2f}",
        f"{run['output_tokens_per_s']:,.1f}",
        f"{run['total_tokens_per_s']:,.1f}",
        *(f"{seconds:.2f}" for seconds in times_s),
    ]


def _share(share: float) -> str:
    return f"{share:.0%}" if share else "there were none, so no share"


def _rates(rates: Sequence[Rate], unit: str) -> str:
    """Return all methods, the best one first."""
    ordered = sorted(rates, key=lambda rate: -rate.per_s)
    return ", ".join(f"{rate.method} {rate.per_s / 1e9:,.1f}" for rate in ordered) + f" {unit}"


def peak_rss_bytes() -> int:
    """Return the most memory that this process has had at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB on Linux
