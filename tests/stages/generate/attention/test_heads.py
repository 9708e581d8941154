"""The kernel that normalises, rotates and stores heads computes what torch computes: on a double, and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import triton_double
from support.checkpoints import Family, make_checkpoint, make_engine
from support.devices import CPU, DEVICES
from support.flashinfer_double import Double
from support.plans import Request, plan, shuffled_pages
from torch import Tensor

from stages.generate.attention import AttentionShape, flashinfer, fused
from stages.generate.collectives import Collectives
from stages.generate.forward import engine as engine_module
from stages.generate.model.attention import places_of, write_pages
from stages.generate.model.decoder import Decoder
from stages.generate.model.layers.operations import Operations
from stages.generate.model.spec import ModelSpec

EPS, PAGE_SIZE, NUM_PAGES = 1e-1, 8, 12  # so that it is noticed
DTYPES = {"cpu": (torch.float16,), "cuda": (torch.float16, torch.bfloat16)}
FEW_BITS = 2e-3
"""The largest part of results that may differ by a last bit: sums of squares have another order, and a GPU's inverse
square root is not exact. Without the rounding after the norm, a third would."""


def kernel(device: torch.device) -> ModuleType:
    if device.type == "cuda":
        pytest.importorskip("triton")
    return triton_double.load("stages.generate.attention.heads", device)


def in_torch(
    heads_TMD: Tensor, weight_ND: Tensor | None, cos_sin_TD: Tensor | None, slots_T: Tensor, kv_2PKSD: Tensor
) -> Tensor:
    """Return q_THD and write keys and values, in float32, rounded where FlashInfer's kernels round."""
    dtype, num_kv = heads_TMD.dtype, kv_2PKSD.shape[2]
    num_q = heads_TMD.shape[1] - 2 * num_kv
    qk_TND, v_TKD = heads_TMD[:, :-num_kv].float(), heads_TMD[:, -num_kv:]
    if weight_ND is not None:
        factor = torch.rsqrt(qk_TND.square().mean(-1, keepdim=True) + EPS)
        qk_TND = (qk_TND * factor * weight_ND.float()).to(dtype).float()
    if cos_sin_TD is not None:
        cos, sin = cos_sin_TD[:, None].chunk(2, dim=-1)
        one, two = qk_TND.chunk(2, dim=-1)
        qk_TND = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    qk_TND = qk_TND.to(dtype)
    write_pages(kv_2PKSD, qk_TND[:, num_q:], v_TKD, places_of(slots_T, kv_2PKSD.shape[3]))
    return qk_TND[:, :num_q]


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize(("num_q", "num_kv", "head_dim"), [(4, 2, 64), (5, 1, 128), (3, 3, 16)])
@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_heads_are_those_of_torch_and_no_other_slot_changes(
    device: torch.device, num_q: int, num_kv: int, head_dim: int, num_tokens: int
) -> None:
    place_heads = kernel(device).place_heads
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    for dtype in DTYPES[device.type]:
        eps = torch.finfo(dtype).eps
        heads_TMD = normal(num_tokens, num_q + 2 * num_kv, head_dim).to(device, dtype)
        weights_ND = (1 + 0.3 * normal(num_q + num_kv, head_dim)).to(device, dtype)
        angle_TF = 50 * normal(num_tokens, head_dim // 2)
        tables_TD = torch.cat((angle_TF.cos(), angle_TF.sin()), dim=-1).to(device)
        slots_T = torch.randperm(NUM_PAGES * PAGE_SIZE, generator=generator)[:num_tokens].to(device, torch.int32)
        empty = torch.full((2, NUM_PAGES, num_kv, PAGE_SIZE, head_dim), float("nan"), dtype=dtype, device=device)
        for weight_ND in (None, weights_ND):
            for cos_sin_TD in (None, tables_TD):
                ours, theirs = empty.clone(), empty.clone()
                q_THD = place_heads(heads_TMD, weight_ND, EPS, cos_sin_TD, slots_T, ours)
                expected_THD = in_torch(heads_TMD, weight_ND, cos_sin_TD, slots_T, theirs)
                assert q_THD.is_contiguous() and torch.equal(ours.isnan(), theirs.isnan())
                for mine, other in ((q_THD, expected_THD), (ours.nan_to_num(), theirs.nan_to_num())):
                    torch.testing.assert_close(mine, other, rtol=2 * eps, atol=8 * eps)
                    differ = int((mine != other).sum())
                    assert differ <= (weight_ND is not None or device.type == "cuda") * (2 + FEW_BITS * mine.numel())


TOKENS = random.Random(3).choices(range(4, 480), k=60)


@torch.inference_mode()
def logits_of(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, place_heads: Any, **how: Any) -> Tensor:
    """Return the logits of a chunk, decode rows, and both in a step."""

    def decoder(
        spec: ModelSpec, weights: Any, collectives: Collectives, block_rows: int, operations: Operations
    ) -> Decoder:
        return Decoder(spec, weights, collectives, block_rows, replace(operations, place_heads=place_heads))

    monkeypatch.setattr(engine_module, "Decoder", decoder)
    engine = make_engine(folder, dtype, attention="fi", kernels="torch", **how)
    pages = shuffled_pages()
    first, second = (Request(table, list(TOKENS[10 * table :]), pages) for table in range(2))
    found = [engine.logits(plan(first.row(99)))]
    first.tokens.append(7)
    found.append(engine.logits(plan(first.row(1), second.row(30))))
    for last in (8, 9):
        first.tokens.append(last)
        found.append(engine.logits(plan(first.row(1), second.row(99))))
        second.tokens.append(last)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "head_dim"),
    [("llama3", 16), ("qwen2", 16), ("qwen3", 32), ("qwen3moe", 16), ("smollm3", 16), ("mistral", 32)],
)
def test_a_decoder_with_it_computes_the_same_logits(
    library: Double, family: Family, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, family, head_dim=head_dim)
    place_heads, calls = counting(kernel(CPU).place_heads)
    without, placed = (logits_of(folder, "float16", monkeypatch, each) for each in (None, place_heads))
    exact = logits_of(folder, "float32", monkeypatch, None)
    assert len(calls) == 8 and float((placed - without).norm() / without.norm()) < 0.02
    ours, theirs = (float((each - exact).norm() / exact.norm()) for each in (placed, without))
    assert ours < 1.2 * theirs


@pytest.mark.parametrize("family", ["gemma3", "phi3", "odd"])
def test_models_that_it_does_not_suit_do_without(
    library: Double, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_heads, calls = counting(kernel(CPU).place_heads)
    assert logits_of(make_checkpoint(tmp_path, family), "float16", monkeypatch, place_heads).isfinite().all()
    assert calls == []


def test_blocks_of_rows_do_without(library: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_heads, calls = counting(kernel(CPU).place_heads)
    folder = make_checkpoint(tmp_path, "qwen3", head_dim=32)
    assert logits_of(folder, "float16", monkeypatch, place_heads, deterministic=True).isfinite().all()
    assert calls == []


def counting(function: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[int]]:
    calls: list[int] = []

    def counted(*given: Any) -> Tensor:
        calls.append(1)
        return function(*given)

    return counted, calls


def test_it_needs_the_tables_of_flashinfers_rope(library: Double) -> None:
    shape = AttentionShape(8, 4, 64, 4, 0, torch.bfloat16, fused=True)
    module = kernel(CPU)
    beside = flashinfer.FlashInferAttention(shape).beside
    assert module.with_heads(beside) == replace(beside.operations, place_heads=module.place_heads)
    assert module.with_heads(fused.IN_TORCH) == Operations()
