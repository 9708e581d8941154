"""Captures calls in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops.bench.gpu.phase import Skip

WARM_CALLS = 3
"""A library may allocate or compile in its first calls, which a capture does not allow."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A recorded call: it reads and writes the tensors that it was recorded with."""

    replay: Callable[[], object]


def capture(call: Callable[[], object], device: torch.device) -> Captured:
    """Record *call*, which makes no tensor that outlives it.

    Raises:
        Skip: The device has no graphs.
    """
    if device.type != "cuda":
        raise Skip("a CPU has no CUDA graphs")
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_CALLS):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    first_error: Exception | None = None
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            try:
                call()
            except Exception as error:
                first_error = error
                raise
    except Exception as error:  # the end of a broken capture raises too, and says less
        raise first_error or error from None
    torch.cuda.synchronize(device)
    return Captured(graph.replay)
