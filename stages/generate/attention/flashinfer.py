"""Attention in FlashInfer's paged kernels, on the pages as they lie. It compiles them at start, once for a machine.

Keys and values are given as a tuple: FlashInfer would split a single tensor on another dimension. One compiled module
serves prefill and decode, which here runs on tensor cores.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.attention.base import Attend, AttentionShape, places_of, write_pages
from stages.generate.forward.batch import ForwardBatch

# T = packed tokens, H = query heads, K = kv heads, D = head dim, P = pages, S = slots of a page, B = rows, N = pages

DTYPES: Final = (torch.bfloat16, torch.float16)
HEAD_DIMS: Final = (64, 128, 256)
LEAST_VERSION: Final = (0, 6, 13)
LEAST_CAPABILITY: Final = (8, 0)
WORKSPACE_BYTES: Final = 256 * 2**20
ERROR_CHARS: Final = 800
"""Of the end of what a compiler printed."""

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Indices:
    """The rows of a batch and their pages as FlashInfer wants them: int32 on the host."""

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class FlashInferAttention:
    """See `Attention`. Its rounding depends on the batch: FlashInfer splits long rows over idle multiprocessors."""

    def __init__(self, shape: AttentionShape) -> None:
        """Compile the kernels, where that has not been done before.

        Raises:
            ConfigError: They cannot be compiled.
        """
        self._shape = shape
        library = load_library()
        compile_kernels(library, shape)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._decode, self._prefill = decode_wrapper(library, workspace), prefill_wrapper(library, workspace)

    def plan(self, batch: ForwardBatch) -> Attend:
        """Let FlashInfer divide the work. A step with a chunk is one prefill, in which decode rows are short chunks."""
        indices = indices_of(batch, self._shape.page_size)
        only_decode = batch.num_decode_rows == len(batch.seq_lens)
        wrapper = self._decode if only_decode else self._prefill
        (plan_decode if only_decode else plan_prefill)(wrapper, self._shape, indices)
        places = places_of(batch.slots_T, self._shape.page_size)

        def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv_2PKSD: Tensor) -> Tensor:
            write_pages(kv_2PKSD, k_TKD, v_TKD, places)
            o_THD: Tensor = wrapper.run(q_THD.contiguous(), (kv_2PKSD[0], kv_2PKSD[1]))
            return o_THD

        return attend


# the calls of FlashInfer


def decode_wrapper(library: Any, workspace: Tensor, **graph: Any) -> Any:
    """Return FlashInfer's object for decode rows. *graph* is what it needs in a CUDA graph."""
    return library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout="HND", use_tensor_cores=True, backend="fa2", **graph
    )


def prefill_wrapper(library: Any, workspace: Tensor) -> Any:
    """Return FlashInfer's object for chunks."""
    return library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend="fa2")


def indices_of(batch: ForwardBatch, page_size: int) -> Indices:
    """Return the rows of *batch* and their pages as FlashInfer wants them. Waits for the device, which is idle then."""
    lengths_B = torch.tensor(batch.seq_lens, dtype=torch.int32)
    counts_B = (lengths_B + page_size - 1) // page_size
    table_BN = batch.page_table_BN.cpu()
    return Indices(
        torch.tensor(batch.query_starts, dtype=torch.int32),
        torch.nn.functional.pad(counts_B.cumsum(0, dtype=torch.int32), (1, 0)),
        table_BN[torch.arange(table_BN.shape[1]) < counts_B[:, None]],
        (lengths_B - 1) % page_size + 1,
    )


def plan_decode(wrapper: Any, shape: AttentionShape, indices: Indices) -> None:
    """Plan a step of decode rows."""
    wrapper.plan(indices.indptr, indices.indices, indices.last_page_len, *numbers(shape), **options(shape))


def plan_prefill(wrapper: Any, shape: AttentionShape, indices: Indices) -> None:
    """Plan a step with chunks."""
    wrapper.plan(
        indices.qo_indptr,
        indices.indptr,
        indices.indices,
        indices.last_page_len,
        *numbers(shape),
        causal=True,
        max_token_per_sequence=int(indices.qo_indptr.diff().max()),  # it would look for it in Python
        **options(shape),
    )


def numbers(shape: AttentionShape) -> tuple[int, int, int, int]:
    """Return the arguments of every plan that are numbers, in their order."""
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


def options(shape: AttentionShape) -> dict[str, Any]:
    """Return the arguments that every plan takes by name. Without a dtype a plan would take float16."""
    return {
        "window_left": shape.window - 1,
        "sm_scale": shape.head_dim**-0.5,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }


# what must be here


def why_not(shape: AttentionShape) -> str:
    """Return why FlashInfer cannot compute *shape* on this machine, and what it needs; nothing if it can."""
    if shape.device.type != "cuda":
        return "it computes on CUDA devices only"
    if shape.dtype not in DTYPES:
        return f"the dtype is {_name(shape.dtype)}, and it computes in {' and '.join(map(_name, DTYPES))}"
    if shape.head_dim not in HEAD_DIMS:
        return f"the model's head_dim is {shape.head_dim}, and it supports {', '.join(map(str, HEAD_DIMS))}"
    if (capability := torch.cuda.get_device_capability(shape.device)) < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and it needs 8.0 or newer"
    try:
        load_library()
    except ConfigError as error:
        return str(error)
    missing = " and ".join(name for name, path in tools().items() if path is None)
    if missing and importlib.util.find_spec("flashinfer_jit_cache") is None:
        return f"{missing} not found, and it compiles its kernels: install {missing}, or flashinfer-jit-cache"
    return ""


def load_library() -> Any:
    """Import FlashInfer.

    Raises:
        ConfigError: It cannot be imported, or is too old.
    """
    try:
        library = importlib.import_module("flashinfer")
    except Exception as error:  # an old driver or another version of a dependency raises what it likes
        text = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS]
        raise ConfigError(f"flashinfer cannot be imported ({text}): pip install 'minisgl[cuda]'") from error
    seen = tuple(map(int, re.findall(r"\d+", library.__version__)[:3]))
    if seen < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(f"flashinfer is {library.__version__}, and {least} or newer is needed: upgrade it")
    return library


def kernels_of(library: Any, shape: AttentionShape) -> Any:
    """Return FlashInfer's description of the kernels for *shape*, with which it compiles and finds them."""
    return library.jit.gen_batch_prefill_module(
        "fa2",
        shape.dtype,
        shape.dtype,
        shape.dtype,
        torch.int32,
        shape.head_dim,
        shape.head_dim,
        0,  # no position encoding
        shape.window > 0,
        False,  # no soft cap of the logits
        False,  # no sums in float16
    )


def compile_kernels(library: Any, shape: AttentionShape) -> None:
    """Compile the kernels for *shape* unless they are in FlashInfer's cache, and load them.

    Raises:
        ConfigError: They do not compile.
    """
    tools()
    try:
        kernels = kernels_of(library, shape)
        if not kernels.is_compiled:
            logger.info("attention_kernels_compile", kernels=kernels.name, detail="takes about half a minute, once")
        kernels.build_and_load()
    except Exception as error:
        raise ConfigError(
            f"--attn fi: FlashInfer's kernels do not compile; mend the compiler, or pass --attn reference, which is "
            f"slow. The compiler says: {str(error)[-ERROR_CHARS:].strip()}"
        ) from error


def tools() -> dict[str, str | None]:
    """Return where nvcc and ninja are, None for what is missing. FlashInfer finds them in the same places afterwards.

    It calls ninja by name, so the folder joins PATH: ninja may lie beside this Python, or beside its modules.
    """
    folders = [Path(sys.executable).parent, *(Path(entry) / "bin" for entry in sys.path)]
    if shutil.which("ninja") is None and (found := [str(at) for at in folders if (at / "ninja").is_file()]):
        os.environ["PATH"] = os.pathsep.join((*found, os.environ.get("PATH", "")))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    paths = [f"{home}/bin"] if home else [None, "/usr/local/cuda/bin"]
    nvcc = next(filter(None, (shutil.which("nvcc", path=path) for path in paths)), None)
    return {"nvcc": nvcc, "ninja": shutil.which("ninja")}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
