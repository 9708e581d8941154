"""Attention in FlashInfer's paged kernels, directly on the pages. It compiles them at start, once for a machine.

Keys and values are passed as a tuple: FlashInfer would split a single tensor on another dimension. One compiled module
serves prefill and decode, which here runs on tensor cores.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import structlog
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.attention import fused
from stages.generate.batch import ForwardBatch, HostBatch, seen_by_tokens
from stages.generate.model.attention import Attend, AttentionShape

# T = packed tokens, H = query heads, K = kv heads, D = head dim, P = pages, S = slots of a page, B = rows,
# N = pages of a row, R = rows with those that pad, X = several arrays, one after the other

DTYPES: Final = (torch.bfloat16, torch.float16)
HEAD_DIMS: Final = (64, 128, 256)
LEAST_VERSION: Final = (0, 6, 13)
LEAST_CAPABILITY: Final = (8, 0)
FA3_CAPABILITY: Final = 9
WORKSPACE_BYTES: Final = 256 * 2**20
"""Bytes for parts of rows that were split, before they are combined. The workspace grows if that is too little."""
DECODE_BYTES: Final = 2**20
PREFILL_BYTES: Final = 8 * 2**20
"""Bytes for plans. They grow, too."""
TOO_SMALL: Final = "Increase the workspace buffer size"
"""FlashInfer's message, in `allocator.h`."""
NUM_SENT: Final = 4
"""Number of arrays of `Indices`, the first ones, that are copied to the device."""
ALIGNMENT: Final = 64
"""Alignment in numbers: 256 bytes, as torch aligns what it allocates."""
PROGRESS_S: Final = 5.0
ERROR_CHARS: Final = 800
"""Largest length of the end of a compiler's output in an error."""

logger = structlog.get_logger()

Run: TypeAlias = Callable[..., Tensor]
"""(q_THD, keys and values of a layer's pages, where to write o_THD or None) -> o_THD"""


class Indices(NamedTuple):
    """The rows of a batch and their pages in FlashInfer's format: int32. Its kernels read indptr and the next two."""

    inputs: Tensor
    """Ids, positions and slots of the rows' tokens, for what reads them on the device; may be empty."""
    indptr: Tensor
    last_page_len: Tensor
    indices: Tensor
    qo_indptr: Tensor


class FlashInferAttention:
    """See `Attention`. The rounding depends on the batch: FlashInfer splits long rows over idle multiprocessors, and
    chooses its tiles by the length of chunks. If the shape is deterministic it splits none, and each token is a chunk
    of its own. A plan for graphs without a split leaves blocks of the grid without indices: the memory for them must
    be zero, so that they compute what the first block does. Only a `new` shape has such plans.

    A step of decode rows alone is padded to one of `padded_rows`, and its indices have the same place as in the last
    step of that size. So FlashInfer makes its long plan once for a size, and after that a short one for each step.
    """

    def __init__(self, shape: AttentionShape, prefill: str = "fa2") -> None:
        """Compile the kernels, unless they are in the cache. *prefill*: the kind of kernels for chunks.

        Raises:
            ConfigError: The kernels cannot be compiled.
        """
        self._shape = shape
        self._library = library = load_library()
        described = fused.descriptions(library) if shape.fused else {}
        compile_kernels(library, shape, prefill, list(described.values()))
        self.beside = fused.load(described, shape) if described else fused.IN_TORCH
        """Functions that compute the rest of a layer."""
        self._workspaces = {
            name: torch.zeros(size, dtype=torch.uint8, device=shape.device)
            for name, size in (("float", WORKSPACE_BYTES), ("decode", DECODE_BYTES), ("prefill", PREFILL_BYTES))
        }
        self._indices_X = torch.empty(0, dtype=torch.int32, device=shape.device)
        """Indices that the kernels of decode rows read; `starts` has their places."""
        self.is_recorded = False
        """Whether recordings know the place of `_indices_X`."""
        self._num_pages = 0
        """Number of pages that fit into `_indices_X` beside the rows."""
        chunks = [self._wrapper("prefill", prefill_wrapper, backend=prefill) for _ in range(2)]
        self._turns = [Turn(wrapper, shape.device) for wrapper in chunks]

    def plan(self, batch: ForwardBatch) -> Attend:
        """Let FlashInfer divide the work. A step with a chunk is one prefill, in which decode rows are short chunks.

        Wait for nothing, unless the device has not begun the step before the last one.
        """
        return self.attending(self.prepare(batch), batch.slots_T)

    def prepare(self, batch: HostBatch, inputs_3R: np.ndarray | None = None) -> Run:
        """Do the part of `plan` on the host; the result reads pages that are already written.

        *inputs_3R*, int32: ids, positions and slots of decode rows; with the indices they are copied to `inputs`.
        """
        self._turns.reverse()
        turn = self._turns[0]
        turn.wait()
        only_decode = batch.num_decode_rows == len(batch.seq_lens)
        if only_decode and (self._shape.new or not self._shape.deterministic):
            run = self._plan_decode(turn, batch, inputs_3R)
        else:
            run = self._plan_prefill(turn, batch)
        turn.planned()
        return run

    @property
    def num_heads(self) -> int:
        """H."""
        return self._shape.num_heads

    def writing(self, slots_T: Tensor) -> fused.Write:
        """Return a function that stores keys and values at *slots_T*."""
        return self.beside.writing(slots_T, self._shape.page_size)

    def inputs(self, num_rows: int) -> Tensor:
        """Return the place of ids, positions and slots of so many decode rows on the device, [3, R]."""
        return arrays_in(self._indices_X, num_rows, 0).inputs.view(3, num_rows)

    def attending(self, run: Run, slots_T: Tensor) -> Attend:
        """Return the function that the layers call; it writes to *slots_T* what is not there already."""
        write = cache(lambda: self.writing(slots_T))

        def attend(
            q_THD: Tensor,
            k_TKD: Tensor | None,
            v_TKD: Tensor | None,
            kv_2PKSD: Tensor,
            out_THD: Tensor | None = None,
        ) -> Tensor:
            if k_TKD is not None and v_TKD is not None:
                write()(kv_2PKSD, k_TKD, v_TKD)
            return run(q_THD, (kv_2PKSD[0], kv_2PKSD[1]), out_THD)

        return attend

    def _plan_prefill(self, turn: Turn, batch: HostBatch) -> Run:
        indices_of_rows = indices_of_tokens if self._shape.deterministic else indices_of
        indices = turn.hold(indices_of_rows(batch, self._shape.page_size))
        wrapper = turn.prefill
        self._grow_until("prefill", wrapper, lambda: plan_prefill(wrapper, self._shape, indices))
        return lambda q_THD, kv, out_THD=None: wrapper.run(q_THD.contiguous(), kv, out=out_THD)

    def _plan_decode(self, turn: Turn, batch: HostBatch, inputs_3R: np.ndarray | None) -> Run:
        num_rows = padded_rows(len(batch.seq_lens))
        indices = indices_of(batch, self._shape.page_size, num_rows)
        if inputs_3R is not None:
            indices = indices._replace(inputs=torch.from_numpy(inputs_3R).view(-1))
        indices = turn.hold(indices)
        self.reserve(num_rows, len(indices.indices))
        wrapper = turn.decode.get(num_rows)
        if wrapper is None:
            wrapper = self._decode_wrapper(num_rows)
            self._grow_until("decode", wrapper, lambda: plan_decode(wrapper, self._shape, indices))
            turn.decode[num_rows] = wrapper
        else:
            send(turn.host_X, self._indices_X, starts(num_rows, len(indices.indices))[NUM_SENT])
            plan_decode_again(self._library, wrapper, self._shape, indices)

        def run(q_BHD: Tensor, kv: tuple[Tensor, Tensor], out_BHD: Tensor | None = None) -> Tensor:
            assert out_BHD is None, "rows that pad would be written, too"
            more = num_rows - len(q_BHD)
            q_RHD = F.pad(q_BHD, (0, 0, 0, 0, 0, more)) if more else q_BHD.contiguous()
            o_RHD: Tensor = wrapper.run(q_RHD, kv)
            return o_RHD[: len(q_BHD)]

        return run

    def reserve(self, num_rows: int, num_pages: int) -> None:
        """Make room for the indices of so many decode rows and pages. Forget wrappers that use the old place."""
        if num_pages <= self._num_pages and starts(num_rows, self._num_pages)[NUM_SENT] <= len(self._indices_X):
            return
        assert not self.is_recorded, f"{num_rows} rows and {num_pages} pages: recordings would read the old place"
        if num_pages > self._num_pages:
            self._num_pages = max(num_pages, 2 * self._num_pages)
        size = max(starts(num_rows, self._num_pages)[NUM_SENT], 2 * len(self._indices_X))
        self._indices_X = torch.zeros(size, dtype=torch.int32, device=self._shape.device)
        for turn in self._turns:
            turn.decode.clear()

    def _decode_wrapper(self, num_rows: int) -> Any:
        arrays = arrays_in(self._indices_X, num_rows, self._num_pages)
        return self._wrapper(
            "decode",
            decode_wrapper,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=arrays.indptr,
            paged_kv_indices_buffer=arrays.indices,
            paged_kv_last_page_len_buffer=arrays.last_page_len,
        )

    def _wrapper(self, kind: str, make: Callable[..., Any], **options: Any) -> Any:
        """Return a wrapper with pinned memory of its own for its plans. All wrappers share the workspace."""
        wrapper = make(self._library, self._workspaces["float"], **options)
        self._give_workspaces(kind, wrapper)
        return wrapper

    def _give_workspaces(self, kind: str, wrapper: Any) -> None:
        wrapper.reset_workspace_buffer(self._workspaces["float"], self._workspaces[kind])
        if kind == "decode" and self._shape.deterministic:
            wrapper._pin_memory_int_workspace_buffer.zero_()  # FlashInfer has no public way to it

    def _grow_until(self, kind: str, wrapper: Any, plan: Callable[[], None]) -> None:
        """Plan; if FlashInfer finds the workspaces too small, try again, first with the same ones, then with larger."""
        for attempt in count():
            try:
                plan()
                return
            except Exception as error:
                if TOO_SMALL not in str(error):
                    raise
            if attempt:
                for name in ("float", kind):
                    self._workspaces[name] = self._workspaces[name].new_zeros(2 * len(self._workspaces[name]))
                sizes = {f"{name}_mib": workspace.nbytes / 2**20 for name, workspace in self._workspaces.items()}
                logger.info("attention_workspace_grows", **sizes)
            self._give_workspaces(kind, wrapper)


class Turn:
    """One of two sets of wrappers, and the host memory from which the device copies their plans."""

    def __init__(self, prefill: Any, device: torch.device) -> None:
        self.prefill = prefill
        self.decode: dict[int, Any] = {}
        """Wrappers by number of rows."""
        self.host_X = torch.empty(0, dtype=torch.int32)
        self._device = device
        self._copied: torch.cuda.Event | None = None

    def hold(self, indices: Indices) -> Indices:
        """Return *indices* in pinned memory, at their `starts`."""
        num_rows, num_pages = len(indices.last_page_len), len(indices.indices)
        if (size := starts(num_rows, num_pages)[-1]) > len(self.host_X):
            self.host_X = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        held = arrays_in(self.host_X, num_rows, num_pages)
        for place, array in zip(held, indices, strict=True):
            if len(array):
                place.copy_(array)
        return held

    def planned(self) -> None:
        """Record that this set was used for a plan."""
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until the device has copied the last plan of this set."""
        if self._copied is not None:
            self._copied.synchronize()


def padded_rows(num_rows: int) -> int:
    """Return for how many rows a step of *num_rows* decode rows is planned: 1, 2, 4, 8, or a multiple of 16."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 16 else -(-num_rows // 16) * 16


def starts(num_rows: int, num_pages: int) -> list[int]:
    """Return where each array of `Indices` begins in a flat tensor, and the end of the last one."""
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes_of(num_rows, num_pages))]


def sizes_of(num_rows: int, num_pages: int) -> tuple[int, ...]:
    """Return the largest size of each array of `Indices`."""
    return 3 * num_rows, num_rows + 1, num_rows, num_pages, num_rows + 1


def arrays_in(flat_X: Tensor, num_rows: int, num_pages: int) -> Indices:
    """Return the arrays of *num_rows* rows and *num_pages* pages as parts of *flat_X*, which may lack qo_indptr."""
    places = zip(starts(num_rows, num_pages), sizes_of(num_rows, num_pages), strict=False)
    return Indices(*(flat_X[begin : begin + size] for begin, size in places))


def send(host_X: Tensor, device_X: Tensor, size: int) -> None:
    """Copy the first *size* numbers of *host_X* once the device has done what was launched before."""
    device_X[:size].copy_(host_X[:size], non_blocking=True)


# the calls of FlashInfer


def decode_wrapper(library: Any, workspace: Tensor, **graph: Any) -> Any:
    """Return FlashInfer's object for decode rows. *graph*: arguments for a CUDA graph."""
    return library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout="HND", use_tensor_cores=True, backend="fa2", **graph
    )


def prefill_wrapper(library: Any, workspace: Tensor, backend: str = "fa2") -> Any:
    """Return FlashInfer's object for chunks."""
    return library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend=backend)


def indices_of(batch: HostBatch, page_size: int, num_rows: int = 0) -> Indices:
    """Return the rows of *batch* and their pages in FlashInfer's format, on the host. Nothing waits for the device.

    *num_rows*: pad the batch to this many rows. Added rows have one token and see the first token of the first row.
    """
    return _indices(np.array(batch.seq_lens), batch.host_table_BN, batch.query_starts, page_size, num_rows)


def indices_of_tokens(batch: HostBatch, page_size: int) -> Indices:
    """Return the same for the tokens of *batch*, each of which is a row of its own."""
    rows_T, lengths_T = seen_by_tokens(batch)
    return _indices(lengths_T, batch.host_table_BN[rows_T], range(len(rows_T) + 1), page_size)


def _indices(
    lengths_B: np.ndarray, table_BN: np.ndarray, query_starts: Sequence[int], page_size: int, num_rows: int = 0
) -> Indices:
    end, counts_B = query_starts[-1], -(-lengths_B // page_size)
    ones = np.ones(max(0, num_rows - len(lengths_B)), np.int64)
    pages_X = table_BN[np.arange(table_BN.shape[1]) < counts_B[:, None]]
    arrays = (
        np.empty(0),
        np.append(0, np.append(counts_B, ones).cumsum()),
        np.append((lengths_B - 1) % page_size + 1, ones),
        np.append(pages_X, ones * table_BN[0, 0]),
        np.append(query_starts, end + ones.cumsum()),
    )
    return Indices(*(torch.from_numpy(array.astype(np.int32)) for array in arrays))


def plan_decode(wrapper: Any, shape: AttentionShape, indices: Indices) -> None:
    """Plan a step of decode rows."""
    wrapper.plan(
        indices.indptr,
        indices.indices,
        indices.last_page_len,
        *numbers(shape),
        disable_split_kv=shape.deterministic,
        **options(shape),
    )


def plan_decode_again(library: Any, wrapper: Any, shape: AttentionShape, indices: Indices) -> None:
    """Plan another step of as many decode rows, on the host alone. Their indices are on the device already."""
    library.fast_decode_plan(
        wrapper,
        indices.indptr,
        indices.indices,
        indices.last_page_len,
        *numbers(shape),
        disable_split_kv=shape.deterministic,
        **options(shape),
        global_override_indptr_cpu=indices.indptr,
    )


def plan_prefill(wrapper: Any, shape: AttentionShape, indices: Indices) -> None:
    """Plan a step with chunks."""
    wrapper.plan(
        indices.qo_indptr,
        indices.indptr,
        indices.indices,
        indices.last_page_len,
        *numbers(shape),
        causal=True,
        max_token_per_sequence=int(indices.qo_indptr.diff().max()),  # FlashInfer would search for it in Python
        disable_split_kv=shape.deterministic,
        **options(shape),
    )


def numbers(shape: AttentionShape) -> tuple[int, int, int, int]:
    """Return the numbers that every plan takes as arguments, in their order."""
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


def options(shape: AttentionShape) -> dict[str, Any]:
    """Return the arguments that every plan takes by name. Without a dtype a plan would use float16."""
    return {
        "window_left": shape.window - 1,
        "sm_scale": shape.scale,
        "logits_soft_cap": shape.cap,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }


# requirements


def why_not(shape: AttentionShape, prefill: str = "fa2") -> str:
    """Return why FlashInfer cannot compute *shape* on this machine, and what it needs; empty if it can.

    *prefill*: see `FlashInferAttention`.
    """
    if shape.device.type != "cuda":
        return "it computes on CUDA devices only"
    if shape.dtype not in DTYPES:
        return f"the dtype is {_name(shape.dtype)}, and it computes in {' and '.join(map(_name, DTYPES))} (--dtype)"
    if shape.head_dim not in HEAD_DIMS:
        return f"the model's head_dim is {shape.head_dim}, and it supports {', '.join(map(str, HEAD_DIMS))}"
    if (capability := torch.cuda.get_device_capability(shape.device)) < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and it needs 8.0 or newer"
    if prefill == "fa3" and capability[0] != FA3_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and fa needs 9.0; pass --attn fi"
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
    except Exception as error:  # an old driver or another version of a dependency may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS]
        raise ConfigError(f"flashinfer cannot be imported ({text}): pip install 'minisgl[cuda]'") from error
    seen = tuple(map(int, re.findall(r"\d+", library.__version__)[:3]))
    if seen < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(f"flashinfer is {library.__version__}, and {least} or newer is needed: upgrade it")
    return library


def kernels_of(library: Any, shape: AttentionShape, backend: str = "fa2") -> Any:
    """Return FlashInfer's description of the kernels for *shape*, which it needs to compile and find them."""
    return library.jit.gen_batch_prefill_module(
        backend,
        shape.dtype,
        shape.dtype,
        shape.dtype,
        torch.int32,
        shape.head_dim,
        shape.head_dim,
        0,  # no position encoding
        shape.window > 0,
        shape.cap > 0,
        False,  # no sums in float16
    )


def compile_kernels(library: Any, shape: AttentionShape, prefill: str = "fa2", others: Sequence[Any] = ()) -> None:
    """Compile the kernels for *shape* and *others*, all at once, unless FlashInfer's cache has them; load the former.

    Raises:
        ConfigError: The kernels for *shape* do not compile. Others that do not compile raise when they are loaded.
    """
    tools()
    try:
        kernels = [kernels_of(library, shape, backend) for backend in sorted({"fa2", prefill})]
        if missing := [each for each in (*kernels, *others) if not each.is_compiled]:
            try:
                _build(library, missing)
            except Exception:
                if not others:
                    raise
                logger.info("attention_kernels_compile", detail="once more, each module alone: one does not compile")
        for each in kernels:
            each.build_and_load()
    except Exception as error:
        raise ConfigError(
            f"--attn fi: FlashInfer's kernels do not compile; mend the compiler, or pass --attn torch, which is "
            f"slower. The compiler says: {str(error)[-ERROR_CHARS:].strip()}"
        ) from error


def _build(library: Any, kernels: Sequence[Any]) -> None:
    """Compile, and log the progress."""
    names = ", ".join(each.name for each in kernels)
    detail = "takes one or two minutes, once; the kernels of fa take many"
    logger.info("attention_kernels_compile", kernels=names, detail=detail)
    objects = [path for each in kernels for path in each.get_object_paths()]
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(library.jit.build_jit_specs, kernels)
        while wait((building,), PROGRESS_S).not_done:
            logger.info("attention_kernels_compile", done=sum(path.exists() for path in objects), of=len(objects))
        building.result()


def tools() -> dict[str, str | None]:
    """Return the paths of nvcc and ninja, None for a missing one. FlashInfer finds them in the same places afterwards.

    It calls ninja by name, so this adds ninja's folder to PATH: it may be beside this Python, or beside its modules.
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
