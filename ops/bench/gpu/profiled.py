"""What the device did during a call: its kernels, how long each took in all, and how long it had nothing to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from ops.bench.gpu.phase import Skip
from ops.bench.gpu.timing import wait

NAME_CHARS: Final = 90
"""The rest of a kernel's name is cut: template arguments fill pages."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernels, copies and fills of one call; on a CPU torch's operations."""

    num_kernels: int
    busy_s: float
    """At least one of them ran."""
    span_s: float
    """From the begin of the first one to the end of the last one."""
    longest: tuple[tuple[str, int, float], ...]
    """(name, how often, seconds in all), the longest ones first."""

    @property
    def gap_share(self) -> float:
        """The share of the span in which the device had nothing to do."""
        return 1 - self.busy_s / self.span_s if self.span_s else 0.0

    def figures(self, most: int) -> dict[str, object]:
        """Return it for a report, with the *most* longest kernels."""
        return {
            "kernels": self.num_kernels,
            "device_ms": 1e3 * self.busy_s,
            "gap_share": self.gap_share,
            "longest": [
                {"kernel": name, "count": count, "ms": 1e3 * seconds} for name, count, seconds in self.longest[:most]
            ],
        }


def profiled(call: Callable[[], object], device: torch.device) -> Profile:
    """Return what the device does in *call*, which has run before.

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
    return summary([(event.name(), event.start_ns(), event.duration_ns()) for event in seen])


def summary(events: list[tuple[str, int, int]]) -> Profile:
    """Return the profile of (name, begin, length in nanoseconds) of each kernel; they may overlap."""
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    busy_ns, end_ns = 0, 0
    for name, begin_ns, length_ns in sorted(events, key=lambda event: event[1]):
        counts[name[:NAME_CHARS]] += 1
        totals[name[:NAME_CHARS]] += length_ns
        busy_ns += max(0, begin_ns + length_ns - max(begin_ns, end_ns))
        end_ns = max(end_ns, begin_ns + length_ns)
    span_ns = end_ns - min((begin_ns for _, begin_ns, _ in events), default=end_ns)
    longest = tuple((name, counts[name], total_ns / 1e9) for name, total_ns in totals.most_common())
    return Profile(len(events), busy_ns / 1e9, span_ns / 1e9, longest)
