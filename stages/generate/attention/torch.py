"""Attention in torch's own operations, on any device, in any dtype and for any head dim: all decode rows of a step in a
few large operations on whole pages; chunks in torch's own kernel. Plans are computed on the host.

A decode row has one query, so its work is reading pages. Each page is used as it is stored, [kv head, slot, head dim]:
the query heads of a kv head form one small matrix that is multiplied with it. The results of a row's pages are then
combined with the usual running sums of a softmax (flash decoding, https://pytorch.org/blog/flash-decoding). So rows of
different lengths are computed together, and none is padded to the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.batch import ForwardBatch, on_device
from stages.generate.model.attention import Attend, AttentionShape

# B = decode rows, T = packed tokens, H = query heads, K = kv heads, G = query heads of one kv head, D = head dim,
# P = pages, S = slots of a page, U = pages in use by decode rows, E = those with slots that are hidden from their row,
# Q = queries of a chunk, N = pages of a chunk, C = tokens on them

GATHER_BYTES: Final = 4 * 2**20
"""Bytes of pages that are gathered at a time. They are read again at once and should still be in a core's cache."""
GATHER_BYTES_OF_DEVICE: Final = 256 * 2**20
"""The same on other devices, where a few large operations are faster than many."""
FEW_ROWS: Final = 2
"""Largest number of decode rows that are computed as chunks of one token: batching them gains nothing."""
BLOCK: Final = 512
"""Queries computed at a time when a mask is needed: it has one number for each query and token."""


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """The pages of all decode rows of a step, those with hidden slots last."""

    pages_U: Tensor
    rows_U: Tensor
    """Decode row that each page belongs to."""
    num_rows: int
    num_whole: int
    """Number of pages without hidden slots: U - E."""
    hidden_E1S: Tensor
    """True for slots that the row must not see: beyond its length, or before its window."""


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    """One row whose last tokens are computed in this step."""

    queries: slice
    """Place of the queries in T."""
    pages_N: Tensor
    """Pages of the row, from the first one that the chunk's first query sees."""
    length: int
    """C: number of tokens on these pages. The last Q of them are the queries."""


class TorchAttention:
    """See `Attention`. With three or more decode rows, scores are rounded to the dtype of the pages before a softmax in
    float32. transformers' eager attention does the same. It is a third faster than without rounding.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, batch: ForwardBatch) -> Attend:
        """Compute where keys and values go, which pages the decode rows read, and which of their slots are hidden."""
        places = self._places(batch.slots_T)
        num_decode_rows = batch.num_decode_rows if batch.num_decode_rows > FEW_ROWS else 0
        decode = self._plan_decode(batch) if num_decode_rows else None
        chunks = [self._plan_chunk(batch, row) for row in range(num_decode_rows, len(batch.seq_lens))]

        def attend(
            q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv_2PKSD: Tensor, sinks_H: Tensor | None = None
        ) -> Tensor:
            for pages_PKSD, new_TKD in zip(kv_2PKSD, (k_TKD, v_TKD), strict=True):
                pages_PKSD.view(-1, self._shape.head_dim).index_copy_(0, places, new_TKD.flatten(0, 1))
            if decode is not None and not chunks:
                return self._decode(decode, q_THD, kv_2PKSD, sinks_H)
            o_THD = torch.empty_like(q_THD)
            if decode is not None:
                o_THD[:num_decode_rows] = self._decode(decode, q_THD[:num_decode_rows], kv_2PKSD, sinks_H)
            for chunk in chunks:
                o_THD[chunk.queries] = self._chunk(chunk, q_THD[chunk.queries], kv_2PKSD, sinks_H)
            return o_THD

        return attend

    def _places(self, slots_T: Tensor) -> Tensor:
        """Return, for each token and kv head, the index among all [page, kv head, slot]."""
        page_size, num_kv_heads = self._shape.page_size, self._shape.num_kv_heads
        pages_T1, offsets_T1 = (slots_T // page_size)[:, None], (slots_T % page_size)[:, None]
        heads_K = torch.arange(num_kv_heads, device=slots_T.device)
        return ((pages_T1 * num_kv_heads + heads_K) * page_size + offsets_T1).flatten()

    # decode rows

    def _plan_decode(self, batch: ForwardBatch) -> _DecodePlan:
        page_size, device = self._shape.page_size, self._shape.device
        ends_B = np.array(batch.seq_lens[: batch.num_decode_rows])
        begins_B = np.maximum(ends_B - self._shape.window, 0) if self._shape.window else np.zeros_like(ends_B)
        first_pages_B = begins_B // page_size
        counts_B = (ends_B - 1) // page_size - first_pages_B + 1
        rows_U = np.arange(len(ends_B)).repeat(counts_B)
        before_B = counts_B.cumsum() - counts_B
        indices_U = first_pages_B[rows_U] + np.arange(len(rows_U)) - before_B[rows_U]
        positions_US = indices_U[:, None] * page_size + np.arange(page_size)
        hidden_US = (positions_US < begins_B[rows_U, None]) | (positions_US >= ends_B[rows_U, None])
        has_hidden_U = hidden_US.any(1)
        order_U = has_hidden_U.argsort(kind="stable")
        num_whole = len(rows_U) - int(has_hidden_U.sum())
        rows_U, indices_U = rows_U[order_U], indices_U[order_U]
        return _DecodePlan(
            on_device(batch.host_table_BN[rows_U, indices_U].astype(np.int64), device),
            on_device(rows_U, device),
            batch.num_decode_rows,
            num_whole,
            on_device(hidden_US[order_U[num_whole:], None], device),
        )

    def _decode(self, plan: _DecodePlan, q_BHD: Tensor, kv_2PKSD: Tensor, sinks_H: Tensor | None) -> Tensor:
        k_PKSD, v_PKSD = kv_2PKSD
        shape = self._shape
        q_BKGD = (q_BHD * shape.scale).view(len(q_BHD), shape.num_kv_heads, -1, shape.head_dim)
        scores_UKGS = torch.cat(
            [
                torch.matmul(q_BKGD.index_select(0, plan.rows_U[part]), k_UKSD.transpose(2, 3))
                for part, k_UKSD in self._gather(plan, k_PKSD)
            ]
        )
        scores_UHS = shape.capped(scores_UKGS.flatten(1, 2))
        scores_UHS[plan.num_whole :].masked_fill_(plan.hidden_E1S, float("-inf"))
        p_UHS = scores_UHS.softmax(2, dtype=torch.float32)  # each page on its own
        shares_UH = self._shares(plan, scores_UHS.amax(2).float(), 1 / p_UHS.amax(2), sinks_H)
        p_UKGS = p_UHS.to(q_BHD.dtype).view_as(scores_UKGS)
        o_BHD = q_BHD.new_zeros(q_BHD.shape, dtype=torch.float32)
        for part, v_UKSD in self._gather(plan, v_PKSD):
            v_UKSD[max(0, plan.num_whole - part.start) :].nan_to_num_()  # hidden slots may be NaN, and 0 * NaN is NaN
            o_UHD = torch.matmul(p_UKGS[part], v_UKSD).flatten(1, 2)
            o_BHD.index_add_(0, plan.rows_U[part], o_UHD * shares_UH[part, :, None])
        return o_BHD.to(q_BHD.dtype)

    def _shares(self, plan: _DecodePlan, most_UH: Tensor, sum_UH: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Return the share of its row's softmax that each page has; *sum_UH* sums exp(score - *most_UH*) over the page.

        The caller found that sum from the page's own softmax, in which the best score has probability 1 / sum.
        """
        rows_UH = plan.rows_U[:, None].expand_as(most_UH)
        most_BH = most_UH.new_full((plan.num_rows, most_UH.shape[1]), float("-inf"))
        most_BH.scatter_reduce_(0, rows_UH, most_UH, "amax")
        weight_UH = (most_UH - most_BH.gather(0, rows_UH)).exp_() * sum_UH
        total_BH = torch.zeros_like(most_BH).scatter_add_(0, rows_UH, weight_UH)
        if sinks_H is not None:
            total_BH += (sinks_H.float() - most_BH).exp_()
        return weight_UH / total_BH.gather(0, rows_UH)

    def _gather(self, plan: _DecodePlan, pages_PKSD: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the pages of the plan, some at a time, copied into one tensor."""
        gather_bytes = GATHER_BYTES if self._shape.device.type == "cpu" else GATHER_BYTES_OF_DEVICE
        at_once = max(1, gather_bytes // pages_PKSD[0].nbytes)
        for begin in range(0, len(plan.pages_U), at_once):
            part = slice(begin, begin + at_once)
            yield part, pages_PKSD.index_select(0, plan.pages_U[part])

    # chunks

    def _plan_chunk(self, batch: ForwardBatch, row: int) -> _ChunkPlan:
        page_size, end = self._shape.page_size, batch.seq_lens[row]
        queries = slice(batch.query_starts[row], batch.query_starts[row + 1])
        start = end - (queries.stop - queries.start)
        first_page = max(0, start + 1 - self._shape.window) // page_size if self._shape.window else 0
        pages_N = batch.page_table_BN[row, first_page : -(-end // page_size)].long()
        return _ChunkPlan(queries, pages_N, end - first_page * page_size)

    def _chunk(self, plan: _ChunkPlan, q_QHD: Tensor, kv_2PKSD: Tensor, sinks_H: Tensor | None) -> Tensor:
        q_KGQD = q_QHD.reshape(len(q_QHD), self._shape.num_kv_heads, -1, self._shape.head_dim).permute(1, 2, 0, 3)
        k_K1CD, v_K1CD = (self._tokens(plan, pages_PKSD) for pages_PKSD in kv_2PKSD)
        num_queries = len(q_QHD)
        sinks_KG1 = None if sinks_H is None else sinks_H.view(len(q_KGQD), -1, 1)
        if num_queries == 1:  # the query heads of a kv head are queries that see the same tokens
            k_K1CD, v_K1CD = k_K1CD[:, :, -self._shape.window :], v_K1CD[:, :, -self._shape.window :]  # -0: all
            sinks_K1G = None if sinks_KG1 is None else sinks_KG1.transpose(1, 2)
            o_K1GD = self._softmax(q_KGQD.transpose(1, 2), k_K1CD, v_K1CD, None, sinks_K1G)
            return o_K1GD.reshape(q_QHD.shape)
        is_usual = not self._shape.cap and sinks_H is None  # else all scores would be in memory at once
        if num_queries == plan.length and is_usual and not 0 < self._shape.window < num_queries:
            o_KGQD = self._attend(q_KGQD, k_K1CD, v_K1CD, None, None)
            return o_KGQD.permute(2, 0, 1, 3).flatten(1, 2)
        o_QHD = torch.empty_like(q_QHD)
        for begin in range(0, num_queries, BLOCK):
            end = min(begin + BLOCK, num_queries)
            length = plan.length - num_queries + end
            visible_QC = self._visible(end - begin, length)
            o_KGQD = self._attend(
                q_KGQD[:, :, begin:end], k_K1CD[:, :, :length], v_K1CD[:, :, :length], visible_QC, sinks_KG1
            )
            o_QHD[begin:end] = o_KGQD.permute(2, 0, 1, 3).flatten(1, 2)
        return o_QHD

    def _attend(
        self, q_KGQD: Tensor, k_K1CD: Tensor, v_K1CD: Tensor, visible_QC: Tensor | None, sinks_KG1: Tensor | None
    ) -> Tensor:
        """Return o_KGQD. Without a mask the queries must be all tokens of the row."""
        groups = q_KGQD.shape[1]
        k_KGCD, v_KGCD = (tokens.expand(-1, groups, -1, -1) for tokens in (k_K1CD, v_K1CD))
        return self._softmax(q_KGQD, k_KGCD, v_KGCD, visible_QC, sinks_KG1, is_causal=visible_QC is None)

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, sinks: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Return softmax(q k scale) v. torch's own function knows neither cap nor sinks."""
        shape = self._shape
        if not shape.cap and sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=is_causal, scale=shape.scale)
        assert not is_causal, "its mask is in `visible`"
        scores = shape.capped(q @ k.transpose(-1, -2) * shape.scale)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[..., None].expand(*scores.shape[:-1], 1).to(scores.dtype)), dim=-1)
        return scores.softmax(-1, dtype=torch.float32)[..., : v.shape[-2]].to(v.dtype) @ v

    def _tokens(self, plan: _ChunkPlan, pages_PKSD: Tensor) -> Tensor:
        """Return the row's keys or values, [K, 1, C, D]: its pages, one kv head after the other."""
        num_kv_heads = self._shape.num_kv_heads
        index_KN = plan.pages_N * num_kv_heads + torch.arange(num_kv_heads, device=self._shape.device)[:, None]
        chosen_XSD = pages_PKSD.flatten(0, 1).index_select(0, index_KN.flatten())
        return chosen_XSD.view(num_kv_heads, 1, -1, self._shape.head_dim)[:, :, : plan.length]

    def _visible(self, num_queries: int, length: int) -> Tensor:
        """Return which tokens the last *num_queries* of *length* see, [Q, C]."""
        positions_C = torch.arange(length, device=self._shape.device)
        distance_QC = positions_C[length - num_queries :, None] - positions_C
        visible_QC = distance_QC >= 0
        return visible_QC & (distance_QC < self._shape.window) if self._shape.window else visible_QC
