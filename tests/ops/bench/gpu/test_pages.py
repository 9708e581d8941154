"""Random pages: what lies where, and what attention over it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)

from ops.bench.gpu.capture import capture
from ops.bench.gpu.pages import dense, largest_error, make_case, make_plan
from ops.bench.gpu.phase import Skip
from ops.bench.gpu.timing import copy_bytes_per_s, matmul_flops_per_s, median_s, step_times
from stages.generate.attention import AttentionShape

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [0, 3, 100])
def test_dense_attention_is_torchs_own(window: int) -> None:
    q_QHD, kv_2CKD = torch.randn(5, 6, 8), torch.randn(2, 12, 2, 8)
    distance = torch.arange(7, 12)[:, None] - torch.arange(12)
    seen = (distance >= 0) & (distance < (window or 100))
    k_HCD, v_HCD = kv_2CKD.transpose(1, 2).repeat_interleave(3, 1).double()
    expected = F.scaled_dot_product_attention(q_QHD.transpose(0, 1).double(), k_HCD, v_HCD, attn_mask=seen)
    torch.testing.assert_close(dense(q_QHD, kv_2CKD, window), expected.transpose(0, 1))


def test_pages_hold_what_was_before_the_step_and_nothing_else() -> None:
    case = make_case(AttentionShape(4, 2, 8, 16), [(40, 1), (0, 1), (7, 20)], torch.float32, CPU)
    before, after = case.kv_2PKSD.isfinite(), case.filled_pages().isfinite()
    assert int(before.sum()) == 2 * (40 + 7) * 2 * 8
    assert int(after.sum()) == 2 * (41 + 1 + 27) * 2 * 8
    assert bool((after | ~before).all())
    assert torch.equal(case.k_TKD[-20:], case.kv_rows_2CKD[2][0, 7:])


def test_rows_have_pages_of_their_own() -> None:
    plan, tables, num_pages = make_plan([(40, 1), (15, 1), (0, 33)], 16)
    pages = [page for row in plan.rows for page in row.new_pages]
    assert len(set(pages)) == len(pages) == 3 + 1 + 3 and max(pages) < num_pages
    assert plan.num_decode_rows == 2 and tables.pages_AN.shape == (3, 3)


def test_nan_passes_no_comparison() -> None:
    error = largest_error(torch.tensor([1.0, float("nan")]), torch.ones(2).double())
    assert not error <= 1e9


def test_times_are_those_of_the_calls() -> None:
    calls = []
    assert median_s(lambda: calls.append(1), CPU, rounds=5, inner=3) > 0
    assert len(calls) == 2 + 5 * 3
    times = step_times(lambda: torch.ones(1000).sum(), CPU)
    assert 0 < times.host_s <= times.total_s
    assert copy_bytes_per_s(CPU, "toy") > 0 and matmul_flops_per_s(CPU, "toy", torch.float32) > 0


def test_a_cpu_captures_nothing() -> None:
    with pytest.raises(Skip, match="graphs"):
        capture(lambda: None, CPU)
