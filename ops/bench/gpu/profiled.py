"""What the device did during a call: its kernels, how long each took in all, and how long it had nothing to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from ops.bench.gpu.phase import Figures, Skip
from ops.bench.gpu.timing import wait

NAME_CHARS: Final = 90
"""The rest of a kernel's name is cut: template arguments fill pages."""


def profiled(call: Callable[[], object], device: torch.device, most: int) -> Figures:
    """Return what the device does in *call*, which has run before; see `summary`.

    Raises:
        Skip: The profiler sees nothing.
    """
    is_cuda = device.type == "cuda"
    wait(device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        call()
        wait(device)
    # The events as kineto gives them: torch makes a tree of Python objects of them, which takes minutes for 100,000.
    results: Any = found.profiler.kineto_results
    wanted = "CUDA" if is_cuda else "CPU"
    seen = [event for event in results.events() if event.device_type().name == wanted]
    if not seen:
        raise Skip("the profiler saw nothing on the device; it may not be allowed to count here")
    return summary([(event.name(), event.start_ns(), event.duration_ns()) for event in seen], most)


def summary(events: list[tuple[str, int, int]], most: int) -> Figures:
    """Return the figures of (name, begin, length in nanoseconds) of each kernel; they may overlap.

    `device_ms` is when at least one ran, `gap_share` the share of the time from the first begin to the last end in
    which none did. The *most* kernels that took longest in all are named.
    """
    counts: Counter[str] = Counter()
    totals_ns: Counter[str] = Counter()
    busy_ns, end_ns = 0, 0
    for name, begin_ns, length_ns in sorted(events, key=lambda event: event[1]):
        counts[name[:NAME_CHARS]] += 1
        totals_ns[name[:NAME_CHARS]] += length_ns
        busy_ns += max(0, begin_ns + length_ns - max(begin_ns, end_ns))
        end_ns = max(end_ns, begin_ns + length_ns)
    span_ns = end_ns - min((begin_ns for _, begin_ns, _ in events), default=end_ns)
    longest = totals_ns.most_common(most)
    return {
        "kernels": len(events),
        "device_ms": busy_ns / 1e6,
        "gap_share": 1 - busy_ns / span_ns if span_ns else 0.0,
        "longest": [{"kernel": name, "count": counts[name], "ms": total_ns / 1e6} for name, total_ns in longest],
    }
