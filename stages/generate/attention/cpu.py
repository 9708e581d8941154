"""Attention on a CPU: all decode rows of a step in a few large operations on whole pages; chunks row by row.

A decode row has one query, so its work is reading pages. They are read as they lie, [page, kv head, slot, head dim]:
the query heads of a kv head form one small matrix against each page, and no page is transposed or cut up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.generate.attention.base import Attend, AttentionShape
from stages.generate.attention.reference import ReferenceAttention, write_pages
from stages.generate.forward.batch import ForwardBatch

# B = decode rows, T = packed tokens, H = query heads, K = kv heads, G = query heads of one kv head, D = head dim,
# P = pages, N = most pages of a decode row, S = slots of a page


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """What is the same in every layer of a step."""

    pages_BN: Tensor
    """Rows with fewer pages are filled up with their first page, which is hidden there."""
    hidden_BNS: Tensor
    """True where a row may not look: beyond its length, before its window, and in what fills it up."""


class CpuAttention:
    """See `Attention`."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._reference = ReferenceAttention(shape)

    def plan(self, batch: ForwardBatch) -> Attend:
        """Lay out the pages of the decode rows, and what of them is hidden."""
        decode = self._plan_decode(batch) if batch.num_decode_rows else None

        def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv_2PKSD: Tensor) -> Tensor:
            write_pages(kv_2PKSD, k_TKD, v_TKD, batch.slots_T)
            o_THD = torch.empty_like(q_THD)
            if decode is not None:
                o_THD[: batch.num_decode_rows] = self._decode(decode, q_THD[: batch.num_decode_rows], kv_2PKSD)
            for row in range(batch.num_decode_rows, len(batch.seq_lens)):
                self._reference.attend_row(batch, row, q_THD, kv_2PKSD, o_THD)
            return o_THD

        return attend

    def _plan_decode(self, batch: ForwardBatch) -> _DecodePlan:
        page_size = self._shape.page_size
        lengths_B = torch.tensor(batch.seq_lens[: batch.num_decode_rows])
        num_pages = -(-int(lengths_B.max()) // page_size)
        pages_BN = batch.page_table_BN[: batch.num_decode_rows, :num_pages].long()
        unused_BN = torch.arange(num_pages) * page_size >= lengths_B[:, None]
        pages_BN = torch.where(unused_BN, pages_BN[:, :1], pages_BN)  # what is left over in a table may be any number
        positions_NS = torch.arange(num_pages * page_size).view(num_pages, page_size)
        hidden_BNS = positions_NS >= lengths_B[:, None, None]
        if self._shape.window:
            hidden_BNS = hidden_BNS | (positions_NS < (lengths_B - self._shape.window)[:, None, None])
        return _DecodePlan(pages_BN, hidden_BNS)

    def _decode(self, plan: _DecodePlan, q_BHD: Tensor, kv_2PKSD: Tensor) -> Tensor:
        shape = self._shape
        num_rows, num_pages = plan.pages_BN.shape
        k_BNKSD, v_BNKSD = (pages_PKSD[plan.pages_BN].float() for pages_PKSD in kv_2PKSD)
        v_BNKSD = v_BNKSD.masked_fill_(plan.hidden_BNS[:, :, None, :, None], 0.0)  # 0 * NaN would be NaN
        q_B1KGD = q_BHD.float().view(num_rows, 1, shape.num_kv_heads, -1, shape.head_dim) * shape.head_dim**-0.5
        scores_BNKGS = q_B1KGD @ k_BNKSD.transpose(-1, -2)
        scores_BNKGS.masked_fill_(plan.hidden_BNS[:, :, None, None, :], float("-inf"))
        # One softmax over the pages and slots of a row: N and S side by side, then back.
        p_BKGNS = scores_BNKGS.permute(0, 2, 3, 1, 4).flatten(3).softmax(-1).unflatten(3, (num_pages, -1))
        o_BNKGD = p_BKGNS.permute(0, 3, 1, 2, 4) @ v_BNKSD
        o_BHD: Tensor = o_BNKGD.sum(1).flatten(1, 2)
        return o_BHD.to(q_BHD.dtype)
