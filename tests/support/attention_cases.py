"""Random rows on shuffled KV pages amid NaN, and what attention over them is: dense, without pages, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from stages.generate.attention import AttentionShape
from stages.generate.batch import ForwardBatch, PageTables, build_batch
from stages.generate.schedule.plan import BatchPlan, PlanRow

# T = packed tokens, Q = tokens of a row in this step, C = tokens of a row so far, H = query heads, K = kv heads,
# D = head dim, P = pages, S = slots of a page, B = rows


@dataclass(frozen=True, slots=True)
class Case:
    """The input of one step of attention."""

    shape: AttentionShape
    batch: ForwardBatch
    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    kv_2PKSD: Tensor
    """Holds what was before this step; all else is NaN."""
    kv_rows_2CKD: tuple[Tensor, ...]
    """The keys and values of each row, those of this step too."""

    def expected(self) -> Tensor:
        """Return o_THD in float64."""
        rows = zip(pairwise(self.batch.query_starts), self.kv_rows_2CKD, strict=True)
        return torch.cat([dense(self.q_THD[slice(*tokens)], kv, self.shape.window) for tokens, kv in rows])

    def filled_pages(self) -> Tensor:
        """Return kv_2PKSD as it must be after the step."""
        kv_2PKSD = torch.full_like(self.kv_2PKSD, float("nan"))
        for row, kv_2CKD in enumerate(self.kv_rows_2CKD):
            _store(kv_2PKSD, kv_2CKD, self.batch.page_table_BN[row])
        return kv_2PKSD


def make_case(
    shape: AttentionShape, rows: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Case:
    """Return random *rows* of (start, number of new tokens), decode rows first."""
    plan, tables, num_pages = make_plan(rows, shape.page_size, seed=seed)
    tables.update(plan.rows)
    batch = build_batch(plan, tables, device)
    kv_shape = (2, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    kv_2PKSD = torch.full(kv_shape, float("nan"), dtype=dtype, device=device)
    kv_rows = []
    for row, (start, count) in enumerate(rows):
        kv_2CKD = random((2, start + count, shape.num_kv_heads, shape.head_dim), dtype, device, seed + row)
        _store(kv_2PKSD, kv_2CKD[:, :start], batch.page_table_BN[row])
        kv_rows.append(kv_2CKD)
    k_TKD, v_TKD = torch.cat([kv[:, start:] for kv, (start, _) in zip(kv_rows, rows, strict=True)], 1)
    q_THD = random((len(k_TKD), shape.num_heads, shape.head_dim), dtype, device, seed + len(rows))
    return Case(shape, batch, q_THD, k_TKD, v_TKD, kv_2PKSD, tuple(kv_rows))


def make_plan(
    rows: Sequence[tuple[int, int]], page_size: int, *, seed: int = 0, vocab_size: int = 100
) -> tuple[BatchPlan, PageTables, int]:
    """Return *rows* of random tokens as a plan that samples nothing, empty tables for it, and the number of pages."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(start + count) // page_size) for start, count in rows]
    num_pages = sum(needed) + 3
    order = iter(torch.randperm(num_pages, generator=generator).tolist())
    planned = tuple(
        PlanRow(
            table=table,
            start=start,
            token_ids=tuple(torch.randint(vocab_size, (count,), generator=generator).tolist()),
            new_pages=tuple(next(order) for _ in range(pages)),
            first_page=0,
            sample=None,
        )
        for table, ((start, count), pages) in enumerate(zip(rows, needed, strict=True))
    )
    num_decode_rows = sum(1 for _ in takewhile(lambda row: row[1] == 1, rows))
    tables = PageTables(len(rows), max(needed) * page_size, page_size)
    return BatchPlan(0, planned, num_decode_rows), tables, num_pages


def dense(q_QHD: Tensor, kv_2CKD: Tensor, window: int = 0) -> Tensor:
    """Return o_QHD in float64; the queries are the last ones of the C tokens."""
    num_queries, num_heads, head_dim = q_QHD.shape
    k_CKD, v_CKD = kv_2CKD.double()
    length, num_kv_heads, _ = k_CKD.shape
    q_QKGD = q_QHD.double().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_KGQC = torch.einsum("qkgd,ckd->kgqc", q_QKGD, k_CKD) * head_dim**-0.5
    position_Q1 = torch.arange(length - num_queries, length, device=q_QHD.device)[:, None]
    position_C = torch.arange(length, device=q_QHD.device)
    seen_QC = position_C <= position_Q1
    if window:
        seen_QC &= position_C > position_Q1 - window
    p_KGQC = scores_KGQC.masked_fill(~seen_QC, float("-inf")).softmax(-1)
    return torch.einsum("kgqc,ckd->qkgd", p_KGQC, v_CKD).reshape(q_QHD.shape)


def largest_error(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference; NaN where there is one in *output*, which passes no comparison."""
    return float((output.double() - expected).abs().max())


def _store(kv_2PKSD: Tensor, kv_2CKD: Tensor, pages_N: Tensor) -> None:
    page_size = kv_2PKSD.shape[3]
    position_C = torch.arange(kv_2CKD.shape[1], device=kv_2PKSD.device)
    pages_C, offsets_C = pages_N.long()[position_C // page_size], position_C % page_size
    for kind in range(2):
        kv_2PKSD[kind, pages_C, :, offsets_C] = kv_2CKD[kind]


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return normal random numbers, the same ones each time on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
