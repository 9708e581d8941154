"""Number of pages that fit on a GPU, measured with the largest steps once the weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import torch

from pipeline.errors import ConfigError
from pipeline.events import SamplingParams
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

MIB: Final = 2**20
REMEDY: Final = (
    "lower --max-prefill-length or --max-running-requests, pass --graph 0, free memory or take a smaller model"
)
DRAWN: Final = SamplingParams(temperature=1.0, top_p=0.5)
"""Parameters with which drawing takes the most memory, if a token is forbidden, too."""

logger = structlog.get_logger()


def largest_prefill(num_tokens: int, page_size: int) -> BatchPlan:
    """Return a step with one chunk, on the first pages."""
    pages = tuple(range(-(-num_tokens // page_size)))
    return BatchPlan(0, (PlanRow(0, 0, (0,) * num_tokens, pages, 0, Sample(DRAWN, num_tokens, (0,))),), 0)


def largest_decode(num_rows: int) -> BatchPlan:
    """Return a step of decode rows, all on the first page."""
    rows = tuple(PlanRow(row, 0, (0,), (0,), 0, Sample(DRAWN, 1, (0,))) for row in range(num_rows))
    return BatchPlan(0, rows, num_rows)


def bytes_of_a_step(step: Callable[[], object], device: torch.device) -> int:
    """Compute a step; return the bytes that it takes beside what stays allocated after it.

    Raises:
        ConfigError: There is not enough memory for it.
    """
    torch.cuda.reset_peak_memory_stats(device)
    try:
        step()
    except torch.OutOfMemoryError as error:
        text = str(error).partition(" If reserved but")[0]
        raise ConfigError(f"the largest step does not fit beside the weights ({text}): {REMEDY}") from error
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def fitting_pages(
    memory_ratio: float, page_bytes: int, *, step_bytes: int, graph_bytes: int, device: torch.device
) -> int:
    """Return how many pages fit beside the largest step, and recordings, which have memory of their own.

    Raises:
        ConfigError: Not one page fits.
    """
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    num_pages = int((free_bytes - step_bytes - graph_bytes) * memory_ratio) // page_bytes
    sizes = {
        "memory": total_bytes,
        "free": free_bytes,
        "step": step_bytes,
        "graphs": graph_bytes,
        "page": page_bytes,
    }
    in_mib = {f"{name}_mib": round(size / MIB, 1) for name, size in sizes.items()}
    if num_pages < 1:
        raise ConfigError(
            f"of {in_mib['memory_mib']:.0f} MiB of GPU memory {in_mib['free_mib']} are free beside the weights; the "
            f"largest step takes {in_mib['step_mib']}, CUDA graphs {in_mib['graphs_mib']} and a page "
            f"{in_mib['page_mib']}: no page fits; {REMEDY}"
        )
    logger.info("memory_measured", pages=num_pages, **in_mib)
    return num_pages
