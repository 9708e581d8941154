"""Experts that are computed together give what they give one after the other, and nothing waits for a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.pretend_cuda import CUDA, OnDevice, Waited, pretend_cuda

from stages.generate.forward import weights
from stages.generate.forward.weights import load_weights
from stages.generate.model.config import read_spec
from stages.generate.model.layers.experts import Experts, GroupedExperts, can_group
from stages.generate.model.layers.linear import Linear
from stages.generate.model.layers.mlp import Mlp

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 16, 24, 6


def both(dtype: torch.dtype = torch.float32, *, normalize: bool = True) -> tuple[Experts, GroupedExperts]:
    torch.manual_seed(0)
    router_XE = torch.randn(NUM_EXPERTS, HIDDEN).to(dtype)
    gate_up_XOE = (torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 4).to(dtype)
    down_XEI = (torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE) / 5).to(dtype)
    each = [Mlp(Linear(gate_up, None), Linear(down, None)) for gate_up, down in zip(gate_up_XOE, down_XEI, strict=True)]
    router = Linear(router_XE, None)
    return Experts(router, each, 2, normalize), GroupedExperts(router, gate_up_XOE, down_XEI, 2, normalize)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 50])
def test_all_experts_at_once_give_what_one_after_the_other_gives(num_tokens: int, normalize: bool) -> None:
    loop, grouped = both(normalize=normalize)
    x_TE = torch.randn(num_tokens, HIDDEN)
    torch.testing.assert_close(grouped(x_TE), loop(x_TE), atol=1e-5, rtol=1e-5)


def test_in_bfloat16_both_are_as_near_to_float32() -> None:
    x_TE = torch.randn(40, HIDDEN).bfloat16()
    exact_TE = both()[0](x_TE.float())
    errors = [float((experts(x_TE).float() - exact_TE).norm()) for experts in both(torch.bfloat16)]
    assert 0 < errors[1] <= 1.1 * errors[0]


def test_a_token_does_not_depend_on_its_company() -> None:
    _, grouped = both()
    x_TE = torch.randn(20, HIDDEN)
    torch.testing.assert_close(grouped(x_TE)[7:8], grouped(x_TE[7:8]))


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, grouped = both()
    x_TE = torch.randn(9, HIDDEN)
    router = Linear(OnDevice(loop.router.weight_OI), None)
    there = replace(
        grouped, router=router, gate_up_XOE=OnDevice(grouped.gate_up_XOE), down_XEI=OnDevice(grouped.down_XEI)
    )
    with pretend_cuda(monkeypatch):
        y_TE = there(OnDevice(x_TE))
        with pytest.raises(Waited):
            replace(loop, router=router)(OnDevice(x_TE))
    assert isinstance(y_TE, OnDevice)
    torch.testing.assert_close(y_TE.held, loop(x_TE))


def test_where_they_are_grouped_each_kind_of_matrix_is_one_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "qwen3moe"))
    apart = load_weights(spec, tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(weights, "can_group", lambda *_: True)
    together = load_weights(spec, tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    names = [name for name in together if ".experts." in name]
    assert len(names) == 2 * len(spec.experts.layers) and len(together) < len(apart)
    for name in names:
        prefix, kind = name.split(".experts.")
        stacked = torch.stack(
            [apart[f"{prefix}.experts.{expert}.{kind}"] for expert in range(spec.experts.num_experts)]
        )
        assert torch.equal(together[name], stacked)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "expected"),
    [
        ((9, 0), torch.bfloat16, 768, True),
        ((8, 0), torch.bfloat16, 8, True),
        ((7, 5), torch.bfloat16, 768, False),
        ((9, 0), torch.float16, 768, False),
        ((9, 0), torch.bfloat16, 764, False),
    ],
)
def test_they_are_grouped_where_torch_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, size: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert can_group(dtype, CUDA, 2048, size) is expected
    assert not can_group(dtype, torch.device("cpu"), 2048, size)
