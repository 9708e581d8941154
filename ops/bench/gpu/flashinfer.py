"""What FlashInfer does here: imports, compiles, agrees with the reference, how fast it is, and works in a CUDA graph.

Keys and values lie as in our cache, HND, and are given as a tuple of two: of a single tensor FlashInfer splits another
dimension. One compiled module serves prefill and decode, which here runs on tensor cores.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ops.bench.gpu.capture import capture
from ops.bench.gpu.pages import Case, largest_error, make_batch, make_case
from ops.bench.gpu.phase import Report, Scale, Skip, attempt
from ops.bench.gpu.timing import ROUNDS, copy_bytes_per_s, median_s, random, wait
from stages.generate.attention import AttentionShape
from stages.generate.attention.reference import ReferenceAttention
from stages.generate.forward.batch import ForwardBatch

# B = rows, T = packed tokens, H = query heads, K = kv heads, D = head dim, P = pages, S = slots of a page

PARTS: Final = ("tvm_ffi", "typing_extensions", "pynvml", "requests", "tqdm", "packaging", "filelock", "jinja2")
"""The modules without which `import flashinfer` of 0.6.13 fails."""
Build: TypeAlias = tuple[int, bool]
"""head_dim, with a window"""
BUILDS: Final[tuple[Build, ...]] = ((64, False), (128, False))
WINDOWED_BUILDS: Final[tuple[Build, ...]] = ((128, True),)
"""Compiled last: where time is short, this is the least."""
BUILD_TIMEOUT_S: Final = 110.0
WORKSPACE_BYTES: Final = {"toy": 2**10, "small": 2**20, "full": 256 * 2**20}
DTYPE: Final = torch.bfloat16
TOLERANCE: Final = 2e-2
LINE_CHARS: Final = 300
ERROR_CHARS: Final = 1000
"""Of the end of what a compiler printed."""

DECODE: Final = ((70, 1), (3, 1), (0, 1), (15, 1), (16, 1), (300, 1))
PREFILL: Final = ((0, 9), (16, 5), (15, 17), (64, 64), (40, 270), (7, 1))
WINDOW: Final = 24
TIMED_ROWS: Final = {"toy": (1, 3), "small": (1, 32), "full": (1, 32, 256)}
CONTEXT: Final = {"toy": 40, "small": 512, "full": 512}
PREFILL_TOKENS: Final = {"toy": 48, "small": 512, "full": 2048}
TIMED_HEADS: Final = {"toy": (4, 2, 64), "small": (8, 2, 128), "full": (32, 8, 128)}
"""Query heads, kv heads, head_dim: those of Qwen3-8B."""
PAGE_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Indices:
    """The pages of a batch as FlashInfer wants them, int32 on the host."""

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def run(scale: Scale, report: Report) -> None:
    """Report all that can be said here."""
    if scale.device != "cuda":
        raise Skip("FlashInfer computes on CUDA devices alone")
    find_tools()
    began_s = time.perf_counter()
    library = import_library()
    there = {part: importlib.util.find_spec(part) is not None for part in ("flashinfer_cubin", "flashinfer_jit_cache")}
    report("import", ok=True, seconds=time.perf_counter() - began_s, version=str(library.__version__), **there)
    report("tools", nvcc=shutil.which("nvcc"), ninja=shutil.which("ninja"), cxx=shutil.which("c++"))
    built = build_all(BUILDS, report)
    measure(library, built, scale, report)
    built = build_all(WINDOWED_BUILDS, report)
    check_all(library, WINDOWED_BUILDS, built, scale, report)


def find_tools() -> None:
    """Let FlashInfer find ninja, which it calls by name: it may lie beside this Python, or beside its modules."""
    folders = [Path(sys.executable).parent, *(Path(entry) / "bin" for entry in sys.path)]
    found = [str(folder) for folder in folders if (folder / "ninja").is_file()]
    os.environ["PATH"] = os.pathsep.join((*found, os.environ.get("PATH", "")))


def import_library() -> Any:
    """Return the imported package.

    Raises:
        Skip: It cannot be imported.
    """
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # an old driver or another part's version raises what it likes
        missing = [part for part in ("flashinfer", *PARTS) if importlib.util.find_spec(part) is None]
        raise Skip(f"import flashinfer: {type(error).__name__}: {error}; missing: {', '.join(missing)}") from error


def build_all(builds: Sequence[Build], report: Report) -> list[Build]:
    """Compile modules at the same time, each in a process of its own; report each, and return those that are there."""
    with ThreadPoolExecutor(len(builds)) as pool:
        all_found = list(pool.map(lambda build: _build(*build), builds))
    for (head_dim, windowed), found in zip(builds, all_found, strict=True):
        report(f"jit head_dim {head_dim}{' with a window' if windowed else ''}", **found, at_once=len(builds))
    return [build for build, found in zip(builds, all_found, strict=True) if found["ok"]]


def _build(head_dim: int, windowed: bool) -> dict[str, Any]:
    """Return the figures of one build."""
    command = [sys.executable, "-m", "ops.bench.gpu.flashinfer_build", str(head_dim), str(int(windowed))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (*sys.path, os.getcwd())))}
    began_s = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"not compiled within {BUILD_TIMEOUT_S:.0f} s"}
    seconds = time.perf_counter() - began_s
    if done.returncode:
        return {"ok": False, "process_s": seconds, "error": _end_of(done.stdout + done.stderr)}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"ok": True, "process_s": seconds, **figures}


def _end_of(text: str) -> str:
    """Return the first lines with an error, and the end; a compiler's command is a line of thousands of letters."""
    lines = [line[:LINE_CHARS] for line in text.splitlines() if re.search(r"\berror\b|not found|No such file", line)]
    return "\n".join((*lines[:5], "..", text[-ERROR_CHARS:].strip()))


def check_all(library: Any, builds: Sequence[Build], built: Sequence[Build], scale: Scale, report: Report) -> None:
    """Report the errors of the modules *builds*; those that are not among *built* are skipped."""
    device = torch.device(scale.device)
    workspace = torch.zeros(WORKSPACE_BYTES[scale.size], dtype=torch.uint8, device=device)
    for head_dim, windowed in builds:
        for page_size in (16, 64):
            for kind, rows in (("decode", DECODE), ("prefill", PREFILL), ("prefill of decode rows", DECODE)):
                shape = AttentionShape(16, 4, head_dim, page_size, WINDOW if windowed else 0)
                item = f"{kind}, head_dim {head_dim}{' windowed' if windowed else ''}, pages of {page_size}"
                with attempt(report, item):
                    _require((head_dim, windowed), built)
                    _check(report, item, kind == "decode", library, workspace, make_case(shape, rows, DTYPE, device))


def measure(library: Any, built: Sequence[Build], scale: Scale, report: Report) -> None:
    """Report errors, times and graphs of *library*, of which the modules *built* are compiled."""
    check_all(library, BUILDS, built, scale, report)
    device = torch.device(scale.device)
    workspace = torch.zeros(WORKSPACE_BYTES[scale.size], dtype=torch.uint8, device=device)
    copy_rate = float("nan")
    with attempt(report, "copy"):
        copy_rate = copy_bytes_per_s(device, scale.size)
        report("copy", copy_gb_per_s=copy_rate / 1e9)
    shape = AttentionShape(*TIMED_HEADS[scale.size], PAGE_SIZE)
    build = (shape.head_dim, False)
    for num_rows in TIMED_ROWS[scale.size]:
        item = f"decode of {num_rows} rows"
        with attempt(report, item):
            _require(build, built)
            _time_decode(report, item, library, workspace, shape, num_rows, CONTEXT[scale.size], copy_rate, device)
        item = f"graph of decode, {num_rows} rows"
        with attempt(report, item):
            _require(build, built)
            _try_graph(report, item, library, workspace, shape, num_rows, CONTEXT[scale.size], copy_rate, device)
    item = f"prefill of {PREFILL_TOKENS[scale.size]} tokens"
    with attempt(report, item):
        _require(build, built)
        _time_prefill(report, item, library, workspace, shape, PREFILL_TOKENS[scale.size], device)


def _require(build: Build, built: Sequence[Build]) -> None:
    """Raise Skip where a module is missing: a call would compile it, or fail to, once more."""
    if build not in built:
        raise Skip(f"the module for head_dim {build[0]}{' with a window' if build[1] else ''} was not compiled")


def indices_of(batch: ForwardBatch, page_size: int) -> Indices:
    """Return the pages of *batch* as FlashInfer wants them."""
    counts = [-(-length // page_size) for length in batch.seq_lens]
    table_BN = batch.page_table_BN.cpu()
    return Indices(
        torch.tensor(batch.query_starts, dtype=torch.int32),
        torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.cat([table_BN[row, :count] for row, count in enumerate(counts)]).int(),
        torch.tensor([(length - 1) % page_size + 1 for length in batch.seq_lens], dtype=torch.int32),
    )


def plan_decode(wrapper: Any, shape: AttentionShape, indices: Indices) -> None:
    """Plan a step of decode rows."""
    wrapper.plan(
        indices.indptr,
        indices.indices,
        indices.last_page_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        window_left=shape.window - 1,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )


def plan_prefill(wrapper: Any, shape: AttentionShape, indices: Indices) -> None:
    """Plan a step of chunks."""
    wrapper.plan(
        indices.qo_indptr,
        indices.indptr,
        indices.indices,
        indices.last_page_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        causal=True,
        window_left=shape.window - 1,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )


def decode_wrapper(library: Any, workspace: Tensor) -> Any:
    """Return what computes decode rows, for batches of any size."""
    return library.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="HND", use_tensor_cores=True, backend="fa2")


def graph_wrapper(library: Any, workspace: Tensor, num_rows: int, most_pages: int) -> Any:
    """Return what computes decode rows in a graph: of *num_rows* on *most_pages* pages at most, in fixed buffers."""
    sizes = {"indptr": num_rows + 1, "indices": most_pages, "last_page_len": num_rows}
    buffers = {
        f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=workspace.device)
        for name, size in sizes.items()
    }
    return library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout="HND", use_cuda_graph=True, use_tensor_cores=True, backend="fa2", **buffers
    )


def _check(report: Report, item: str, decodes: bool, library: Any, workspace: Tensor, case: Case) -> None:
    """Compare with float64, and with our reference on the same pages."""
    kv_2PKSD, indices = case.filled_pages(), indices_of(case.batch, case.shape.page_size)
    if decodes:
        wrapper = decode_wrapper(library, workspace)
        plan_decode(wrapper, case.shape, indices)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend="fa2")
        plan_prefill(wrapper, case.shape, indices)
    output = wrapper.run(case.q_THD, (kv_2PKSD[0], kv_2PKSD[1]))
    expected = case.expected()
    reference = ReferenceAttention(case.shape).plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, kv_2PKSD)
    error = largest_error(output, expected)
    report(
        item,
        ok=error <= TOLERANCE,
        largest_error=error if error == error else None,
        is_nan=error != error,
        reference_error=largest_error(reference, expected),
    )


def _timed(
    shape: AttentionShape, rows: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[ForwardBatch, Tensor, Tensor]:
    """Return a batch, q_THD and kv_2PKSD, all of it random."""
    batch, num_pages = make_batch(rows, shape.page_size, device)
    q_THD = random((batch.query_starts[-1], shape.num_heads, shape.head_dim), DTYPE, device)
    kv_shape = (2, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    return batch, q_THD, random(kv_shape, DTYPE, device, seed=1)


def _plan_ms(plan: Any, device: torch.device) -> float:
    """Return how long the host is busy with it."""
    times = []
    for _ in range(ROUNDS + 2):
        wait(device)
        began_s = time.perf_counter()
        plan()
        times.append(time.perf_counter() - began_s)
    wait(device)
    return 1e3 * statistics.median(times[2:])


def _share(shape: AttentionShape, batch: ForwardBatch, seconds: float, copy_rate: float) -> float | None:
    """Return the share of the copy bandwidth at which keys and values are read."""
    num_bytes = 2 * sum(batch.seq_lens) * shape.num_kv_heads * shape.head_dim * DTYPE.itemsize
    share = num_bytes / seconds / copy_rate
    return share if share == share else None


def _time_decode(
    report: Report,
    item: str,
    library: Any,
    workspace: Tensor,
    shape: AttentionShape,
    num_rows: int,
    context: int,
    copy_rate: float,
    device: torch.device,
) -> None:
    """Time one layer's attention, FlashInfer's and ours."""
    batch, q_BHD, kv_2PKSD = _timed(shape, ((context - 1, 1),) * num_rows, device)
    indices, wrapper = indices_of(batch, shape.page_size), decode_wrapper(library, workspace)
    plan_ms = _plan_ms(lambda: plan_decode(wrapper, shape, indices), device)
    kv = (kv_2PKSD[0], kv_2PKSD[1])
    seconds = median_s(lambda: wrapper.run(q_BHD, kv), device, inner=10)
    attend = ReferenceAttention(shape).plan(batch)
    k_BKD, v_BKD = (random((num_rows, shape.num_kv_heads, shape.head_dim), DTYPE, device, seed) for seed in (2, 3))
    reference_s = median_s(lambda: attend(q_BHD, k_BKD, v_BKD, kv_2PKSD), device)
    expected = attend(q_BHD, k_BKD, v_BKD, kv_2PKSD)
    error = largest_error(wrapper.run(q_BHD, kv), expected.double())
    report(
        item,
        ok=error <= TOLERANCE,
        largest_error=error if error == error else None,
        us=1e6 * seconds,
        copy_bandwidth_share=_share(shape, batch, seconds, copy_rate),
        reference_us=1e6 * reference_s,
        plan_ms=plan_ms,
    )


def _try_graph(
    report: Report,
    item: str,
    library: Any,
    workspace: Tensor,
    shape: AttentionShape,
    num_rows: int,
    context: int,
    copy_rate: float,
    device: torch.device,
) -> None:
    """Capture decode, replay it on the lengths of the capture and on others, and compare with eager calls."""
    batches = list(_two_lengths(shape, num_rows, context, device))
    most_pages = max(int(indices.indptr[-1]) for _, indices in batches)
    batch, q_BHD, kv_2PKSD = _timed(shape, ((context - 1, 1),) * num_rows, device)
    kv, out = (kv_2PKSD[0], kv_2PKSD[1]), torch.zeros_like(q_BHD)
    wrapper = graph_wrapper(library, workspace, num_rows, most_pages)
    plan_decode(wrapper, shape, batches[0][1])
    captured = capture(lambda: wrapper.run(q_BHD, kv, out=out), device)
    same_bits, worst = [], 0.0
    for _, indices in batches:
        plan_decode(wrapper, shape, indices)
        eager = wrapper.run(q_BHD, kv).clone()
        out.zero_()
        captured.replay()
        wait(device)
        same_bits.append(bool(torch.equal(out, eager)))
        plain = decode_wrapper(library, torch.zeros_like(workspace))
        plan_decode(plain, shape, indices)
        error = largest_error(out, plain.run(q_BHD, kv).double())
        worst = error if error != error else max(worst, error)
    plan_decode(wrapper, shape, batches[0][1])
    replay_s = median_s(captured.replay, device, inner=10)
    eager_s = median_s(lambda: wrapper.run(q_BHD, kv, out=out), device, inner=10)
    report(
        item,
        ok=all(same_bits) and worst <= TOLERANCE,
        replay_is_eager=same_bits[0],
        replay_is_eager_at_other_lengths=same_bits[1],
        largest_error=worst if worst == worst else None,
        replay_us=1e6 * replay_s,
        eager_us=1e6 * eager_s,
        saved_us=1e6 * (eager_s - replay_s),
        copy_bandwidth_share=_share(shape, batch, replay_s, copy_rate),
        plan_ms=_plan_ms(lambda: plan_decode(wrapper, shape, batches[0][1]), device),
    )
    with attempt(report, f"fast_decode_plan, {num_rows} rows"):
        _time_fast_plan(report, f"fast_decode_plan, {num_rows} rows", library, wrapper, shape, batches[0][1], device)


def _two_lengths(
    shape: AttentionShape, num_rows: int, context: int, device: torch.device
) -> Iterator[tuple[ForwardBatch, Indices]]:
    for start in (context - 1, context // 2):
        batch, _ = make_batch(((start, 1),) * num_rows, shape.page_size, device)
        yield batch, indices_of(batch, shape.page_size)


def _time_fast_plan(
    report: Report, item: str, library: Any, wrapper: Any, shape: AttentionShape, indices: Indices, device: torch.device
) -> None:
    """Time the plan that leaves the buffers of a graph alone and takes what it needs from the host."""

    def plan() -> None:
        library.fast_decode_plan(
            wrapper,
            indices.indptr,
            indices.indices,
            indices.last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            window_left=shape.window - 1,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
            global_override_indptr_cpu=indices.indptr,
        )

    report(item, plan_ms=_plan_ms(plan, device))


def _time_prefill(
    report: Report,
    item: str,
    library: Any,
    workspace: Tensor,
    shape: AttentionShape,
    num_tokens: int,
    device: torch.device,
) -> None:
    """Time one layer's attention over one prompt, FlashInfer's and ours."""
    batch, q_THD, kv_2PKSD = _timed(shape, ((0, num_tokens),), device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend="fa2")
    indices = indices_of(batch, shape.page_size)
    plan_ms = _plan_ms(lambda: plan_prefill(wrapper, shape, indices), device)
    k_TKD, v_TKD = (random((num_tokens, shape.num_kv_heads, shape.head_dim), DTYPE, device, seed) for seed in (2, 3))
    attend = ReferenceAttention(shape).plan(batch)
    reference_s = median_s(lambda: attend(q_THD, k_TKD, v_TKD, kv_2PKSD), device)
    expected = attend(q_THD, k_TKD, v_TKD, kv_2PKSD)
    seconds = median_s(lambda: wrapper.run(q_THD, (kv_2PKSD[0], kv_2PKSD[1])), device, inner=5)
    error = largest_error(wrapper.run(q_THD, (kv_2PKSD[0], kv_2PKSD[1])), expected.double())
    report(
        item,
        ok=error <= TOLERANCE,
        largest_error=error if error == error else None,
        us=1e6 * seconds,
        tflops=2 * shape.num_heads * shape.head_dim * num_tokens**2 / seconds / 1e12,
        reference_us=1e6 * reference_s,
        plan_ms=plan_ms,
    )
