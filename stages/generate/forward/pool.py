"""The memory of the KV cache: one tensor, and how many pages it may have. Does not know which request owns a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.kvcache.base import NO_LOCAL_LAYERS, LocalLayers
from stages.generate.machine import free_memory_bytes
from stages.generate.model.checkpoint import EMBEDDING, HEAD
from stages.generate.model.gguf import BLOCKS
from stages.generate.model.spec import ROUNDED, ModelSpec, tensor_shapes

# L = layers of a part of a page, 2 = keys and values, P = parts of all pages, K = kv heads, S = slots of a page,
# D = head dim

GIB: Final = 2**30
CPU_LIMIT_BYTES: Final = 4 * GIB  # a CPU's memory is shared with other programs; `--num-pages` asks for more
PACKED_BYTES: Final = {"Q5_0": 34, "Q5_1": 36, "Q4_K": 148, "Q5_K": 276, "Q6_K": 276}
"""Bytes of a packed block, where they are not those of the file."""
Parts: TypeAlias = Sequence[Sequence[int]]
"""Layers of each part of a page."""
INT8_BYTES: Final = 1 + 2 / 32  # of one weight of a matrix: every 32 share a scale of two bytes
INT4_BYTES: Final = 1 / 2 + 4 / 32  # and 4 bytes for scale and zero


def allocate(
    spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, parts: Parts = ()
) -> Tensor:
    """Return kv_L2PKSD, uninitialised: slots that were never written may be NaN and must not be read. *parts*:
    `ModelSpec.page_parts`; by default one has all layers.
    """
    num_layers = len(parts[0]) if parts else spec.num_layers
    shape = (num_layers, 2, num_pages * max(len(parts), 1), spec.num_kv_heads, page_size, spec.head_dim)
    return torch.empty(shape, dtype=dtype, device=device)


def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype, parts: Parts = ()) -> int:
    """Return the bytes of one page in all layers."""
    num_layers = len(parts) * len(parts[0]) if parts else spec.num_layers
    return 2 * num_layers * spec.num_kv_heads * page_size * spec.head_dim * dtype.itemsize


def weights_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: str = "none") -> int:
    """Return the bytes of the weights in memory; with int8 and int4, tied embeddings are there twice."""
    if spec.by == "transformers":
        return spec.num_weights * dtype.itemsize
    shapes = tensor_shapes(spec)
    if quantization not in ("none", *ROUNDED):
        sizes = (size / BLOCKS[kind][2] * PACKED_BYTES.get(kind, BLOCKS[kind][2]) for kind, size in spec.blocks.items())
        return int(sum(sizes)) // spec.num_ranks
    if quantization == "none":
        return sum(map(math.prod, shapes.values())) * dtype.itemsize
    shapes.setdefault(HEAD, shapes[EMBEDDING])
    matrices = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != EMBEDDING)
    others = sum(map(math.prod, shapes.values())) - matrices
    head = math.prod(shapes[HEAD]) if quantization == "int4" else matrices
    return int(head * INT8_BYTES + (matrices - head) * INT4_BYTES) + others * dtype.itemsize


def num_pages_for(
    spec: ModelSpec,
    *,
    page_size: int,
    dtype: torch.dtype,
    max_running_requests: int,
    max_seq_len: int,
    memory_ratio: float,
    available_bytes: int,
    device: torch.device,
    quantization: str = "none",
    step_bytes: int = 0,
    limit_bytes: int = CPU_LIMIT_BYTES,
    parts: Parts = (),
    local: LocalLayers = NO_LOCAL_LAYERS,
) -> int:
    """Return enough pages for all requests at full length, or as many as fit into memory beside the weights.

    *available_bytes*: the memory that is free before the weights are loaded (`available_memory_bytes`). *step_bytes*:
    what the largest step needs of it. *limit_bytes*: the most that the pages may take on a CPU.

    Raises:
        ConfigError: Not one page fits.
    """
    weight_bytes = weights_bytes(spec, dtype, quantization)
    budget_bytes = int(available_bytes * memory_ratio) - weight_bytes - step_bytes
    if device.type == "cpu":
        budget_bytes = min(budget_bytes, limit_bytes)
    one_page_bytes = page_bytes(spec, page_size, dtype, parts)
    if budget_bytes < one_page_bytes:
        raise ConfigError(
            f"{available_bytes / GIB:.2f} GiB of memory is free, the weights take {weight_bytes / GIB:.2f}, a step"
            f" {step_bytes / GIB:.2f} and a page {one_page_bytes / GIB:.4f}: no page fits; free memory, raise"
            " --memory-ratio, lower --max-prefill-length or take a smaller model"
        )
    whole_pages = local.whole_pages(-(-max_seq_len // page_size), page_size)
    return min(max_running_requests * whole_pages, budget_bytes // one_page_bytes)


def available_memory_bytes(device: torch.device) -> int:
    """Return the memory that is free now: on the GPU, or in this machine and container."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()
