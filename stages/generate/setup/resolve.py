"""Turns `auto` into values, from the engine's config, the model and the machine. No other module does."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Set
from dataclasses import astuple, dataclass, replace
from importlib import metadata
from typing import Final

import structlog
import torch

from pipeline.errors import ConfigError
from stages.generate.attention import DETERMINISTIC, AttentionShape, fused
from stages.generate.attention.flashinfer import load_library, why_not
from stages.generate.forward.pool import CPU_LIMIT_BYTES, available_memory_bytes, num_pages_for
from stages.generate.kernels import MOST_THREADS, VERSION, library
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, LocalLayers
from stages.generate.machine import bfloat16_is_slow, cpus_of, quota_cores, usable_cores, usable_cpus
from stages.generate.model.attention import attention_shape
from stages.generate.model.gguf import BLOCKS
from stages.generate.model.layers import operations
from stages.generate.model.layers.blocks import BLOCK_ROWS
from stages.generate.model.layers.experts import can_group
from stages.generate.model.spec import ROUNDED, ModelSpec
from stages.generate.sampling import sampler
from stages.generate.schedule.request import MANY_STREAMS
from stages.generate.schedule.schedule import ScheduleLimits
from stages.generate.setup.config import MOST_DRAFTS, ON_CPU, ON_GPU, EngineConfig, ShareConfig, Targets
from stages.generate.setup.contradictions import check_flags, in_place_of_kernels, needing_kernels, variant_of
from stages.generate.setup.kernel_memory import step_bytes

MOST_GRAPH_ROWS: Final = 256
"""Largest number of rows of a graph if no flag sets it. A larger step keeps the device busy without a graph."""

logger = structlog.get_logger()

WHOLE: Final = ShareConfig()
"""Share of a single engine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an engine, with no `auto` left."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    """Attention backend of torch, or `kernels` if they compute the attention."""
    cache: str
    threads: int
    page_size: int
    num_pages: int
    limits: ScheduleLimits
    kernels: str
    """Variant of the kernels that computes the model, or `torch`."""
    quantization: str
    """`none`, `int8`, `int4`, or the formats of the weights that the kernels compute with, such as `q4_k+q6_k`."""
    local: LocalLayers = NO_LOCAL_LAYERS
    """Layers that have parts of pages of their own."""
    why_torch: str = ""
    """Reason why the kernels cannot compute although flags and device ask for them; else empty."""
    context_flag: str = "--max-seq-len"
    """Flag that bounds the served context."""
    targets: Targets | None = None
    """Targets of steps, from which measured times make the number of prompt tokens. Then chunks differ from run to run,
    which must not change tokens. None: the limits decide."""
    drafts: str = ""
    """Whether `paying` tokens are drafted, or `all`; empty: none."""
    overlap: bool = False
    """Whether the next step is planned and launched before the tokens of the last one are known."""
    num_ranks: int = 1
    """Number of processes that compute the model together."""
    cpus: Set[int] = frozenset()
    """CPUs that the engine may use; empty: any."""
    graph: int = 0
    """Largest number of rows of a decode step that is recorded as a CUDA graph."""
    commit_interval_s: float = 0.0
    """Longest time that a step waits for the next ones, to be committed together."""
    deterministic: bool = False
    """Whether torch, too, computes the same bits for a row in any batch."""
    gpu_new: bool = False
    """Whether what no GPU has run yet is used."""
    fixed_products: bool = False
    """Whether the sums of products do not depend on the number of rows: where a GPU is deterministic with `gpu_new`."""
    gpu: str = ""
    """Name of the GPU, which chooses kernels, and version of FlashInfer if torch is deterministic; else empty."""
    by: str = ""
    """Library that computes the layers, and its version; empty: our own decoder."""
    rope: str = ""
    """`long` or `short` if the served context decides which divisors the rope has (LongRoPE); else empty."""
    fused: tuple[str, ...] = ()
    """Modules of FlashInfer that compute parts of the layers. The engine may find that it cannot use one."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a request gets the same tokens, bit for bit, in any batch."""
        return self.kernels != "torch" or self.deterministic

    @property
    def numerics(self) -> str:
        """Everything that may change a token although the weights are the same.

        With kernels: dtype/quantization/variant/version/page size/torch/sampler/llguidance. Engines with equal numerics
        compute equal bits. With torch alone: dtype/quantization/torch/attention/sampler/llguidance. These guarantee
        equal bits only if torch is deterministic; then the page size and the GPU are added. FlashInfer's operations in
        the layers add the names of their modules, and --gpu-new its version. LongRoPE adds whether it is long or short,
        several ranks their number at the end.
        """
        cpu = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")  # torch has code for each
        by_torch = f"torch-{torch.__version__}-{'cuda' if self.device.type == 'cuda' else cpu}"
        if self.kernels != "torch":
            by = f"{self.kernels}/{VERSION}/{self.page_size}/{by_torch}"
        else:
            by = "/".join(filter(None, (self.by, by_torch, self.attention)))
        parts = [str(self.dtype).removeprefix("torch."), self.quantization, by, f"sampler-{sampler.VERSION}"]
        parts.append(f"llguidance-{metadata.version('llguidance')}")  # its masks decide tokens
        if self.deterministic and self.kernels == "torch":
            how = "fixed" if self.fixed_products else BLOCK_ROWS
            parts.append(f"deterministic-{how}-pages-{self.page_size}-{self.gpu}")
        if self.fused:
            parts.append("-".join(("fused", str(fused.VERSION), *self.fused)))
        if self.gpu_new:
            parts.append(f"new-{operations.VERSION}")
        if self.rope:
            parts.append(f"rope-{self.rope}")
        if self.num_ranks > 1:
            parts.append(f"ranks-{self.num_ranks}")
        return "/".join(parts)

    @property
    def of_all_ranks(self) -> str:
        """Everything that must be the same on all ranks, but for the number of pages: ranks agree on that."""
        limits = self.limits
        local = f" local layers {astuple(self.local)}" if self.local.num_parts else ""
        return f"{self.numerics} page size {self.page_size} requests {limits.max_running_requests}{local}"

    def with_fused(self, modules: tuple[str, ...]) -> Settings:
        """Return the settings of an engine in which these modules of FlashInfer compute parts of the layers."""
        return replace(self, fused=modules)

    def with_pages(self, num_pages: int) -> Settings:
        """Return the settings of an engine with *num_pages* pages, at most as many as now."""
        context = min(self.limits.context, self.local.capacity(num_pages, self.page_size))
        flag = "--num-pages" if context < self.limits.context else self.context_flag
        limits = replace(self.limits, context=context)
        return replace(self, num_pages=num_pages, limits=limits, context_flag=flag)


def resolve(
    config: EngineConfig, spec: ModelSpec, rank: int = 0, *, ranks_here: int = 0, share: ShareConfig = WHOLE
) -> Settings:
    """Return the settings of an engine on this machine, or of one of its ranks.

    *ranks_here*: number of its ranks on this machine, which divide its threads and memory; 0: all. *share*: the
    engine's part of the machine's free resources.

    Raises:
        ConfigError: Flags, model and machine do not fit together.
    """
    check_flags(config)
    if spec.by == "transformers":
        config = for_transformers(config)
    ranks_here = ranks_here or config.tp
    device = resolve_device(config.device)
    cuda = device.type == "cuda"
    if cuda and config.tp > 1:
        device = _device_of(rank % ranks_here, ranks_here)
    if config.max_seq_len > spec.max_positions:
        raise ConfigError(
            f"--max-seq-len {config.max_seq_len}: the model knows {spec.max_positions} positions; pass at most that"
        )
    spec = spec.sharded(rank, config.tp, config.quantization)
    kernels, why_torch = resolve_kernels(config, device)
    quantization = resolve_quantization(config, spec, kernels)
    threads = resolve_threads(config, kernels, ranks_here, share)
    dtype = resolve_dtype(spec, config.dtype, slow_bfloat16=kernels == "torch" and not cuda and bfloat16_is_slow())
    page_size = config.page_size or (16 if cuda else 64)
    shape = attention_shape(spec, page_size, dtype, device, spec.kinds[0].window)
    attention = resolve_attention(config.attention, shape) if kernels == "torch" else "kernels"
    gpu_new = _gpu_new(config, device)
    fixed_products = gpu_new and config.deterministic and attention == "fi" and not spec.experts.layers
    wanted = config.max_seq_len or spec.max_positions
    limits = limits_of(config, spec, wanted, kernels, cuda=cuda)
    num_drafts = MANY_STREAMS * limits.most_drafts
    largest_step_bytes = 0
    if kernels != "torch":
        largest_step_bytes = step_bytes(
            spec,
            bfloat16=dtype == torch.bfloat16,
            quantization=quantization,
            variant=kernels,
            threads=threads,
            page_size=page_size,
            num_tokens=limits.max_prefill_length + config.max_running_requests + num_drafts,
            num_rows=config.max_running_requests + num_drafts,
            max_seq_len=wanted,
        )
    local = local_layers(spec, limits, page_size) if kernels != "torch" else NO_LOCAL_LAYERS
    num_pages = config.num_pages or num_pages_for(
        spec,
        page_size=page_size,
        max_running_requests=config.max_running_requests,
        max_seq_len=wanted,
        memory_ratio=config.memory_ratio,
        dtype=dtype,
        device=device,
        quantization=quantization,
        available_bytes=_available_bytes(device, share) // (1 if cuda else ranks_here),
        limit_bytes=CPU_LIMIT_BYTES // share.num_engines // ranks_here,
        step_bytes=largest_step_bytes,
        parts=spec.page_parts() if local.num_parts else (),
        local=local,
    )
    limits = replace(limits, context=min(wanted, local.capacity(num_pages, page_size)))
    return Settings(
        device=device,
        dtype=dtype,
        attention=attention,
        cache=config.cache,
        threads=threads,
        page_size=page_size,
        num_pages=num_pages,
        limits=limits,
        local=local,
        kernels=kernels,
        quantization=quantization,
        why_torch=why_torch,
        context_flag="--num-pages" if limits.context < wanted else "--max-seq-len",
        targets=resolve_targets(config, kernels, device),
        drafts=("paying" if config.speculate == "auto" else "all") if limits.most_drafts else "",
        overlap=cuda and config.tp == 1 if config.overlap == "auto" else config.overlap == "on",
        num_ranks=config.tp,
        cpus=frozenset() if cuda else _cpus(share),
        graph=resolve_graph(config, spec, attention, dtype, device, fixed_products=fixed_products),
        commit_interval_s=_commit_interval_ms(config, cuda=cuda) / 1000,
        deterministic=config.deterministic,
        gpu_new=gpu_new,
        fixed_products=fixed_products,
        gpu=_gpu(config, attention, device),
        by=f"transformers-{metadata.version('transformers')}" if spec.by == "transformers" else "",
        rope=spec.long_or_short(limits.context),
        fused=tuple(fused.MODULES)
        if attention in ("fi", "fa,fi") and (fixed_products or not config.deterministic)
        else (),
    )


def _gpu_new(config: EngineConfig, device: torch.device) -> bool:
    """Return whether `--gpu-new` is given. Raises ConfigError if there is nothing new here."""
    if config.gpu_new and device.type != "cuda":
        raise ConfigError("--gpu-new: this engine computes on a CPU; leave it out")
    if config.gpu_new and importlib.util.find_spec("triton") is None:
        raise ConfigError("--gpu-new: the package triton is missing, which comes with torch for CUDA; install it")
    if config.gpu_new and not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        raise ConfigError("--gpu-new: Triton needs a C compiler when it runs; install gcc, or leave it out")
    return config.gpu_new


def limits_of(config: EngineConfig, spec: ModelSpec, context: int, kernels: str, *, cuda: bool) -> ScheduleLimits:
    """Return the bounds of plans that serve *context* tokens. *kernels*: see `Settings`.

    Raises:
        ConfigError: Drafts would change tokens.
    """
    max_prefill_length = config.max_prefill_length or (8192 if cuda else 2048)
    limits = ScheduleLimits(
        context=context,
        max_prefill_length=max_prefill_length,
        mixed_prefill_length=config.mixed_prefill_length or min(512 if cuda else 16, max_prefill_length),
        mixed_prefill_per_request=0 if cuda or config.mixed_prefill_length else 2,
        max_running_requests=config.max_running_requests,
        vocab_size=spec.vocab_size,
    )
    return replace(limits, most_drafts=min(resolve_drafts(config, kernels), limits.largest_chunk - 1))


def resolve_drafts(config: EngineConfig, kernels: str) -> int:
    """Return the largest number of drafts that `--speculate` means.

    Raises:
        ConfigError: They would change tokens.
    """
    is_possible = kernels != "torch" or config.deterministic
    if config.speculate.isdigit() and not is_possible:
        raise ConfigError(
            f"--speculate {config.speculate}: with torch a token depends on the rows beside it, so drafts would change "
            "tokens; leave it out, or pass --deterministic"
        )
    return (
        int(config.speculate)
        if config.speculate.isdigit()
        else MOST_DRAFTS * (config.speculate == "auto" and is_possible)
    )


def local_layers(spec: ModelSpec, limits: ScheduleLimits, page_size: int) -> LocalLayers:
    """Return which layers have parts of pages of their own: none if a request of full length would need them all."""
    local = LocalLayers(len(spec.page_parts()) - 1, spec.window, limits.largest_chunk)
    num_pages = -(-limits.context // page_size)
    return local if 0 < local.num_at_once(num_pages, page_size) < num_pages else NO_LOCAL_LAYERS


def for_transformers(config: EngineConfig) -> EngineConfig:
    """Return the flags of an engine whose model transformers computes.

    Raises:
        ConfigError: One of them is only possible with our own decoder.
    """
    given = {
        f"--kernels {config.kernels}": config.kernels not in ("auto", "torch"),
        f"--quantization {config.quantization}": config.quantization in ROUNDED,
        f"--tp {config.tp}": config.tp > 1,
        "--deterministic": config.deterministic,
        f"--graph {config.graph}": config.graph > 0,
    }
    if wrong := [flag for flag, is_wrong in given.items() if is_wrong]:
        raise ConfigError(f"{wrong[0]}: transformers computes this model, which cannot do that; leave it out")
    return replace(config, kernels="torch", graph=0)


def resolve_targets(config: EngineConfig, kernels: str, device: torch.device) -> Targets | None:
    """Return the targets of steps; None: the limits decide how many prompt tokens a step has.

    Raises:
        ConfigError: `--target-itl` is given, and chunks that differ from run to run would change tokens.
    """
    if kernels == "torch" and not config.deterministic:
        if config.target_itl_ms:
            raise ConfigError(
                f"--target-itl {config.target_itl_ms}: with torch a token depends on the chunks of its prompt, so they "
                "cannot follow the clock; pass --mixed-prefill-length, or --deterministic"
            )
        return None
    if config.target_itl_ms:
        return Targets.exactly(config.target_itl_ms / 1000)
    if config.mixed_prefill_length:
        return None
    return ON_GPU if device.type == "cuda" else ON_CPU


def _commit_interval_ms(config: EngineConfig, *, cuda: bool) -> int:
    """Return the interval. It is long on a CPU, where the engine shares its cores with all that a commit wakes."""
    return config.commit_interval_ms if config.commit_interval_ms >= 0 else 2 if cuda else 25


def _device_of(local_rank: int, ranks_here: int) -> torch.device:
    """Return the GPU of a rank. Raise ConfigError if this machine has too few for its ranks."""
    if (count := torch.cuda.device_count()) < ranks_here:
        raise ConfigError(
            f"--tp: {ranks_here} ranks on this machine need {ranks_here} GPUs, but torch sees {count}; pass a smaller "
            "--tp, more machines (--nnodes), or --device cpu"
        )
    return torch.device("cuda", local_rank)


def _gpu(config: EngineConfig, attention: str, device: torch.device) -> str:
    """Return the GPU and the version of FlashInfer of a deterministic engine; empty: they change no token.

    Raises:
        ConfigError: An engine cannot be deterministic there.
    """
    if not config.deterministic or device.type != "cuda":
        return ""
    if attention not in DETERMINISTIC:
        raise ConfigError(
            f"--deterministic: attention by {attention} depends on the batch; pass --attn fi, or --attn torch"
        )
    if config.tp > 1:
        raise ConfigError(
            f"--deterministic with --tp {config.tp}: the ranks on GPUs add in an order that depends on the batch; "
            "leave one of them out"
        )
    name = "-".join(torch.cuda.get_device_name(device).lower().replace("/", "-").split())
    return f"{name}-flashinfer-{load_library().__version__}" if attention == "fi" else name


def _available_bytes(device: torch.device, share: ShareConfig) -> int:
    """Return the memory for an engine: its part of what was free before any engine started, or what is left of that."""
    free = available_memory_bytes(device)
    return min(free, (share.free_bytes or free) // share.num_engines)


def _cpus(share: ShareConfig) -> Set[int]:
    """Return the CPUs of the NUMA node that an engine must use; empty: it may use all."""
    every = usable_cpus()
    cpus, _ = cpus_of(share.engine, share.num_engines, every)
    return cpus if cpus != every else frozenset()


def resolve_threads(config: EngineConfig, kernels: str, ranks_here: int = 1, share: ShareConfig = WHOLE) -> int:
    """Return the number of threads that `--threads` means for each of the ranks on this machine.

    Raises:
        ConfigError: The kernels cannot use so many.
    """
    if kernels == "torch":
        return config.threads or default_threads(ranks_here, share)
    if config.threads > MOST_THREADS:
        raise ConfigError(
            f"--threads {config.threads}: the CPU kernels use at most {MOST_THREADS}; pass at most that, "
            "or --kernels torch"
        )
    return config.threads or min(default_threads(ranks_here, share), MOST_THREADS)


def default_threads(num_ranks: int = 1, share: ShareConfig = WHOLE) -> int:
    """Return the number of threads of a rank: its part of OMP_NUM_THREADS, or of all cores but one of every four.

    Several engines divide them, too. If there are several NUMA nodes, the engines of a node divide its cores.

    Of two cores a rank uses both: without the second core the engine would lose more than the other processes gain.
    """
    if "OMP_NUM_THREADS" in os.environ:
        first = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
        threads = int(first) if first.isdecimal() and int(first) else torch.get_num_threads()
        return max(1, threads // share.num_engines // num_ranks)
    cpus, num_sharing = cpus_of(share.engine, share.num_engines, usable_cpus())
    threads = _three_of_four(usable_cores(cpus)) // num_sharing
    if num_sharing < share.num_engines:  # a quota is for all nodes together
        threads = min(threads, _three_of_four(quota_cores()) // share.num_engines)
    return max(1, threads // num_ranks)


def _three_of_four(cores: int) -> int:
    return cores - cores // 4


def resolve_device(name: str) -> torch.device:
    """Return the device that `--device` means. Raise ConfigError if torch does not see it."""
    if name == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None:
            raise ConfigError(
                f"--device cuda: torch {torch.__version__} is built without CUDA; install its CUDA build, or pass "
                "--device cpu"
            )
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} (CUDA {torch.version.cuda}) finds no NVIDIA driver with a GPU; "
            "check nvidia-smi, give a container its GPUs (--gpus all), or pass --device cpu"
        )
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def resolve_kernels(config: EngineConfig, device: torch.device) -> tuple[str, str]:
    """Return the variant of the kernels that computes, or `torch` with the reason if it was not asked for.

    Raises:
        ConfigError: The flags contradict each other, or this machine lacks what they ask for.
    """
    variant, needing = variant_of(config), needing_kernels(config)
    if device.type == "cuda":
        if needing:
            raise ConfigError(f"{needing} is for CPUs, and this engine computes on a GPU; pass --device cpu")
        return "torch", ""
    if config.deterministic and not needing:
        needing = "--deterministic"
    if other := in_place_of_kernels(config):
        if needing:
            raise ConfigError(f"{needing} needs the CPU kernels; remove {other}")
        return "torch", ""
    usable = library.available()
    if needing and not usable:
        raise ConfigError(f"{needing} needs the CPU kernels, and none can run here ({library.reason()}); leave it out")
    return (variant or usable[0], "") if usable else ("torch", library.reason())


def resolve_quantization(config: EngineConfig, spec: ModelSpec, kernels: str) -> str:
    """Return the quantization that the kernels compute with. A GGUF file is widened for torch, and for float32.

    Raises:
        ConfigError: The file has a quantization of its own.
    """
    formats = "+".join(kind.lower() for kind in spec.blocks if BLOCKS[kind][1] > 1)
    if not formats:
        return "none" if config.quantization == "auto" else config.quantization
    if config.quantization != "auto":
        raise ConfigError(f"--quantization {config.quantization}: the weights are {formats} already; leave it out")
    widened = kernels == "torch" or config.dtype == "float32" or config.dummy_weight
    return "none" if widened else formats


def resolve_dtype(spec: ModelSpec, name: str, *, slow_bfloat16: bool = False) -> torch.dtype:
    """Return the dtype that `--dtype` means; auto is the checkpoint's, or float32 if narrower ones are slow."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name if name != "auto" else "float32" if slow_bfloat16 else spec.dtype]


def resolve_attention(name: str, shape: AttentionShape) -> str:
    """Return the backend that `--attn` means; auto is the fastest that can compute *shape* here.

    Raises:
        ConfigError: The backend cannot compute *shape* on this machine.
    """
    if name == "cpu" or (name == "auto" and shape.device.type == "cpu"):
        return "torch"
    if name not in ("auto", "fi", "fa,fi"):
        return name
    if not (reason := why_not(shape, "fa3" if name == "fa,fi" else "fa2")):
        return "fi" if name == "auto" else name
    if name != "auto":
        raise ConfigError(f"--attn {name}: FlashInfer cannot be used here: {reason}. Or pass --attn auto")
    logger.warning("attention_is_slow", attention="torch", reason=f"FlashInfer cannot be used here: {reason}")
    return "torch"


def resolve_graph(
    config: EngineConfig,
    spec: ModelSpec,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fixed_products: bool,
) -> int:
    """Return the largest number of rows of a decode step that is recorded as a CUDA graph; 0: none.

    Raises:
        ConfigError: `--graph` asks for more than is possible.
    """
    reason, remedy = "", "leave it out, or pass --graph 0"
    if attention not in ("fi", "fa,fi"):
        reason = "only --attn fi and fa,fi on CUDA can be recorded"
    elif config.deterministic and not fixed_products:
        reason = "--deterministic computes without graphs"
    elif config.tp > 1:
        reason = "several ranks (--tp) compute without graphs"
    elif len({kind.window for kind in spec.kinds}) > 1:
        reason = "layers of this model see different windows, and only one of them can be planned for a graph"
    elif spec.experts.layers and not can_group(dtype, device, spec.hidden_size, spec.experts.intermediate_size):
        reason = f"experts in {str(dtype).removeprefix('torch.')} wait for the device here, which cannot be recorded"
    elif config.graph > config.max_running_requests:
        reason = f"only {config.max_running_requests} requests run at once"
        remedy = "pass at most that, or raise --max-running-requests"
    if config.graph <= 0:
        return 0 if reason or config.graph == 0 else min(config.max_running_requests, MOST_GRAPH_ROWS)
    if reason:
        raise ConfigError(f"--graph {config.graph}: {reason}; {remedy}")
    return config.graph
