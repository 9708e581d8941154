"""What FlashInfer does here: imports, compiles, agrees with the reference, how fast it is, and works in a CUDA graph.

It is called as the attention backend calls it; what is built on top of it in a graph is tried here first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ops.bench.gpu.capture import capture
from ops.bench.gpu.pages import largest_error, make_batch, make_case
from ops.bench.gpu.phase import Report, Scale, Skip, attempt
from ops.bench.gpu.timing import ROUNDS, copy_bytes_per_s, median_s, random, wait
from pipeline.errors import ConfigError
from stages.generate.attention import AttentionShape, fused
from stages.generate.attention.flashinfer import (
    Indices,
    decode_wrapper,
    indices_of,
    load_library,
    plan_decode,
    plan_decode_again,
    plan_prefill,
    prefill_wrapper,
    tools,
)
from stages.generate.attention.reference import ReferenceAttention
from stages.generate.batch import ForwardBatch

# B = rows, T = packed tokens, H = query heads, K = kv heads, D = head dim, P = pages, S = slots of a page

PARTS: Final = ("tvm_ffi", "typing_extensions", "pynvml", "requests", "tqdm", "packaging", "filelock", "jinja2")
"""The modules without which `import flashinfer` of 0.6.13 fails."""
Build: TypeAlias = tuple[int, bool]
"""head_dim, with a window"""
BUILDS: Final[tuple[Build, ...]] = ((64, False), (128, False), (64, True), (128, True))
BUILD_BYTES: Final = 24 * 2**30
"""Memory for each build at once: a compiler takes gigabytes, and a build runs ten of them."""
BUILD_TIMEOUT_S: Final = 110.0
"""Four at once and the operations took 80 s on 16 cores."""
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
OPERATION_TOKENS: Final = {"toy": (3,), "small": (32, 512), "full": (1, 32, 2048)}
HIDDEN_SIZES: Final = {"toy": (64, 96), "small": (256, 512), "full": (4096, 12288)}
"""Of the model and of its MLPs."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What is measured, and with what."""

    library: Any
    workspace: Tensor
    shape: AttentionShape
    context: int
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
    measure(library, build_all(BUILDS, report), scale, report)


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
    """Compile modules, each in a process of its own, and some at once; report each, and return those that are there.

    One process compiles the small modules with the other operations of a layer.
    """
    with ThreadPoolExecutor(_builds_at_once(len(builds) + 1)) as pool:
        operations = pool.submit(_run_build, "operations")
        all_found = list(pool.map(lambda build: _build(*build), builds))
    said = operations.result()
    for name in fused.MODULES:
        figures = said.get(name, {"ok": False, "error": said.get("error", "FlashInfer describes no such module")})
        report(f"jit {name}", **figures | ({"error": _end_of(figures["error"])} if "error" in figures else {}))
    for (head_dim, windowed), found in zip(builds, all_found, strict=True):
        report(f"jit head_dim {head_dim}{' with a window' if windowed else ''}", **found)
    return [build for build, found in zip(builds, all_found, strict=True) if found["ok"]]


def _builds_at_once(most: int) -> int:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(most, memory_bytes // BUILD_BYTES))


def _build(head_dim: int, windowed: bool) -> dict[str, Any]:
    """Return the figures of one build."""
    return {"ok": True} | _run_build(str(head_dim), str(int(windowed)))


def _run_build(*arguments: str) -> dict[str, Any]:
    """Return what a process says that compiles, or why it says nothing."""
    command = [sys.executable, "-m", "ops.bench.gpu.flashinfer_build", *arguments]
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
    return {"process_s": seconds, **figures}


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
                shape = AttentionShape(16, 4, head_dim, page_size, WINDOW if windowed else 0, DTYPE, device)
                item = f"{kind}, head_dim {head_dim}{' windowed' if windowed else ''}, pages of {page_size}"
                with attempt(report, item):
                    _require((head_dim, windowed), built)
                    _check(report, item, kind == "decode", library, workspace, shape, rows)


def measure(library: Any, built: Sequence[Build], scale: Scale, report: Report) -> None:
    """Report errors, times and graphs of *library*, of which the modules *built* are compiled."""
    check_all(library, BUILDS, built, scale, report)
    size, device = scale.size, torch.device(scale.device)
    workspace = torch.zeros(WORKSPACE_BYTES[size], dtype=torch.uint8, device=device)
    copy_rate = float("nan")
    with attempt(report, "copy"):
        copy_rate = copy_bytes_per_s(device, size)
        report("copy", copy_gb_per_s=copy_rate / 1e9)
    shape = AttentionShape(*TIMED_HEADS[size], PAGE_SIZE, 0, DTYPE, device)
    timed = Timed(library, workspace, shape, CONTEXT[size], copy_rate)
    described = fused.descriptions(library)
    for operation, num_tokens in ((name, number) for name in fused.TRIES for number in OPERATION_TOKENS[size]):
        item = f"{operation}, {num_tokens} tokens"
        with attempt(report, item), torch.inference_mode():
            _try_operation(report, item, operation, described, shape, num_tokens, HIDDEN_SIZES[size])
    tries: list[tuple[str, Callable[[Report, str, Timed, int], None], int]] = []
    for num_rows in TIMED_ROWS[size]:
        tries.append((f"decode of {num_rows} rows", _time_decode, num_rows))
        tries.append((f"graph of decode, {num_rows} rows", _try_graph, num_rows))
    tries.append((f"prefill of {PREFILL_TOKENS[size]} tokens", _time_prefill, PREFILL_TOKENS[size]))
    for item, call, number in tries:
        with attempt(report, item):
            _require((shape.head_dim, False), built)
            call(report, item, timed, number)


def _try_operation(
    report: Report,
    item: str,
    operation: str,
    described: Mapping[str, Any],
    shape: AttentionShape,
    num_tokens: int,
    sizes: tuple[int, int],
) -> None:
    """Compare an operation of FlashInfer with torch's, and time both."""
    tried = fused.TRIES[operation]
    if tried.module not in described or not described[tried.module].is_compiled:
        raise Skip(f"the module {tried.module} was not compiled")
    beside = fused.extended(fused.IN_TORCH, tried.module, described[tried.module])
    sample = fused.make_sample(shape, num_tokens=num_tokens, hidden_size=sizes[0], num_gates=sizes[1])
    error = fused.distance(*(tried.prepared(each, sample)() for each in (beside, fused.IN_TORCH)))
    ours_s, torch_s = (
        median_s(tried.prepared(each, sample), shape.device, inner=10) for each in (beside, fused.IN_TORCH)
    )
    report(
        item,
        ok=error <= fused.TOLERANCE,
        distance=error if error == error else None,
        us=1e6 * ours_s,
        torch_us=1e6 * torch_s,
    )


def _require(build: Build, built: Sequence[Build]) -> None:
    """Raise Skip where a module is missing: a call would compile it, or fail to, once more."""
    if build not in built:
        raise Skip(f"the module for head_dim {build[0]}{' with a window' if build[1] else ''} was not compiled")


def graph_wrapper(library: Any, workspace: Tensor, num_rows: int, most_pages: int) -> Any:
    """Return what computes decode rows in a graph: of *num_rows* on *most_pages* pages at most, in fixed buffers."""
    sizes = {"indptr": num_rows + 1, "indices": most_pages, "last_page_len": num_rows}
    buffers = {
        f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=workspace.device)
        for name, size in sizes.items()
    }
    return decode_wrapper(library, workspace, use_cuda_graph=True, **buffers)


def _check(
    report: Report,
    item: str,
    decodes: bool,
    library: Any,
    workspace: Tensor,
    shape: AttentionShape,
    rows: Sequence[tuple[int, int]],
) -> None:
    """Compare with float64, and with our reference on the same pages."""
    case = make_case(shape, rows, shape.dtype, shape.device)
    kv_2PKSD, indices = case.filled_pages(), indices_of(case.batch, shape.page_size)
    wrapper = (decode_wrapper if decodes else prefill_wrapper)(library, workspace)
    (plan_decode if decodes else plan_prefill)(wrapper, shape, indices)
    output = wrapper.run(case.q_THD, (kv_2PKSD[0], kv_2PKSD[1]))
    expected = case.expected()
    reference = ReferenceAttention(shape).plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, kv_2PKSD)
    error = largest_error(output, expected)
    report(item, **_verdict(error), reference_error=largest_error(reference, expected))


def _verdict(error: float) -> dict[str, Any]:
    return {"ok": error <= TOLERANCE, "largest_error": error if error == error else None, "is_nan": error != error}


def _random_step(
    shape: AttentionShape, rows: tuple[tuple[int, int], ...]
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
    times = []
    for _ in range(ROUNDS + 2):
        wait(device)
        began_s = time.perf_counter()
        plan()
        times.append(time.perf_counter() - began_s)
    wait(device)
    return 1e3 * statistics.median(times[2:])


def _share(timed: Timed, batch: ForwardBatch, seconds: float) -> float | None:
    """Return the share of the copy bandwidth at which keys and values are read."""
    shape = timed.shape
    num_bytes = 2 * sum(batch.seq_lens) * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    share = num_bytes / seconds / timed.copy_rate
    return share if share == share else None


def _time_decode(report: Report, item: str, timed: Timed, num_rows: int) -> None:
    """Time one layer's attention, FlashInfer's and ours."""
    shape, device = timed.shape, timed.device
    batch, q_BHD, kv, reference = _random_step(shape, ((timed.context - 1, 1),) * num_rows)
    indices, wrapper = indices_of(batch, shape.page_size), decode_wrapper(timed.library, timed.workspace)
    plan_ms = _plan_ms(lambda: plan_decode(wrapper, shape, indices), device)
    reference_s = median_s(reference, device)  # it writes the keys that both read
    seconds = median_s(lambda: wrapper.run(q_BHD, kv), device, inner=10)
    report(
        item,
        **_verdict(largest_error(wrapper.run(q_BHD, kv), reference().double())),
        us=1e6 * seconds,
        copy_bandwidth_share=_share(timed, batch, seconds),
        reference_us=1e6 * reference_s,
        plan_ms=plan_ms,
    )


def _try_graph(report: Report, item: str, timed: Timed, num_rows: int) -> None:
    """Capture decode, replay it on the lengths of the capture and on others, and compare with eager calls."""
    shape, device, library = timed.shape, timed.device, timed.library
    batches = list(_two_lengths(shape, num_rows, timed.context))
    most_pages = max(int(indices.indptr[-1]) for indices in batches)
    batch, q_BHD, kv, _ = _random_step(shape, ((timed.context - 1, 1),) * num_rows)
    out = torch.zeros_like(q_BHD)
    wrapper = graph_wrapper(library, timed.workspace, num_rows, most_pages)
    plan_decode(wrapper, shape, batches[0])
    captured = capture(lambda: wrapper.run(q_BHD, kv, out=out), device)
    same_bits, worst = [], 0.0
    for indices in batches:
        plan_decode(wrapper, shape, indices)
        eager = wrapper.run(q_BHD, kv).clone()
        out.zero_()
        captured.replay()
        wait(device)
        same_bits.append(bool(torch.equal(out, eager)))
        plain = decode_wrapper(library, torch.zeros_like(timed.workspace))
        plan_decode(plain, shape, indices)
        error = largest_error(out, plain.run(q_BHD, kv).double())
        worst = error if error != error else max(worst, error)
    plan_decode(wrapper, shape, batches[0])
    replay_s = median_s(captured.replay, device, inner=10)
    eager_s = median_s(lambda: wrapper.run(q_BHD, kv, out=out), device, inner=10)
    verdict = _verdict(worst)
    report(
        item,
        **verdict | {"ok": verdict["ok"] and all(same_bits)},
        replay_is_eager=same_bits[0],
        replay_is_eager_at_other_lengths=same_bits[1],
        replay_us=1e6 * replay_s,
        eager_us=1e6 * eager_s,
        saved_us=1e6 * (eager_s - replay_s),
        copy_bandwidth_share=_share(timed, batch, replay_s),
        plan_ms=_plan_ms(lambda: plan_decode(wrapper, shape, batches[0]), device),
    )
    with attempt(report, f"fast_decode_plan, {num_rows} rows"):
        _time_fast_plan(report, f"fast_decode_plan, {num_rows} rows", timed, wrapper, batches[0])


def _two_lengths(shape: AttentionShape, num_rows: int, context: int) -> Iterator[Indices]:
    for start in (context - 1, context // 2):
        batch, _ = make_batch(((start, 1),) * num_rows, shape.page_size, shape.device)
        yield indices_of(batch, shape.page_size)


def _time_fast_plan(report: Report, item: str, timed: Timed, wrapper: Any, indices: Indices) -> None:
    """Time the plan that leaves the buffers of a graph alone and takes what it needs from the host."""

    def plan() -> None:
        plan_decode_again(timed.library, wrapper, timed.shape, indices)

    report(item, plan_ms=_plan_ms(plan, timed.device))


def _time_prefill(report: Report, item: str, timed: Timed, num_tokens: int) -> None:
    """Time one layer's attention over one prompt, FlashInfer's and ours."""
    shape, device = timed.shape, timed.device
    batch, q_THD, kv, reference = _random_step(shape, ((0, num_tokens),))
    wrapper, indices = prefill_wrapper(timed.library, timed.workspace), indices_of(batch, shape.page_size)
    plan_ms = _plan_ms(lambda: plan_prefill(wrapper, shape, indices), device)
    reference_s = median_s(reference, device)  # it writes the keys that both read
    seconds = median_s(lambda: wrapper.run(q_THD, kv), device, inner=5)
    report(
        item,
        **_verdict(largest_error(wrapper.run(q_THD, kv), reference().double())),
        us=1e6 * seconds,
        tflops=2 * shape.num_heads * shape.head_dim * num_tokens**2 / seconds / 1e12,
        reference_us=1e6 * reference_s,
        plan_ms=plan_ms,
    )
