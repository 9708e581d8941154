"""The attention of torch on a device that is no CPU. What it computes on one: test_attention.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention_cases import make_case, make_plan
from support.pretend_cuda import CUDA, OnDevice, pretend_cuda

from stages.generate.attention import AttentionShape
from stages.generate.attention.torch import TorchAttention
from stages.generate.batch import build_batch


@pytest.mark.parametrize("rows", [[(70, 1), (3, 1), (0, 1)], [(70, 1), (2, 9)], [(0, 9)], [(5, 1)] * 4 + [(600, 600)]])
@pytest.mark.parametrize("window", [0, 7])
def test_on_a_gpu_all_its_tensors_are_there_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int]], window: int
) -> None:
    shape = AttentionShape(6, 2, 20, 4, window)
    case = make_case(shape, rows, torch.float32, torch.device("cpu"))
    plan, tables, _ = make_plan(rows, 4)
    tables.update(plan.rows)
    with pretend_cuda(monkeypatch):
        attend = TorchAttention(replace(shape, device=CUDA)).plan(build_batch(plan, tables, CUDA))
        o_THD = attend(*map(OnDevice, (case.q_THD, case.k_TKD, case.v_TKD, case.kv_2PKSD)))
    assert isinstance(o_THD, OnDevice)
    torch.testing.assert_close(o_THD.held.double(), case.expected(), atol=1e-5, rtol=1e-5)
