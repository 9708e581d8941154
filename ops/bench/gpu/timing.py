"""How long something takes on a device, and how fast it copies and multiplies. On a CPU the clock is the host's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

ROUNDS: Final = 7
"""The median of so many counts."""
WARM_ROUNDS: Final = 2
MOST_S: Final = 1.0
"""No further round begins after so many seconds."""
COPY_BYTES: Final = {"toy": 2**20, "small": 2**26, "full": 2**30}
"""By size: of the buffer that is copied; a GPU's must be far larger than its cache."""
MATMUL_SIZE: Final = {"toy": 64, "small": 512, "full": 8192}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over some calls."""

    host_s: float
    """Until the call returns."""
    total_s: float
    """Until the device has finished."""


def wait(device: torch.device) -> None:
    """Return when *device* has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(call: Callable[[], object], device: torch.device, *, rounds: int = ROUNDS, inner: int = 1) -> float:
    """Return the median seconds of one call, where *inner* calls are given to the device at a time."""
    for _ in _repeated(WARM_ROUNDS):
        call()
        wait(device)
    return statistics.median(_round_s(call, device, inner) / inner for _ in _repeated(rounds))


def _repeated(rounds: int) -> Iterator[int]:
    """Yield *rounds* times, or until MOST_S have passed; once at least."""
    ends_s = time.perf_counter() + MOST_S
    for number in range(rounds):
        if number and time.perf_counter() > ends_s:
            return
        yield number


def step_times(call: Callable[[], object], device: torch.device, *, rounds: int = ROUNDS) -> StepTimes:
    """Return how long a call takes to return, and to finish; the device has nothing to do before."""
    for _ in _repeated(WARM_ROUNDS):
        call()
        wait(device)
    host_s, total_s = [], []
    for _ in _repeated(rounds):
        wait(device)
        began_s = time.perf_counter()
        call()
        host_s.append(time.perf_counter() - began_s)
        wait(device)
        total_s.append(time.perf_counter() - began_s)
    return StepTimes(statistics.median(host_s), statistics.median(total_s))


def copy_bytes_per_s(device: torch.device, size: str) -> float:
    """Return the bytes that a copy on the device reads and writes in a second, both counted."""
    source = torch.ones(COPY_BYTES[size], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), device, inner=4)


def matmul_flops_per_s(device: torch.device, size: str, dtype: torch.dtype) -> float:
    """Return the operations that a large matrix product does in a second; a product and its sum are two."""
    side = MATMUL_SIZE[size]
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_s(lambda: one @ other, device, inner=4)


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Return normal random numbers, the same ones each time on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def _round_s(call: Callable[[], object], device: torch.device, inner: int) -> float:
    if device.type != "cuda":
        began_s = time.perf_counter()
        for _ in range(inner):
            call()
        return time.perf_counter() - began_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(inner):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
