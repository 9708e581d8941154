"""`minisgl bench offline`: the speed of the engine alone, compared with the limits of the machine.

The engine runs in this process, with the log in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ops.bench import report
from ops.bench.datasets import Span, span
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.events import SamplingParams
from pipeline.flags import at_least, flag, parse_flags
from pipeline.process.config import ModelConfig
from stages.generate.loop.flights import Forward, launching
from stages.generate.model.checkpoint import check_folder, model_id
from stages.generate.model.gguf import BLOCKS
from stages.generate.model.spec import ModelSpec, tensor_shapes
from stages.generate.schedule.plan import BatchPlan, Computed
from stages.generate.setup.config import EngineConfig

if TYPE_CHECKING:  # torch is imported when the flags are checked
    import torch

    from ops.offline import LLM
    from stages.generate.model.layers.linear import Linear

ABOUT: Final = """\
Generates from random prompts to fixed lengths in this process, without Redis or HTTP, and compares the time with the
limits of the machine. One run warms up, the prefix cache is flushed before each run, and the median of the runs counts.
Each forward pass is timed. The table shows decode, prefill and mixed steps apart.
Memory limits decode. The share of decode steps is the bytes that they must read (the weights once per step, and the
keys and values of their rows), divided by the best read bandwidth measured here, divided by their time. Arithmetic
limits prefill. The share of prefill and mixed steps is two operations per weight and token (the head only for rows that
sample, no attention), divided by the best rate of a linear layer measured here, divided by their time. Both limits are
measured after the runs, with several methods, on buffers larger than the caches, with the engine's number of threads.
The default of --mixed-prefill-length is --max-prefill-length: no client waits for these streams.
"""
PACKAGES: Final = ("torch", "numpy")
LARGEST_ID: Final = 10_000
"""Largest token id in the prompts; a smaller vocabulary takes it modulo its size."""
TEMPERATURE: Final = 0.6
PHASES: Final = ("decode", "prefill", "mixed")
RATES: Final = ("output_tokens_per_s", "total_tokens_per_s")
MIB: Final = 2**20
NUM_BUFFERS: Final = 8
LEAST_BYTES: Final = 512 * MIB
"""Bytes of all buffers together; more if that is less than eight times the largest cache."""
GEMM_SIZE: Final = 2048
"""Rows and columns of a weight."""
GEMM_TOKENS: Final = 512
DRAWN_ROWS: Final = 256
ROUNDS: Final = 3
"""The best round counts: other programs may use the machine, too."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Number and lengths of prompts and answers."""

    num_prompts: int
    inputs: Span
    outputs: Span


PRESETS: Final[Mapping[str, Preset]] = {
    "small": Preset(32, Span(32, 256), Span(32, 256)),
    "nano": Preset(256, Span(100, 1024), Span(100, 1024)),  # the protocol of nano-vllm's bench.py
}


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """The workload, and the number of runs."""

    preset: str = flag(
        "--preset",
        default="auto",
        choices=("auto", *PRESETS),
        help="small: 32 prompts, 32-256 tokens in and out; nano: 256 prompts, 100-1024 tokens, as in nano-vllm's "
        "benchmark; auto: nano on CUDA, else small",
    )
    num_prompts: int = flag("--num-prompts", default=0, parse=at_least(1), help="number of prompts [the preset's]")
    inputs: Span | None = flag(  # noqa: RUF009  # a Span is frozen
        "--input-len", default=None, parse=span, help="tokens per prompt, MIN-MAX [the preset's]"
    )
    outputs: Span | None = flag(  # noqa: RUF009
        "--output-len", default=None, parse=span, help="tokens per answer, MIN-MAX [the preset's]"
    )
    seed: int = flag("--seed", default=0, parse=at_least(0), help="seed of lengths and tokens")
    runs: int = flag("--runs", default=3, parse=at_least(1), help="measured runs, after a warm-up run")
    output: str = flag("--output", default="", help="JSON file for the setup, every run and every probe")


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the length of each answer."""

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
class TimedStep:
    """The work and the time of one forward pass."""

    seconds: float
    decode_rows: int
    decode_context: int
    """Tokens with keys and values that the decode rows read, together, without regard to sliding windows."""
    prefill_tokens: int
    prefill_samples: int
    """Prompts that it completed."""
    launch_s: float = 0.0
    """Seconds of it until the host has launched it. On a GPU the host is free then, and busy before."""

    @property
    def phase(self) -> str:
        """`decode`, `prefill`, or `mixed` for both."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a model, in parameters."""

    dense: int
    """Parameters of the layers, without experts. Embedding lookups cost almost nothing and are not counted."""
    head: int
    experts: int
    """Parameters of all experts together."""
    chosen_share: float
    """Share of the experts that a token uses."""
    weight_bytes: float
    """Bytes per parameter, on average."""
    kv_bytes: int
    """Bytes of the keys and values of one token."""

    def bytes_read(self, step: TimedStep) -> float:
        """Return the bytes that a decode step must read: weights once, and the cached tokens of its rows.

        It reads every expert that at least one row uses: the expected number if rows choose at random.
        """
        reached = 1 - (1 - self.chosen_share) ** step.decode_rows
        num_weights = self.dense + self.head + self.experts * reached
        return num_weights * self.weight_bytes + step.decode_context * self.kv_bytes

    def operations(self, step: TimedStep) -> float:
        """Return the operations of a step: two per weight and token; the head only where a row samples."""
        per_token = self.dense + self.experts * self.chosen_share
        num_tokens = step.prefill_tokens + step.decode_rows
        return 2 * (per_token * num_tokens + self.head * (step.prefill_samples + step.decode_rows))


class StepClock:
    """Wraps an engine and times each step."""

    def __init__(self, engine: Forward) -> None:
        self._engine = launching(engine)
        self.steps: list[TimedStep] = []

    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step; it ends when its tokens are on the host."""
        return self.wait(self.launch(plan, None))

    def launch(self, plan: BatchPlan, before: tuple[BatchPlan, Any, float] | None) -> tuple[BatchPlan, Any, float]:
        """See `Launches`."""
        began_s = time.perf_counter()
        launched = self._engine.launch(plan, None if before is None else before[1])
        return plan, launched, time.perf_counter() - began_s

    def wait(self, launched: tuple[BatchPlan, Any, float]) -> Computed:
        """See `Launches`."""
        plan, of_engine, launch_s = launched
        began_s = time.perf_counter()
        computed = self._engine.wait(of_engine)
        took_s = launch_s + time.perf_counter() - began_s
        decodes, prefills = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
        context, num_tokens = sum(row.start + 1 for row in decodes), sum(len(row.token_ids) for row in prefills)
        num_samples = sum(row.sample is not None for row in prefills)
        self.steps.append(TimedStep(took_s, len(decodes), context, num_tokens, num_samples, launch_s))
        return computed


def draw(preset: Preset, seed: int, vocab_size: int) -> Workload:
    """Return the workload of *seed*, drawn in the order of nano-vllm's benchmark."""
    generator = random.Random(seed)
    prompts = [
        [generator.randint(0, LARGEST_ID) % vocab_size for _ in range(preset.inputs.draw(generator))]
        for _ in range(preset.num_prompts)
    ]
    return Workload(prompts, [preset.outputs.draw(generator) for _ in range(preset.num_prompts)])


def chosen(config: OfflineConfig, device: str) -> Preset:
    """Return the preset for *device*, changed by the flags."""
    name = config.preset if config.preset != "auto" else "nano" if device == "cuda" else "small"
    preset = PRESETS[name]
    return Preset(
        config.num_prompts or preset.num_prompts, config.inputs or preset.inputs, config.outputs or preset.outputs
    )


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the benchmark, print its table and write its JSON; return the exit code. Raises ConfigError."""
    model, engine, config = parse_flags(
        "bench offline", [ModelConfig, EngineConfig, OfflineConfig], arguments, environment, about=ABOUT
    )
    if engine.tp > 1:
        raise ConfigError(f"--tp {engine.tp}: this benchmark measures a single process; leave it out")
    report.check_can_write("--output", config.output)
    from ops.offline import LLM

    clocks: list[StepClock] = []

    def clocked(wrapped: Forward) -> Forward:
        clocks.append(StepClock(wrapped))
        return clocks[0]

    options = {item.name: getattr(engine, item.name) for item in fields(engine)}
    changed = {item.name: options[item.name] for item in fields(engine) if options[item.name] != item.default}
    with LLM(model.model, tokenizer=model.tokenizer, wrap_engine=clocked, **changed) as llm:
        settings = llm.settings
        workload = draw(chosen(config, settings.device.type), config.seed, settings.limits.vocab_size)
        if workload.longest > settings.limits.context:
            raise ConfigError(
                f"a prompt and its answer have {workload.longest} tokens, but the served context is "
                f"{settings.limits.context}; pass shorter --input-len and --output-len, or another --model"
            )
        runs = [_run(llm, clocks[0], workload) for _ in range(1 + config.runs)][1:]
        steps = [step for _, steps in runs for step in steps]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB on Linux
    bandwidth = read_bandwidth(settings.device, settings.threads)
    gemm = gemm_rate(settings.device, settings.dtype, settings.threads)
    drawing = {}
    if settings.device.type == "cuda":
        drawing["drawing_s"] = drawing_s(
            settings.device, settings.dtype, settings.limits.vocab_size, is_new=settings.gpu_new
        )
    spec = check_folder(llm.folder, engine.loading)
    cost = cost_of(spec, settings.dtype.itemsize)
    cost = replace(cost, weight_bytes=bytes_per_weight(spec, settings.dtype, settings.quantization))
    document = {
        **report.setup(["minisgl", "bench", "offline", *arguments], PACKAGES),
        "model": {
            "name": model_id(llm.folder),
            "config_sha256": hashlib.sha256((llm.folder / "config.json").read_bytes()).hexdigest(),
            "fingerprint": llm.fingerprint,
        },
        "engine": asdict(settings)
        | {name: str(getattr(settings, name)).removeprefix("torch.") for name in ("device", "dtype")},
        "workload": {
            "num_prompts": len(workload.prompts),
            "input_tokens": workload.input_tokens,
            "output_tokens": workload.output_tokens,
            "seed": config.seed,
        },
        **{rate: statistics.median(row[rate] for row, _ in runs) for rate in RATES},
        "peak_rss_bytes": peak_bytes,
        "decode_share": decode_share(steps, cost, best(bandwidth)),
        "prefill_share": prefill_share(steps, cost, best(gemm)),
        "read_bandwidth": bandwidth,
        "gemm_rate": gemm,
        **drawing,
        "runs": [row for row, _ in runs],
    }
    print(table(document))
    if config.output:
        report.write_json(Path(config.output), document)
    return 0


def _run(llm: LLM, clock: StepClock, workload: Workload) -> tuple[dict[str, Any], list[TimedStep]]:
    """Run the whole workload; return its row of the JSON and its steps."""
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
        raise MiniSGLError(f"the engine wrote {output_tokens} tokens, expected {workload.output_tokens}: a bug of ours")
    row = {
        "seconds": seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (workload.input_tokens + output_tokens) / seconds,
        "cached_tokens": sum(completion.cached_tokens for completion in completions),
        "phases": {phase: _phase_row([step for step in clock.steps if step.phase == phase]) for phase in PHASES},
        "outside_s": seconds - sum(step.seconds for step in clock.steps),
    }
    return row, clock.steps


def _phase_row(steps: Sequence[TimedStep]) -> dict[str, Any]:
    summed = ("seconds", "launch_s", "decode_rows", "prefill_tokens")
    return {"steps": len(steps), **{name: sum(getattr(step, name) for step in steps) for name in summed}}


def table(document: Mapping[str, Any]) -> str:
    """Return the figures of the JSON *document* as a table."""
    model, engine, workload = document["model"], document["engine"], document["workload"]
    header = ["run", "seconds", "output tok/s", "total tok/s", *(f"{phase} s" for phase in PHASES), "outside s"]
    rows = [header]
    for number, run in enumerate(document["runs"], 1):
        times_s = [*(run["phases"][phase]["seconds"] for phase in PHASES), run["outside_s"]]
        rates = (f"{run[rate]:,.1f}" for rate in RATES)
        rows.append([str(number), f"{run['seconds']:.2f}", *rates, *(f"{time_s:.2f}" for time_s in times_s)])
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


def _share(share: float) -> str:
    return f"{share:.0%}" if share else "there were no such steps, so no share"


def _rates(rates: Sequence[Rate], unit: str) -> str:
    """Return all methods, the fastest first."""
    ordered = sorted(rates, key=lambda rate: -rate.per_s)
    return ", ".join(f"{rate.method} {rate.per_s / 1e9:,.1f}" for rate in ordered) + f" {unit}"


def cost_of(spec: ModelSpec, dtype_bytes: int) -> Cost:
    """Return the cost of *spec* in a dtype of *dtype_bytes*. Where transformers computes, all weights count."""
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype_bytes
    if spec.by == "transformers":
        head = spec.vocab_size * spec.hidden_size
        return Cost(spec.num_weights - head, head, 0, 0.0, dtype_bytes, kv_bytes)
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
    embedding = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", embedding)  # tied
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return Cost(
        dense=sum(sizes.values()) - experts,
        head=head,
        experts=experts,
        chosen_share=spec.experts.experts_per_token / spec.experts.num_experts if experts else 0.0,
        weight_bytes=dtype_bytes,
        kv_bytes=kv_bytes,
    )


def bytes_per_weight(spec: ModelSpec, dtype: torch.dtype, quantization: str) -> float:
    """Return the bytes of a weight in memory, on average; the head of tied embeddings may be a copy."""
    from stages.generate.forward.pool import weights_bytes

    if quantization == "none":
        return dtype.itemsize
    if spec.blocks:
        count = sum(size // BLOCKS[kind][2] * BLOCKS[kind][1] for kind, size in spec.blocks.items())
    else:
        shapes = tensor_shapes(spec)
        shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])
        count = sum(map(math.prod, shapes.values()))
    return weights_bytes(spec, dtype, quantization) / count


def decode_share(steps: Sequence[TimedStep], cost: Cost, bytes_per_s: float) -> float:
    """Return the least possible time of the decode steps divided by their real time; 0 without such steps."""
    return _shared([step for step in steps if step.phase == "decode"], cost.bytes_read, bytes_per_s)


def prefill_share(steps: Sequence[TimedStep], cost: Cost, operations_per_s: float) -> float:
    """Like `decode_share`, for the steps that compute prompts, alone or beside decode rows."""
    return _shared([step for step in steps if step.phase != "decode"], cost.operations, operations_per_s)


def _shared(steps: Sequence[TimedStep], work: Callable[[TimedStep], float], per_s: float) -> float:
    return sum(map(work, steps)) / per_s / sum(step.seconds for step in steps) if steps else 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """The result of one method to measure a limit of this machine. The fastest method's is the limit."""

    method: str
    per_s: float
    """Bytes, or operations: two for a multiplication and its addition."""


def best(rates: Sequence[Rate]) -> float:
    """Return the fastest rate."""
    return max(rate.per_s for rate in rates)


def read_bandwidth(device: torch.device, threads: int, *, total_bytes: int = 0) -> list[Rate]:
    """Return the bytes that each method moves per second; a copy counts as reading and writing.

    The methods go round so many buffers that no cache holds the next one. *total_bytes* 0 means enough for that.
    """
    import torch

    size = (total_bytes or max(LEAST_BYTES, 8 * largest_cache_bytes())) // NUM_BUFFERS // 4
    with using_threads(threads), ThreadPoolExecutor(threads) as pool:
        buffers = [torch.full((size,), float(index), device=device) for index in range(NUM_BUFFERS)]
        methods: dict[str, tuple[int, Callable[[int], object]]] = {
            "torch sum": (1, lambda index: buffers[index].sum()),
            "torch max": (1, lambda index: buffers[index].amax()),
            "torch copy": (2, lambda index: buffers[index - 1].copy_(buffers[index])),
        }
        if device.type == "cpu":
            arrays = [buffer.numpy() for buffer in buffers]
            parts = [slice(size * part // threads, size * (part + 1) // threads) for part in range(threads)]

            def in_parts(work: Callable[[Any, Any], object], index: int) -> None:
                list(pool.map(lambda part: work(arrays[index - 1][part], arrays[index][part]), parts))

            methods["numpy sum"] = (1, partial(in_parts, lambda _, source: np.add.reduce(source)))
            methods["memcpy"] = (
                2,
                partial(in_parts, lambda to, source: ctypes.memmove(to.ctypes.data, source.ctypes.data, source.nbytes)),
            )
        return [
            Rate(name, passes * buffers[0].nbytes / seconds_each(method, device))
            for name, (passes, method) in methods.items()
        ]


def gemm_rate(
    device: torch.device, dtype: torch.dtype, threads: int, *, size: int = GEMM_SIZE, tokens: int = GEMM_TOKENS
) -> list[Rate]:
    """Return the operations per second of a linear layer over *tokens* rows, plain and packed, in *dtype* and float32.

    Methods that this machine lacks are left out.
    """
    import torch

    from stages.generate.model.layers.linear import Linear, can_pack, pack

    rates = []
    with using_threads(threads), torch.inference_mode():
        for kind in dict.fromkeys((dtype, torch.float32)):
            weights = [torch.randn(size, size, device=device).to(kind) for _ in range(NUM_BUFFERS)]
            x_TI = torch.randn(tokens, size, device=device).to(kind)
            layers = {"F.linear": [Linear(one, None) for one in weights]}
            if device.type == "cpu" and can_pack(kind):
                layers["packed"] = [Linear(pack(one), None) for one in weights]
            for name, linears in layers.items():
                each_s = seconds_each(partial(_multiply, linears, x_TI), device)
                rates.append(Rate(f"{name} {str(kind).removeprefix('torch.')}", 2 * tokens * size * size / each_s))
    return rates


def _multiply(linears: Sequence[Linear], x_TI: torch.Tensor, index: int) -> torch.Tensor:
    return linears[index](x_TI)


def drawing_s(
    device: torch.device, dtype: torch.dtype, vocab_size: int, *, is_new: bool, num_rows: int = DRAWN_ROWS
) -> float:
    """Return the seconds in which the tokens of a step are drawn from random logits; *is_new*: as with --gpu-new."""
    import torch

    from stages.generate.sampling.sampler import best, choose
    from stages.generate.sampling.sampler import draw as draw_tokens
    from stages.generate.schedule.plan import Sample

    samples = [Sample(SamplingParams(temperature=TEMPERATURE, seed=row), row, ()) for row in range(num_rows)]
    logits = [torch.randn(num_rows, vocab_size, device=device).to(dtype) for _ in range(NUM_BUFFERS)]

    def as_before(index: int) -> None:
        logits_RV = logits[index].float()
        draw_tokens(best(logits_RV), logits_RV, samples)

    with torch.inference_mode():
        return seconds_each((lambda index: choose(logits[index], samples)) if is_new else as_before, device)


def seconds_each(method: Callable[[int], object], device: torch.device) -> float:
    """Return the seconds that *method* takes for a buffer in the best round, after a warm-up round."""
    rounds_s = []
    for _ in range(1 + ROUNDS):
        began_s = time.perf_counter()
        for index in range(NUM_BUFFERS):
            method(index)
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        rounds_s.append(time.perf_counter() - began_s)
    return min(rounds_s[1:]) / NUM_BUFFERS


@contextlib.contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Let torch use *threads* threads until the block ends."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest_cache_bytes() -> int:
    """Return the size of the CPU's largest cache, by Linux; 0 if it is unknown."""
    texts = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    sizes = [int(text[:-1]) * 1024 for text in texts if text.endswith("K") and text[:-1].isdecimal()]
    return max(sizes, default=0)
