"""What FlashInfer does here: imports, compiles, agrees with the reference, how fast it is, and works in a CUDA graph.

It is called as the attention backend calls it; what is built on top of it in a graph is tried here first. Run as a
program it compiles one module, so that several compile at the same time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ops.bench.gpu.capture import capture
from ops.bench.gpu.pages import largest_error, make_batch, make_case
from ops.bench.gpu.phase import Figures, Report, Scale, Skip, attempt, report_each
from ops.bench.gpu.timing import copy_bytes_per_s, median_s, random, step_times, wait
from pipeline.errors import ConfigError
from stages.generate.attention import AttentionShape
from stages.generate.attention.flashinfer import (
    Indices,
    decode_wrapper,
    indices_of,
    kernels_of,
    load_library,
    numbers,
    options,
    plan_decode,
    plan_prefill,
    prefill_wrapper,
    tools,
)
from stages.generate.attention.reference import ReferenceAttention
from stages.generate.forward.batch import ForwardBatch

# B = rows, T = packed tokens, H = query heads, K = kv heads, D = head dim, P = pages, S = slots of a page

PARTS: Final = ("tvm_ffi", "typing_extensions", "pynvml", "requests", "tqdm", "packaging", "filelock", "jinja2")
"""The modules without which `import flashinfer` of 0.6.13 fails."""
Build: TypeAlias = tuple[int, bool]
"""head_dim, with a window"""
Rows: TypeAlias = tuple[tuple[int, int], ...]
"""(start, number of new tokens) of each row."""
BUILDS: Final[tuple[Build, ...]] = ((64, False), (128, False), (64, True), (128, True))
BUILDS_AT_ONCE: Final = 2
"""A compiler takes gigabytes, and each build runs one on every core."""
BUILD_TIMEOUT_S: Final = 60.0
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
class Way:
    """One of the two ways to call it."""

    wrapper: Callable[[Any, Tensor], Any]
    plan: Callable[[Any, AttentionShape, Indices], None]


DECODES: Final = Way(decode_wrapper, plan_decode)
PREFILLS: Final = Way(prefill_wrapper, plan_prefill)
CHECKED: Final = (
    ("decode", DECODES, DECODE),
    ("prefill", PREFILLS, PREFILL),
    ("prefill of decode rows", PREFILLS, DECODE),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """What is measured, and with what."""

    library: Any
    workspace: Tensor
    shape: AttentionShape
    copy_rate: float

    @property
    def device(self) -> torch.device:
        """Where."""
        return self.shape.device


def run(scale: Scale, report: Report) -> None:
    """Report all that can be said here."""
    if scale.device != "cuda":
        raise Skip("FlashInfer computes on CUDA devices alone")
    found = tools()
    began_s = time.perf_counter()
    library = import_library()
    there = {part: importlib.util.find_spec(part) is not None for part in ("flashinfer_cubin", "flashinfer_jit_cache")}
    report("import", ok=True, seconds=time.perf_counter() - began_s, version=str(library.__version__), **there)
    report("tools", ok=None, **found)
    built = build_all(BUILDS, report)
    check_all(library, BUILDS, built, scale, report)
    measure(library, built, scale, report)


def import_library() -> Any:
    """Return the imported package.

    Raises:
        Skip: It cannot be imported.
    """
    try:
        return load_library()
    except ConfigError as error:
        missing = [part for part in ("flashinfer", *PARTS) if importlib.util.find_spec(part) is None]
        raise Skip(f"{error}; missing: {', '.join(missing)}") from error


def build_all(builds: Sequence[Build], report: Report) -> list[Build]:
    """Compile modules, each in a process of its own, and some at once; report each, and return those that are there."""
    with ThreadPoolExecutor(BUILDS_AT_ONCE) as pool:
        all_found = list(pool.map(lambda build: _build(*build), builds))
    for (head_dim, windowed), found in zip(builds, all_found, strict=True):
        report(f"jit head_dim {head_dim}{' with a window' if windowed else ''}", **found)
    return [build for build, found in zip(builds, all_found, strict=True) if found["ok"]]


def _build(head_dim: int, windowed: bool) -> dict[str, Any]:
    """Return the figures of one build."""
    command = [sys.executable, "-m", __name__, str(head_dim), str(int(windowed))]
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
    checks: dict[str, Callable[[], Figures]] = {}
    for head_dim, windowed in builds:
        for page_size in (16, 64):
            shape = AttentionShape(16, 4, head_dim, page_size, WINDOW if windowed else 0, DTYPE, device)
            for kind, way, rows in CHECKED:
                item = f"{kind}, head_dim {head_dim}{' windowed' if windowed else ''}, pages of {page_size}"
                check = partial(_check, way, library, workspace, shape, rows)
                checks[item] = _if_built((head_dim, windowed), built, check)
    report_each(report, checks)


def measure(library: Any, built: Sequence[Build], scale: Scale, report: Report) -> None:
    """Report times and graphs of *library*, of which the modules *built* are compiled."""
    size, device = scale.size, torch.device(scale.device)
    workspace = torch.zeros(WORKSPACE_BYTES[size], dtype=torch.uint8, device=device)
    copy_rate = float("nan")
    with attempt(report, "copy"):
        copy_rate = copy_bytes_per_s(device, size)
        report("copy", copy_gb_per_s=copy_rate / 1e9)
    shape = AttentionShape(*TIMED_HEADS[size], PAGE_SIZE, 0, DTYPE, device)
    timed = Timed(library, workspace, shape, copy_rate)
    measures: dict[str, Callable[[], Figures]] = {}
    for num_rows in TIMED_ROWS[size]:
        rows = ((CONTEXT[size] - 1, 1),) * num_rows
        measures[f"decode of {num_rows} rows"] = partial(_time, DECODES, timed, rows)
        measures[f"graph of decode, {num_rows} rows"] = partial(_try_graph, timed, rows)
        measures[f"fast_decode_plan, {num_rows} rows"] = partial(_time_fast_plan, timed, rows)
    measures[f"prefill of {PREFILL_TOKENS[size]} tokens"] = partial(
        _time, PREFILLS, timed, ((0, PREFILL_TOKENS[size]),)
    )
    timed_build = (shape.head_dim, False)
    report_each(report, {item: _if_built(timed_build, built, call) for item, call in measures.items()})


def _if_built(build: Build, built: Sequence[Build], measure: Callable[[], Figures]) -> Callable[[], Figures]:
    """Return *measure*, or a skip where the module is missing: a call would compile it, or fail to, once more."""

    def skip() -> Figures:
        raise Skip(f"the module for head_dim {build[0]}{' with a window' if build[1] else ''} was not compiled")

    return measure if build in built else skip


def graph_wrapper(library: Any, workspace: Tensor, num_rows: int, most_pages: int) -> Any:
    """Return what computes decode rows in a graph: of *num_rows* on *most_pages* pages at most, in fixed buffers."""
    sizes = {"indptr": num_rows + 1, "indices": most_pages, "last_page_len": num_rows}
    buffers = {
        f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=workspace.device)
        for name, size in sizes.items()
    }
    return decode_wrapper(library, workspace, use_cuda_graph=True, **buffers)


def _check(way: Way, library: Any, workspace: Tensor, shape: AttentionShape, rows: Rows) -> Figures:
    """Compare with float64, and with our reference on the same pages."""
    case = make_case(shape, rows, shape.dtype, shape.device)
    kv_2PKSD = case.filled_pages()
    wrapper = way.wrapper(library, workspace)
    way.plan(wrapper, shape, indices_of(case.batch, shape.page_size))
    output = wrapper.run(case.q_THD, (kv_2PKSD[0], kv_2PKSD[1]))
    expected = case.expected()
    reference = ReferenceAttention(shape).plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, kv_2PKSD)
    return _verdict(largest_error(output, expected)) | {"reference_error": largest_error(reference, expected)}


def _verdict(error: float) -> dict[str, Any]:
    return {"ok": error <= TOLERANCE, "largest_error": error, "is_nan": error != error}


def _random_step(
    shape: AttentionShape, rows: Rows
) -> tuple[ForwardBatch, Tensor, tuple[Tensor, Tensor], Callable[[], Tensor]]:
    """Return a batch, its q_THD, keys and values in pages, and our reference on it; all of it random."""
    batch, num_pages = make_batch(rows, shape.page_size, shape.device)
    num_tokens = batch.query_starts[-1]
    q_THD = random((num_tokens, shape.num_heads, shape.head_dim), shape.dtype, shape.device)
    kv_shape = (2, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    kv_2PKSD = random(kv_shape, shape.dtype, shape.device, seed=1)
    new = (num_tokens, shape.num_kv_heads, shape.head_dim)
    k_TKD, v_TKD = (random(new, shape.dtype, shape.device, seed) for seed in (2, 3))
    attend = ReferenceAttention(shape).plan(batch)
    return batch, q_THD, (kv_2PKSD[0], kv_2PKSD[1]), lambda: attend(q_THD, k_TKD, v_TKD, kv_2PKSD)


def _plan_ms(plan: Callable[[], None], device: torch.device) -> float:
    """Return how long the host is busy with it."""
    return 1e3 * step_times(plan, device).host_s


def _share(timed: Timed, batch: ForwardBatch, seconds: float) -> float:
    """Return the share of the copy bandwidth at which keys and values are read."""
    shape = timed.shape
    num_bytes = 2 * sum(batch.seq_lens) * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    return num_bytes / seconds / timed.copy_rate


def _time(way: Way, timed: Timed, rows: Rows) -> Figures:
    """Time one layer's attention, FlashInfer's and ours."""
    shape, device = timed.shape, timed.device
    batch, q_THD, kv, reference = _random_step(shape, rows)
    indices, wrapper = indices_of(batch, shape.page_size), way.wrapper(timed.library, timed.workspace)
    plan_ms = _plan_ms(lambda: way.plan(wrapper, shape, indices), device)
    reference_s = median_s(reference, device)  # it writes the keys that both read
    seconds = median_s(lambda: wrapper.run(q_THD, kv), device, inner=10)
    figures = _verdict(largest_error(wrapper.run(q_THD, kv), reference().double()))
    figures |= {"us": 1e6 * seconds, "reference_us": 1e6 * reference_s, "plan_ms": plan_ms}
    if way is DECODES:
        return figures | {"copy_bandwidth_share": _share(timed, batch, seconds)}
    return figures | {"tflops": 2 * shape.num_heads * shape.head_dim * len(q_THD) ** 2 / seconds / 1e12}


def _planned_for_graph(timed: Timed, rows: Rows) -> tuple[Any, list[Indices]]:
    """Return a wrapper in fixed buffers, and the pages of *rows* and of rows half as long, in its room."""
    shape = timed.shape
    lengths = (rows, tuple((start // 2, 1) for start, _ in rows))
    batches = [indices_of(make_batch(those, shape.page_size, shape.device)[0], shape.page_size) for those in lengths]
    most_pages = max(int(indices.indptr[-1]) for indices in batches)
    wrapper = graph_wrapper(timed.library, timed.workspace, len(rows), most_pages)
    plan_decode(wrapper, shape, batches[0])
    return wrapper, batches


def _try_graph(timed: Timed, rows: Rows) -> Figures:
    """Capture decode, replay it on the lengths of the capture and on others, and compare with eager calls."""
    shape, device, library = timed.shape, timed.device, timed.library
    wrapper, batches = _planned_for_graph(timed, rows)
    batch, q_BHD, kv, _ = _random_step(shape, rows)
    out = torch.zeros_like(q_BHD)
    replay = capture(lambda: wrapper.run(q_BHD, kv, out=out), device)
    same_bits, worst = [], 0.0
    for indices in batches:
        plan_decode(wrapper, shape, indices)
        eager = wrapper.run(q_BHD, kv).clone()
        out.zero_()
        replay()
        wait(device)
        same_bits.append(bool(torch.equal(out, eager)))
        plain = decode_wrapper(library, torch.zeros_like(timed.workspace))
        plan_decode(plain, shape, indices)
        error = largest_error(out, plain.run(q_BHD, kv).double())
        worst = error if error != error else max(worst, error)
    plan_decode(wrapper, shape, batches[0])
    replay_s = median_s(replay, device, inner=10)
    eager_s = median_s(lambda: wrapper.run(q_BHD, kv, out=out), device, inner=10)
    verdict = _verdict(worst)
    return {
        **verdict,
        "ok": verdict["ok"] and all(same_bits),
        "replay_is_eager": same_bits[0],
        "replay_is_eager_at_other_lengths": same_bits[1],
        "replay_us": 1e6 * replay_s,
        "eager_us": 1e6 * eager_s,
        "saved_us": 1e6 * (eager_s - replay_s),
        "copy_bandwidth_share": _share(timed, batch, replay_s),
        "plan_ms": _plan_ms(lambda: plan_decode(wrapper, shape, batches[0]), device),
    }


def _time_fast_plan(timed: Timed, rows: Rows) -> Figures:
    """Time the plan that leaves the buffers of a graph alone and takes what it needs from the host."""
    wrapper, (indices, _) = _planned_for_graph(timed, rows)
    plan = partial(
        timed.library.fast_decode_plan,
        wrapper,
        indices.indptr,
        indices.indices,
        indices.last_page_len,
        *numbers(timed.shape),
        **options(timed.shape),
        global_override_indptr_cpu=indices.indptr,
    )
    return {"plan_ms": _plan_ms(plan, timed.device)}


def main() -> None:
    """Compile what the arguments say, HEAD_DIM WINDOWED(0|1), and print as JSON how long that took."""
    tools()
    began_s = time.perf_counter()
    shape = AttentionShape(1, 1, int(sys.argv[1]), 16, int(sys.argv[2]), DTYPE)
    kernels = kernels_of(load_library(), shape)
    imported_s = time.perf_counter() - began_s
    was_there = bool(kernels.is_compiled)
    kernels.build_and_load()
    seconds = time.perf_counter() - began_s - imported_s
    print(json.dumps({"seconds": seconds, "import_s": imported_s, "was_compiled": was_there}))


if __name__ == "__main__":
    main()
