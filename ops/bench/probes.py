"""The limits of this machine, measured: bytes read per second, and matrix operations per second.

Each probe tries several methods, because no method is the fastest everywhere; the fastest is the machine's limit. The
methods go round so many buffers that no cache holds the next one, with the engine's number of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stages.generate.model.layers.linear import Linear, can_pack, pack

# T = tokens, I = inputs, O = outputs

MIB: Final = 2**20
NUM_BUFFERS: Final = 8
LEAST_BYTES: Final = 512 * MIB
"""Bytes of all buffers together; more if that is less than eight times the largest cache."""
GEMM_SIZE: Final = 2048
"""Rows and columns of a weight."""
GEMM_TOKENS: Final = 512
ROUNDS: Final = 3
"""The best round counts: other programs may use the machine, too."""

Method: TypeAlias = Callable[[int], object]
"""Works on buffer number i."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The result of one method."""

    method: str
    per_s: float
    """Bytes, or operations: two for a multiplication and its addition."""


def best(rates: Sequence[Rate]) -> Rate:
    """Return the fastest."""
    return max(rates, key=lambda rate: rate.per_s)


def read_bandwidth(device: torch.device, threads: int, *, total_bytes: int = 0) -> list[Rate]:
    """Return the bytes that each method moves per second; a copy counts as reading and writing.

    *total_bytes* 0 means enough for this machine's caches.
    """
    size = (total_bytes or max(LEAST_BYTES, 8 * largest_cache_bytes())) // NUM_BUFFERS // 4
    with using_threads(threads), ThreadPoolExecutor(threads) as pool:
        buffers = [torch.full((size,), float(index), device=device) for index in range(NUM_BUFFERS)]
        one_bytes = buffers[0].nbytes

        def following(index: int) -> Tensor:
            return buffers[(index + 1) % NUM_BUFFERS]

        methods: list[tuple[str, int, Method]] = [
            ("torch sum", one_bytes, lambda index: buffers[index].sum()),
            ("torch max", one_bytes, lambda index: buffers[index].amax()),
            ("torch copy", 2 * one_bytes, lambda index: following(index).copy_(buffers[index])),
        ]
        if device.type == "cpu":
            arrays = [buffer.numpy() for buffer in buffers]
            bounds = [(size * part // threads, size * (part + 1) // threads) for part in range(threads)]

            def numpy_sum(index: int) -> None:
                list(pool.map(lambda bound: np.add.reduce(arrays[index][slice(*bound)]), bounds))

            def memcpy(index: int) -> None:
                to, source = following(index).data_ptr(), buffers[index].data_ptr()
                list(pool.map(lambda b: ctypes.memmove(to + 4 * b[0], source + 4 * b[0], 4 * (b[1] - b[0])), bounds))

            methods += [("numpy sum", one_bytes, numpy_sum), ("memcpy", 2 * one_bytes, memcpy)]
        return [Rate(name, num_bytes / _seconds(method, device)) for name, num_bytes, method in methods]


def gemm_rate(
    device: torch.device, dtype: torch.dtype, threads: int, *, size: int = GEMM_SIZE, tokens: int = GEMM_TOKENS
) -> list[Rate]:
    """Return the operations per second of a linear layer over *tokens* rows, plain and packed, in *dtype* and float32.

    Methods that this machine lacks are left out.
    """
    rates = []
    with using_threads(threads):
        for kind in dict.fromkeys((dtype, torch.float32)):
            name = str(kind).removeprefix("torch.")
            weights = [torch.randn(size, size, device=device).to(kind) for _ in range(NUM_BUFFERS)]
            x_TI = torch.randn(tokens, size, device=device).to(kind)
            layers: list[tuple[str, list[Linear]]] = [(f"F.linear {name}", [Linear(one, None) for one in weights])]
            if device.type == "cpu" and can_pack(kind):
                layers.append((f"packed {name}", [Linear(pack(one), None) for one in weights]))
            for method, linears in layers:
                seconds = _seconds(partial(_multiply, linears, x_TI), device)
                rates.append(Rate(method, 2 * tokens * size * size / seconds))
    return rates


def _multiply(linears: Sequence[Linear], x_TI: Tensor, index: int) -> Tensor:
    with torch.inference_mode():
        return linears[index](x_TI)


def _seconds(method: Method, device: torch.device) -> float:
    """Return the seconds per buffer of the best round, after a warm-up round."""
    best_s = float("inf")
    for number in range(1 + ROUNDS):
        began_s = time.perf_counter()
        for index in range(NUM_BUFFERS):
            method(index)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            best_s = min(best_s, time.perf_counter() - began_s)
    return best_s / NUM_BUFFERS


@contextlib.contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Let torch use *threads* threads until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest_cache_bytes() -> int:
    """Return the size of the CPU's largest cache, by Linux; 0 if it is unknown."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)
