"""Phase `probes`: what the device can do at best, whatever the program: copies, products, launches, waits.

Every figure is a median of several. Buffers hold random numbers and are larger than the caches; times of the device are
those of its own events.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from ops.bench.gpu.phase import Figures, Report, Scale, Skip, report_each
from ops.bench.gpu.timing import (
    COPY_BYTES,
    MATMUL_SIZE,
    copy_bytes_per_s,
    host_s,
    matmul_flops_per_s,
    round_s,
    step_times,
    wait,
)

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TRANSFER_BYTES: Final = {"toy": 2**20, "small": 2**24, "full": 2**28}
LATENCY_BYTES: Final = 4096
ROUNDS: Final = {"toy": 3, "small": 5, "full": 15}
NUM_LAUNCHES: Final = 500
"""Fewer than the launches that CUDA queues before the host has to wait."""
HOLD_CYCLES: Final = 40_000_000
"""About 20 ms of a GPU that spins, so that all launches are queued before the first of them runs."""


def run(scale: Scale, report: Report) -> None:
    """Measure each limit of the device alone."""
    size, device = scale.size, torch.device(scale.device)
    products = {f"matmul {name}": partial(_matmul, size, device, dtype) for name, dtype in DTYPES.items()}
    report_each(
        report,
        {
            "copy on the device": lambda: _copy(size, device),
            **products,
            "small torch operation": lambda: _operation(size, device),
            "empty kernel": lambda: _launch(size, device),
            "transfers, pinned": lambda: _transfers(size, device, pinned=True),
            "transfers, pageable": lambda: _transfers(size, device, pinned=False),
            "waits": lambda: _waits(size, device),
        },
    )


def _copy(size: str, device: torch.device) -> Figures:
    rate, num_bytes = copy_bytes_per_s(device, size), COPY_BYTES[size]
    return {"gb_per_s": rate / 1e9, "ms": 2e3 * num_bytes / rate, "buffer_mib": num_bytes / 2**20}


def _matmul(size: str, device: torch.device, dtype: torch.dtype) -> Figures:
    side = MATMUL_SIZE[size]
    if device.type == "cpu" and dtype is torch.float16:
        side //= 4  # many a CPU has no instructions for it, and torch takes a hundred times as long
    rate = matmul_flops_per_s(device, side, dtype)
    return {"tflop_per_s": rate / 1e12, "ms": 2e3 * side**3 / rate, "size": side}


def _operation(size: str, device: torch.device) -> Figures:
    """What the host pays for one operation of torch on one number: dispatch and launch."""
    number = torch.zeros(1, device=device)
    return _launched(size, device, lambda: number.add_(1))


def _launch(size: str, device: torch.device) -> Figures:
    _need_cuda(device)
    return _launched(size, device, lambda: torch.cuda._sleep(0))  # type: ignore[no-untyped-call]


def _launched(size: str, device: torch.device, launch: Callable[[], object]) -> Figures:
    """Return the host's µs for one of many launches in a row, and the device's where they run back to back."""
    times_us: dict[str, list[float]] = {"host_us": [], "device_us": []}
    for _ in range(1 + ROUNDS[size]):
        wait(device)
        times_us["host_us"].append(host_s(launch, NUM_LAUNCHES) / NUM_LAUNCHES * 1e6)
        if device.type == "cuda":
            wait(device)
            torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
            times_us["device_us"].append(round_s(launch, device, NUM_LAUNCHES) / NUM_LAUNCHES * 1e6)
    return {name: statistics.median(times[1:]) if times else None for name, times in times_us.items()}


def _transfers(size: str, device: torch.device, *, pinned: bool) -> Figures:
    _need_cuda(device)

    def seconds(num_bytes: int, rounds: int) -> tuple[float, float]:
        """Return the time of a copy to the device, and to the host."""
        host = torch.randint(256, (num_bytes,), dtype=torch.uint8)
        host = host.pin_memory() if pinned else host
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        to_device = step_times(lambda: there.copy_(host, non_blocking=True), device, rounds=rounds)
        to_host = step_times(lambda: host.copy_(there, non_blocking=True), device, rounds=rounds)
        return to_device.total_s, to_host.total_s

    num_bytes = TRANSFER_BYTES[size]
    to_device_s, to_host_s = seconds(num_bytes, ROUNDS[size])
    little_to_device_s, little_to_host_s = seconds(LATENCY_BYTES, 20 * ROUNDS[size])
    return {
        "to_device_gb_per_s": num_bytes / to_device_s / 1e9,
        "to_host_gb_per_s": num_bytes / to_host_s / 1e9,
        "to_device_4k_us": little_to_device_s * 1e6,
        "to_host_4k_us": little_to_host_s * 1e6,
    }


def _waits(size: str, device: torch.device) -> Figures:
    """What it costs to wait: for an idle device, for one small kernel, for an event, for a number."""
    _need_cuda(device)
    number, event = torch.zeros(1, device=device), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def kernel() -> None:
        number.add_(1)
        torch.cuda.synchronize()

    def recorded() -> None:
        number.add_(1)
        event.record()
        event.synchronize()

    waits = {
        "idle_synchronize_us": torch.cuda.synchronize,
        "kernel_and_synchronize_us": kernel,
        "kernel_and_event_us": recorded,
        "item_us": number.item,
    }
    figures = {}
    for name, action in waits.items():
        action()
        figures[name] = statistics.median(host_s(action) for _ in range(20 * ROUNDS[size])) * 1e6
    return figures


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skip("needs a GPU")
