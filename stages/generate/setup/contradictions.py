"""Refuses flags of an engine that contradict each other, or that this CPU cannot honour. Knows no model and no device.

It imports no torch, so `serve` can call it before it starts anything. `resolve` has the checks that need more.
"""

from __future__ import annotations

from typing import Final

from pipeline.errors import ConfigError
from stages.generate.kernels import library
from stages.generate.model.spec import ROUNDED
from stages.generate.setup.config import EngineConfig

MOST_COMMIT_INTERVAL_MS: Final = 1000
"""Largest commit interval: while steps wait, the log thread learns of no new request."""


def check_flags(config: EngineConfig) -> None:
    """Raise ConfigError if the flags cannot work together, or not on this CPU."""
    if config.num_pages and config.memory_ratio != EngineConfig().memory_ratio:
        raise ConfigError(
            f"--num-pages {config.num_pages} and --memory-ratio {config.memory_ratio} both say how large the cache is; "
            "pass one of them"
        )
    if config.target_itl_ms and config.mixed_prefill_length:
        raise ConfigError(
            f"--target-itl {config.target_itl_ms} and --mixed-prefill-length {config.mixed_prefill_length} both limit "
            "the prompt tokens of a step; pass one of them"
        )
    if config.commit_interval_ms > MOST_COMMIT_INTERVAL_MS:
        raise ConfigError(
            f"--commit-interval {config.commit_interval_ms}: tokens of streams may wait for at most "
            f"{MOST_COMMIT_INTERVAL_MS} ms; pass at most that"
        )
    needing, other = needing_kernels(config), in_place_of_kernels(config)
    if needing and other:
        raise ConfigError(f"{needing} needs the CPU kernels; remove {other}")
    variant = variant_of(config)
    if variant and variant not in library.available():
        reason = library.reason(variant)
        raise ConfigError(f"--kernels {variant}: these kernels cannot run here: {reason}; pass --kernels auto")


def variant_of(config: EngineConfig) -> str:
    """Return the variant of the kernels that `--kernels` names; empty: none."""
    return "" if config.kernels in ("auto", "torch") else config.kernels


def needing_kernels(config: EngineConfig) -> str:
    """Return the flag that requires the CPU kernels on every device; empty: none does."""
    if config.quantization in ROUNDED:
        return f"--quantization {config.quantization}"
    variant = variant_of(config)
    return f"--kernels {variant}" if variant else ""


def in_place_of_kernels(config: EngineConfig) -> str:
    """Return the flag that makes torch compute on a CPU; empty: none."""
    if config.kernels == "torch":
        return "--kernels torch"
    return f"--attn {config.attention}" if config.attention != "auto" else ""
