"""Reference for the other backends: row after row, in float32, in plain torch, on any device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from stages.generate.batch import ForwardBatch
from stages.generate.model.attention import Attend, AttentionShape, places_of, write_pages

# T = packed tokens, Q = queries of a block, C = tokens of a row so far, H = query heads, K = kv heads,
# G = query heads of one kv head, D = head dim, P = pages, S = slots of a page, N = pages of a row

BLOCK = 256
"""Queries computed at a time, so that a long chunk does not need Q * C * H scores at once."""


class ReferenceAttention:
    """See `Attention`."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, batch: ForwardBatch) -> Attend:
        """Return the function for the layers. Nothing is worth computing ahead."""
        return partial(self._attend, batch)

    def _attend(
        self,
        batch: ForwardBatch,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        kv_2PKSD: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        write_pages(kv_2PKSD, k_TKD, v_TKD, places_of(batch.slots_T, self._shape.page_size))
        o_THD = torch.empty_like(q_THD)
        for row in range(len(batch.seq_lens)):
            self._attend_row(batch, row, q_THD, kv_2PKSD, o_THD, sinks_H)
        return o_THD

    def _attend_row(
        self, batch: ForwardBatch, row: int, q_THD: Tensor, kv_2PKSD: Tensor, o_THD: Tensor, sinks_H: Tensor | None
    ) -> None:
        """Compute the queries of one row into their places in *o_THD*. Their keys and values are in the pages."""
        seq_len = batch.seq_lens[row]
        first, end = batch.query_starts[row], batch.query_starts[row + 1]
        pages_N = batch.page_table_BN[row, : -(-seq_len // self._shape.page_size)]
        kv_2KCD = kv_2PKSD[:, pages_N].transpose(1, 2).flatten(2, 3).float()
        for begin in range(first, end, BLOCK):
            stop = min(begin + BLOCK, end)
            length = seq_len - (end - stop)
            o_THD[begin:stop] = self._attend_block(q_THD[begin:stop], kv_2KCD[:, :, :length], sinks_H)

    def _attend_block(self, q_QHD: Tensor, kv_2KCD: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Return o_QHD. The queries are the last ones of the C tokens."""
        shape, device = self._shape, q_QHD.device
        num_queries, length = q_QHD.shape[0], kv_2KCD.shape[2]
        q_KGQD = q_QHD.float().reshape(num_queries, shape.num_kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)
        k_KCD, v_KCD = kv_2KCD.unsqueeze(2)
        scores_KGQC = shape.capped(q_KGQD @ k_KCD.transpose(-1, -2) * shape.scale)
        distance_QC = torch.arange(length - num_queries, length, device=device)[:, None] - torch.arange(
            length, device=device
        )
        hidden_QC = distance_QC < 0
        if shape.window:
            hidden_QC |= distance_QC >= shape.window
        scores_KGQC = scores_KGQC.masked_fill(hidden_QC, float("-inf"))
        if sinks_H is not None:
            sinks_KGQ1 = sinks_H.float().view(len(q_KGQD), -1, 1, 1).expand(*scores_KGQC.shape[:-1], 1)
            scores_KGQC = torch.cat((scores_KGQC, sinks_KGQ1), dim=-1)
        o_KGQD: Tensor = scores_KGQC.softmax(-1)[..., :length] @ v_KCD
        return o_KGQD.permute(2, 0, 1, 3).flatten(1, 2).to(q_QHD.dtype)
