"""Where a test computes: on this CPU and on a GPU. Those on a GPU are marked `gpu`; `make gpu-check` runs them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

import pytest
import torch
from support import triton_double
from support.flashinfer_double import Double, fake_record
from support.flashinfer_signatures import VERSIONS

from stages.generate.attention import AttentionShape, flashinfer
from stages.generate.forward import graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICES: Final = (pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu))


def flashinfer_double(monkeypatch: pytest.MonkeyPatch, version: str = VERSIONS[0]) -> Double:
    """Put a double of FlashInfer in its place."""
    double = Double(version)
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    return double


def need_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a double of Triton compute on a CPU."""
    if device.type == "cpu":
        made = triton_double.modules()
        for name in (*made, *triton_double.KERNELS):  # so that they are forgotten after the test
            monkeypatch.setitem(sys.modules, name, made.get(name, ModuleType(name)))
        for name in triton_double.KERNELS:
            del sys.modules[name]


def need_flashinfer(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    *,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    prefill: str = "fa2",
) -> None:
    """Let doubles of FlashInfer and of CUDA graphs compute on a CPU; skip the test on a GPU without FlashInfer."""
    if device.type == "cpu":
        flashinfer_double(monkeypatch)
        monkeypatch.setattr(graphs, "record", fake_record)
    elif reason := flashinfer.why_not(AttentionShape(8, 2, head_dim, 16, 0, dtype, device), prefill):
        pytest.skip(f"FlashInfer cannot be used here: {reason}")
