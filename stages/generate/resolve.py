"""The one place where `auto` becomes a value, from the engine's config, the model and the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from pipeline.errors import ConfigError
from stages.generate.attention import AttentionShape
from stages.generate.attention.flashinfer import why_not
from stages.generate.config import EngineConfig
from stages.generate.kvcache.pool import available_memory_bytes, num_pages_for
from stages.generate.model.spec import ModelSpec
from stages.generate.schedule.schedule import ScheduleLimits

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an engine, with no `auto` left."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    cache: str
    threads: int
    page_size: int
    num_pages: int
    limits: ScheduleLimits
    context_flag: str = "--max-seq-len"
    """The flag that bounds the served context."""
    mixed_prefill_is_auto: bool = False

    @property
    def batch_invariant(self) -> bool:
        """Whether tokens do not depend on the other rows of a step, nor on the chunks of a prompt."""
        return False

    @property
    def paced(self) -> bool:
        """Whether measured times decide how many prompt tokens come beside streams. Chunks differ from run to run then,
        and must not change tokens.
        """
        return self.batch_invariant and self.mixed_prefill_is_auto

    @property
    def numerics(self) -> str:
        """Name everything that may change a token although the weights are the same.

        Add here what will: quantization, kernels, the page size where they depend on it, ranks.
        """
        return f"{str(self.dtype).removeprefix('torch.')}/{self.device.type}"


def resolve(config: EngineConfig, spec: ModelSpec) -> Settings:
    """Return the settings of an engine on this machine.

    Raises:
        ConfigError: Flags, model and machine do not fit together.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; install its CUDA build, or pass --device cpu")
    device, dtype = resolve_device(config.device), resolve_dtype(spec, config.dtype)
    cuda = device.type == "cuda"
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
    attention = resolve_attention(
        config.attention,
        AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, spec.window, dtype, device),
    )
    wanted = config.max_seq_len or spec.max_positions
    num_pages = config.num_pages or num_pages_for(
        spec,
        page_size=page_size,
        max_running_requests=config.max_running_requests,
        max_seq_len=wanted,
        memory_ratio=config.memory_ratio,
        dtype=dtype,
        device=device,
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
        context_flag="--num-pages" if num_pages * page_size < wanted else "--max-seq-len",
        mixed_prefill_is_auto=not config.mixed_prefill_length,
    )


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, and in a container its quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def default_threads() -> int:
    """Return how many threads an engine uses: OMP_NUM_THREADS, or all cores but one of every four.

    Of two cores it uses both: the engine would lose more without the second one than the other processes need of it.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()  # which has understood it
    cores = available_cores()
    return cores - cores // 4


def resolve_device(name: str) -> torch.device:
    """Return the device that `--device` means."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def resolve_dtype(spec: ModelSpec, name: str) -> torch.dtype:
    """Return the dtype that `--dtype` means; auto is the checkpoint's."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[spec.dtype if name == "auto" else name]


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
