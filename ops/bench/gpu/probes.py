"""Phase `probes`: what the device can do at best, whatever the program: copies, products, launches, waits.

Every figure is a median of several. Buffers hold random numbers and are larger than the caches; times of the device are
those of its own events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ops.bench.gpu.phase import Report, Scale, Skip, attempt

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
LATENCY_BYTES: Final = 4096
NUM_LAUNCHES: Final = 500
"""Fewer than the launches that CUDA queues before the host has to wait."""
HOLD_CYCLES: Final = 40_000_000
"""About 20 ms of a GPU that spins, so that all launches are queued before the first of them runs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a probe moves and computes."""

    copy_bytes: int
    matrix: int
    transfer_bytes: int
    rounds: int


SIZES: Final = {
    "toy": Sizes(copy_bytes=1 << 20, matrix=64, transfer_bytes=1 << 20, rounds=3),
    "small": Sizes(copy_bytes=1 << 28, matrix=1024, transfer_bytes=1 << 24, rounds=5),
    "full": Sizes(copy_bytes=1 << 30, matrix=8192, transfer_bytes=1 << 28, rounds=15),
}


def run(scale: Scale, report: Report) -> None:
    """Measure each limit of the device alone."""
    sizes, device = SIZES[scale.size], torch.device(scale.device)
    with attempt(report, "copy on the device"):
        _copy(sizes, device, report)
    for dtype in DTYPES:
        with attempt(report, f"matmul {_name(dtype)}"):
            _matmul(sizes, device, dtype, report)
    with attempt(report, "small torch operation"):
        _operation(sizes, device, report)
    with attempt(report, "empty kernel"):
        _launch(sizes, device, report)
    for pinned in (True, False):
        name = "pinned" if pinned else "pageable"
        with attempt(report, f"transfers, {name}"):
            _transfers(sizes, device, report, name, pinned=pinned)
    with attempt(report, "waits"):
        _waits(sizes, device, report)


def median_s(device: torch.device, rounds: int, action: Callable[[], object]) -> float:
    """Return the seconds that *action* keeps the device busy: the median of *rounds*, after two to warm up."""
    took_s = []
    for number in range(2 + rounds):
        if device.type == "cuda":
            began, ended = _events()
            began.record()
            action()
            ended.record()
            ended.synchronize()
            one_s: float = began.elapsed_time(ended) / 1000
        else:
            one_s = host_s(action)
        if number >= 2:
            took_s.append(one_s)
    return statistics.median(took_s)


def host_s(action: Callable[[], object]) -> float:
    """Return the seconds that *action* takes by the host's clock."""
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def _copy(sizes: Sizes, device: torch.device, report: Report) -> None:
    source = torch.randint(256, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_s(device, sizes.rounds, lambda: target.copy_(source))
    moved = 2 * source.nbytes  # read and written
    report("copy on the device", gb_per_s=moved / seconds / 1e9, ms=seconds * 1e3, buffer_mib=sizes.copy_bytes / 2**20)


def _matmul(sizes: Sizes, device: torch.device, dtype: torch.dtype, report: Report) -> None:
    size = sizes.matrix
    if device.type == "cpu" and dtype is torch.float16:
        size //= 4  # many a CPU has no instructions for it, and torch takes a hundred times as long
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = median_s(device, sizes.rounds, lambda: torch.mm(left, right, out=out))
    report(f"matmul {_name(dtype)}", tflop_per_s=2 * size**3 / seconds / 1e12, ms=seconds * 1e3, size=size)


def _operation(sizes: Sizes, device: torch.device, report: Report) -> None:
    """What the host pays for one operation of torch on one number: dispatch and launch."""
    number = torch.zeros(1, device=device)
    host_us, device_us = _launched(sizes, device, lambda: number.add_(1))
    report("small torch operation", host_us=host_us, device_us=device_us)


def _launch(sizes: Sizes, device: torch.device, report: Report) -> None:
    _need_cuda(device)
    host_us, device_us = _launched(sizes, device, lambda: torch.cuda._sleep(0))  # type: ignore[no-untyped-call]
    report("empty kernel", host_us=host_us, device_us=device_us)


def _launched(sizes: Sizes, device: torch.device, launch: Callable[[], object]) -> tuple[float, float | None]:
    """Return the host's µs for one of many launches in a row, and the device's where they run back to back."""

    def many() -> None:
        for _ in range(NUM_LAUNCHES):
            launch()

    many()
    host = []
    for _ in range(sizes.rounds):
        _synchronize(device)
        host.append(host_s(many))
    host_us = statistics.median(host) / NUM_LAUNCHES * 1e6
    if device.type == "cpu":
        return host_us, None
    on_device_ms = []
    for _ in range(sizes.rounds):
        began, ended = _events()
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
        began.record()
        many()
        ended.record()
        ended.synchronize()
        on_device_ms.append(began.elapsed_time(ended))
    return host_us, statistics.median(on_device_ms) / NUM_LAUNCHES * 1e3


def _transfers(sizes: Sizes, device: torch.device, report: Report, name: str, *, pinned: bool) -> None:
    _need_cuda(device)

    def pair(num_bytes: int) -> tuple[Tensor, Tensor]:
        host = torch.randint(256, (num_bytes,), dtype=torch.uint8)
        return (host.pin_memory() if pinned else host), torch.empty(num_bytes, dtype=torch.uint8, device=device)

    host, there = pair(sizes.transfer_bytes)
    little, little_there = pair(LATENCY_BYTES)

    def waited(target: Tensor, source: Tensor) -> Callable[[], None]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return copy

    def seconds(copy: Callable[[], None], rounds: int) -> float:
        copy()
        return statistics.median(host_s(copy) for _ in range(rounds))

    report(
        f"transfers, {name}",
        to_device_gb_per_s=host.nbytes / seconds(waited(there, host), sizes.rounds) / 1e9,
        to_host_gb_per_s=host.nbytes / seconds(waited(host, there), sizes.rounds) / 1e9,
        to_device_4k_us=seconds(waited(little_there, little), 20 * sizes.rounds) * 1e6,
        to_host_4k_us=seconds(waited(little, little_there), 20 * sizes.rounds) * 1e6,
    )


def _waits(sizes: Sizes, device: torch.device, report: Report) -> None:
    """What it costs to wait: for an idle device, for one small kernel, for an event, for a number."""
    _need_cuda(device)
    number = torch.zeros(1, device=device)
    event, _ = _events()

    def kernel() -> None:
        number.add_(1)
        torch.cuda.synchronize()

    def recorded() -> None:
        number.add_(1)
        event.record()
        event.synchronize()

    def median_us(action: Callable[[], object]) -> float:
        action()
        return statistics.median(host_s(action) for _ in range(20 * sizes.rounds)) * 1e6

    torch.cuda.synchronize()
    report(
        "waits",
        idle_synchronize_us=median_us(torch.cuda.synchronize),
        kernel_and_synchronize_us=median_us(kernel),
        kernel_and_event_us=median_us(recorded),
        item_us=median_us(number.item),
    )


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return began, ended


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skip("needs a GPU")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
