"""Every attention on random pages amid NaN, against float64: on a CPU, with a double of FlashInfer, and on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from support.attention_cases import largest_error, make_case
from support.devices import DEVICES, need_flashinfer

from stages.generate.attention import ATTENTION, AttentionShape, fused
from stages.generate.attention.flashinfer import HEAD_DIMS, compile_kernels, kernels_of, load_library

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of attention, whose values are normally distributed."""
SHAPES = ((8, 2, 64, 0), (16, 8, 128, 0), (6, 3, 24, 7), (4, 1, 128, 100), (8, 8, 64, 1000), (16, 8, 128, 24))
"""Query heads, kv heads, head_dim, window: shorter than a page, than a row, and longer than all."""
DECODE_ROWS = ((70, 1), (3, 1), (0, 1), (1, 1), (15, 1), (16, 1), (300, 1))
CHUNKS = ((0, 9), (16, 5), (15, 17), (64, 64), (40, 270))
PLANS = 3
"""From the third one on, FlashInfer's short plan is used for decode rows."""


@pytest.mark.timeout(900)  # some compilers at once, on as many cores as there are
@pytest.mark.parametrize("device", DEVICES)
def test_flashinfers_kernels_compile_all_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test on a GPU: what the others need is in FlashInfer's cache then."""
    need_flashinfer(device, monkeypatch)
    library = load_library()
    shapes = [
        AttentionShape(8, 2, head_dim, 16, window, torch.bfloat16, device)
        for head_dim in (64, 128)
        for window in (0, 9)
    ]
    wanted = [*(kernels_of(library, shape) for shape in shapes), *fused.descriptions(library).values()]
    compile_kernels(library, shapes[0], others=wanted)
    assert [each.name for each in wanted if not each.is_compiled] == []


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_attention_agrees_with_float64_and_fills_the_pages(
    device: torch.device, name: str, dtype: torch.dtype, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses_flashinfer = "fi" in name
    if uses_flashinfer:
        need_flashinfer(device, monkeypatch, dtype=dtype, prefill="fa3" if "fa" in name else "fa2")
    if "fa" in name and device.type == "cuda" and os.environ.get("MINISGL_FA") != "1":
        pytest.skip("its kernels compile for minutes: make gpu-check ARGS='--only fa'")
    for number, sizes in enumerate(SHAPES if device.type == "cuda" else SHAPES[::3]):
        num_heads, num_kv_heads, head_dim, window = sizes
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, page_size, window, dtype, device)
        if uses_flashinfer and shape.head_dim not in HEAD_DIMS:
            continue
        for rows in (DECODE_ROWS, (*DECODE_ROWS, *CHUNKS)):
            case = make_case(shape, rows, dtype, device, seed=100 * number)
            attention = ATTENTION[name](shape)
            for _ in range(PLANS if uses_flashinfer else 1):
                output = attention.plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, case.kv_2PKSD)
                assert largest_error(output, case.expected()) <= TOLERANCE[dtype], (shape, rows)
            assert torch.equal(case.kv_2PKSD.nan_to_num(-99), case.filled_pages().nan_to_num(-99)), (shape, rows)
