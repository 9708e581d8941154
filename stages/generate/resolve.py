"""The one place where `auto` becomes a value, from the engine's config, the model and the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

import structlog
import torch

from pipeline.errors import ConfigError
from stages.generate.attention import AttentionShape
from stages.generate.attention.flashinfer import why_not
from stages.generate.config import EngineConfig
from stages.generate.kernels import VERSION, library
from stages.generate.kvcache.pool import available_memory_bytes, num_pages_for
from stages.generate.machine import bfloat16_is_slow, usable_cores, usable_cpus
from stages.generate.model.spec import ModelSpec
from stages.generate.schedule.schedule import ScheduleLimits

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an engine, with no `auto` left."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    """The backend of torch, or `kernels`: their own."""
    cache: str
    threads: int
    page_size: int
    num_pages: int
    limits: ScheduleLimits
    kernels: str
    """The variant of the kernels that computes the model, or `torch`."""
    quantization: str
    """`none`, or `int8`."""
    why_torch: str = ""
    """The reason why no kernels can compute, where flags and device ask for them."""
    context_flag: str = "--max-seq-len"
    """The flag that bounds the served context."""
    mixed_prefill_is_auto: bool = False

    @property
    def paced(self) -> bool:
        """Whether measured times decide how many prompt tokens come beside streams. Chunks differ from run to run then,
        and must not change tokens.
        """
        return self.batch_invariant and self.mixed_prefill_is_auto

    @property
    def batch_invariant(self) -> bool:
        """Whether a request gets the same tokens, bit for bit, whatever is computed beside it."""
        return self.kernels != "torch"

    @property
    def numerics(self) -> str:
        """Name everything that may change a token although the weights are the same.

        With kernels: dtype/quantization/variant/version/page size/torch, which samples. Engines with equal ones compute
        equal bits. With torch alone: dtype/quantization/torch/attention, which is no promise.
        """
        cpu = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")  # torch has code for each
        by_torch = f"torch-{torch.__version__}-{'cuda' if self.device.type == 'cuda' else cpu}"
        if self.batch_invariant:
            by = f"{self.kernels}/{VERSION}/{self.page_size}/{by_torch}"
        else:
            by = f"{by_torch}/{self.attention}"
        return f"{str(self.dtype).removeprefix('torch.')}/{self.quantization}/{by}"


def resolve(config: EngineConfig, spec: ModelSpec) -> Settings:
    """Return the settings of an engine on this machine.

    Raises:
        ConfigError: Flags, model and machine do not fit together.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; install its CUDA build, or pass --device cpu")
    device = resolve_device(config.device)
    cuda = device.type == "cuda"
    kernels, why_torch = resolve_kernels(config, device)
    dtype = resolve_dtype(spec, config.dtype, slow_bfloat16=kernels == "torch" and not cuda and bfloat16_is_slow())
    if config.max_seq_len > spec.max_positions:
        raise ConfigError(
            f"--max-seq-len {config.max_seq_len}: the model knows {spec.max_positions} positions; pass at most that"
        )
    if config.num_pages and config.memory_ratio != EngineConfig().memory_ratio:
        raise ConfigError(
            f"--num-pages {config.num_pages} and --memory-ratio {config.memory_ratio} both say how large the cache is; "
            "pass one of them"
        )
    page_size = config.page_size or (16 if cuda else 64)
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, spec.window, dtype, device)
    attention = resolve_attention(config.attention, shape) if kernels == "torch" else "kernels"
    wanted = config.max_seq_len or spec.max_positions
    num_pages = config.num_pages or num_pages_for(
        spec,
        page_size=page_size,
        max_running_requests=config.max_running_requests,
        max_seq_len=wanted,
        memory_ratio=config.memory_ratio,
        dtype=dtype,
        device=device,
        quantization=config.quantization,
        available_bytes=available_memory_bytes(device),
    )
    max_prefill_length = config.max_prefill_length or (8192 if cuda else 2048)
    limits = ScheduleLimits(
        context=min(wanted, num_pages * page_size),
        max_prefill_length=max_prefill_length,
        mixed_prefill_length=config.mixed_prefill_length or min(512 if cuda else 16, max_prefill_length),
        mixed_prefill_per_request=0 if cuda or config.mixed_prefill_length else 2,
        max_running_requests=config.max_running_requests,
        vocab_size=spec.vocab_size,
    )
    return Settings(
        device=device,
        dtype=dtype,
        attention=attention,
        cache=config.cache,
        threads=config.threads or default_threads(),
        page_size=page_size,
        num_pages=num_pages,
        limits=limits,
        kernels=kernels,
        quantization=config.quantization,
        why_torch=why_torch,
        context_flag="--num-pages" if num_pages * page_size < wanted else "--max-seq-len",
        mixed_prefill_is_auto=not config.mixed_prefill_length,
    )


def default_threads() -> int:
    """Return how many threads an engine uses: OMP_NUM_THREADS, or all cores but one of every four.

    Of two cores it uses both: the engine would lose more without the second one than the other processes need of it.
    """
    if "OMP_NUM_THREADS" in os.environ:
        first = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
        return int(first) if first.isdecimal() and int(first) else torch.get_num_threads()
    cores = usable_cores(usable_cpus())
    return cores - cores // 4


def resolve_device(name: str) -> torch.device:
    """Return the device that `--device` means."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def resolve_kernels(config: EngineConfig, device: torch.device) -> tuple[str, str]:
    """Return the variant of the kernels that computes, or `torch`, and why torch if no flag and no device says so.

    Raises:
        ConfigError: The flags contradict each other, or this machine lacks what they ask for.
    """
    variant = "" if config.kernels in ("auto", "torch") else config.kernels
    needing = variant and f"--kernels {variant}"
    if config.quantization != "none":
        needing = f"--quantization {config.quantization}"
    if device.type == "cuda":
        if needing:
            raise ConfigError(f"{needing} is for CPUs, and this engine computes on a GPU; pass --device cpu")
        return "torch", ""
    if config.kernels == "torch" or config.attention != "auto":
        if needing:
            given = "--kernels torch" if config.kernels == "torch" else f"--attn {config.attention}"
            raise ConfigError(
                f"{needing} needs the CPU kernels, but with {given} torch computes; leave one of them out"
            )
        return "torch", ""
    usable = library.available()
    if variant and variant not in usable:
        reason = library.reason(variant)
        raise ConfigError(f"--kernels {variant}: these kernels cannot run here: {reason}; pass --kernels auto")
    if needing and not usable:
        raise ConfigError(f"{needing} needs the CPU kernels, and none can run here ({library.reason()}); leave it out")
    return (variant or usable[0], "") if usable else ("torch", library.reason())


def resolve_dtype(spec: ModelSpec, name: str, *, slow_bfloat16: bool = False) -> torch.dtype:
    """Return the dtype that `--dtype` means; auto is the checkpoint's, or float32 if narrower ones are slow."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name if name != "auto" else "float32" if slow_bfloat16 else spec.dtype]


def resolve_attention(name: str, shape: AttentionShape) -> str:
    """Return the backend that `--attn` means; auto is the fastest that can compute *shape* here.

    Raises:
        ConfigError: The backend cannot compute *shape* on this machine.
    """
    cuda = shape.device.type == "cuda"
    if name == "cpu" and cuda:
        raise ConfigError("--attn cpu computes on a CPU; leave it out, or pass --device cpu")
    if name == "auto" and not cuda:
        return "cpu"
    if name not in ("auto", "fi"):
        return name
    if not (reason := why_not(shape)):
        return "fi"
    if name == "fi":
        raise ConfigError(f"--attn fi: FlashInfer cannot be used here: {reason}. Or pass --attn auto")
    logger.warning("attention_is_slow", attention="reference", reason=f"FlashInfer cannot be used here: {reason}")
    return "reference"
