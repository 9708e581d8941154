"""What the tests of `resolve` share: a machine with some kernels or none, and what the numerics of every engine say."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import pytest
import torch

from stages.generate.kernels import library
from stages.generate.sampling.sampler import VERSION as SAMPLER
from stages.generate.setup import resolve as resolve_module
from stages.generate.setup.config import EngineConfig

CPU = EngineConfig(device="cpu")
H100 = "NVIDIA H100 80GB HBM3"
NONE = "this build has no kernels"
BOTH = ("avx512", "avx2")
LAST = f"sampler-{SAMPLER}/llguidance-{metadata.version('llguidance')}"
TORCH = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability().lower()}"


class Kernels:
    """A machine on which *variants* of the kernels run, and on which torch multiplies bfloat16 slowly or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self(())

    def __call__(self, variants: Sequence[str], *, slow: bool = False) -> None:
        self._monkeypatch.setattr(library, "available", lambda: tuple(variants))
        self._monkeypatch.setattr(library, "reason", lambda name="": "the CPU lacks it" if variants else NONE)
        self._monkeypatch.setattr(resolve_module, "bfloat16_is_slow", lambda: slow)
