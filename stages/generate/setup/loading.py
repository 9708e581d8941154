"""Loads an engine, or one of its ranks, as resolved settings say, and logs how it computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from stages.generate.collectives import ALONE, Collectives
from stages.generate.forward.engine import Engine
from stages.generate.kernels import library
from stages.generate.kernels.probe import faster_than
from stages.generate.model.spec import ModelSpec
from stages.generate.setup.config import GenerateConfig
from stages.generate.setup.resolve import Settings

logger = structlog.get_logger()


def load_engine(
    config: GenerateConfig,
    spec: ModelSpec,
    folder: Path,
    settings: Settings,
    report: Callable[[float], None],
    collectives: Collectives = ALONE,
) -> Engine:
    """Load the model, or a rank's part of it, and log how it computes."""
    dtype = str(settings.dtype).removeprefix("torch.")
    if settings.why_torch:
        logger.info("kernels_unavailable", reason=settings.why_torch)
    if config.engine.dtype == "auto" and dtype != spec.dtype:
        reason = f"torch multiplies {spec.dtype} slowly on this CPU; --dtype {spec.dtype} takes half the memory"
        logger.info("dtype_is_float32", reason=reason)
    if spec.block > 1 and settings.quantization == "none" and not config.engine.dummy_weight:
        asked = "--dtype float32" if config.engine.dtype == "float32" else ""
        logger.info("weights_are_widened", dtype=dtype, reason=asked or "only the CPU kernels compute with blocks")
    if settings.cpus:
        os.sched_setaffinity(0, settings.cpus)  # this thread, and all that it starts
    measures = settings.device.type == "cuda" and not config.engine.num_pages
    measures = measures and settings.num_ranks == 1  # several have agreed on a number of pages
    began_s = time.monotonic()
    engine = Engine(
        spec,
        folder,
        device=settings.device,
        dtype=settings.dtype,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        max_running_requests=settings.limits.max_running_requests,
        max_seq_len=settings.limits.context,
        attention=settings.attention,
        kernels=settings.kernels,
        quantization=settings.quantization,
        threads=settings.threads,
        graph=settings.graph,
        needs_graph=config.engine.graph > 0,
        deterministic=settings.deterministic,
        gpu_new=settings.gpu_new,
        max_prefill_length=settings.limits.max_prefill_length,
        most_drafts=settings.limits.most_drafts,
        fixed_products=settings.fixed_products,
        has_parts=settings.local.num_parts > 0,
        memory_ratio=config.engine.memory_ratio if measures else None,
        loading=config.engine.loading,
        collectives=collectives,
        progress=lambda done_bytes, total_bytes: report(done_bytes / max(total_bytes, 1)),
    )
    if measures:
        settings = settings.with_pages(engine.num_pages)
    settings = settings.with_fused(engine.fused)
    if config.engine.kernels == "auto" and dtype == "bfloat16":
        _warn_if_slow(settings.kernels)
    logger.debug(
        "engine_loaded",
        seconds=round(time.monotonic() - began_s, 2),
        architecture=spec.architecture,
        device=settings.device,
        dtype=dtype,
        quantization=settings.quantization,
        kernels=settings.kernels,
        attention=settings.attention,
        cache=settings.cache,
        pages=settings.num_pages,
        page_size=settings.page_size,
        context=settings.limits.context,
        threads=settings.threads,
        overlap=settings.overlap,
        graph=engine.graph,
        batch_invariant=settings.batch_invariant,
        numerics=settings.numerics,
        **_heads_of(spec, settings),
    )
    return engine


def _warn_if_slow(kernels: str) -> None:
    """Log a warning if another variant of AVX-512 is much faster here than the chosen one."""
    variants = [name for name in library.available() if name.startswith("avx512")]
    if kernels in variants and (faster := faster_than(kernels, variants)):
        remedy = f"pass --kernels {faster} to all engines of the namespace, and please report the CPU"
        logger.warning("kernels_seem_slow", chosen=kernels, faster=faster, remedy=remedy)


def _heads_of(spec: ModelSpec, settings: Settings) -> dict[str, int]:
    """Return the fields of the log line "engine_loaded" about ranks; none if there is a single rank."""
    num_ranks = settings.num_ranks
    if num_ranks == 1:
        return {}
    kept = spec.sharded(0, num_ranks).num_kv_heads
    copies = kept * num_ranks - spec.num_kv_heads
    return {"ranks": num_ranks, "kv_heads_of_a_rank": kept, "kv_heads_copied": copies}
