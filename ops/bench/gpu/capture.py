"""Captures calls in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops.bench.gpu.phase import Skip
from stages.generate.forward.graphs import record


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
    return Captured(record(call, device)[0])
