"""Attention in torch's own operations whose bits do not depend on the batch: for `--deterministic` without FlashInfer.

Each token is a row of its own, decode row or not. BLOCK_ROWS rows are computed together over BLOCK_TOKENS of their
tokens, and the sums of these blocks are combined as in flash decoding (`torch.py`). Every operation that sums has one
shape, and a block of tokens that a row does not see changes nothing: it adds zeros. It is slow: few rows are padded to
a whole block, and the tokens of a prompt do not share what they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stages.generate.batch import ForwardBatch, on_device, seen_by_tokens
from stages.generate.model.attention import Attend, AttentionShape, places_of, write_pages
from stages.generate.model.layers.blocks import padded

# T = packed tokens, R = rows of a block, H = query heads, K = kv heads, G = query heads of one kv head, D = head dim,
# P = pages of a block, S = slots of a page, C = tokens of a block, B = rows of the batch, N = pages of a row

BLOCK_ROWS: Final = 16
BLOCK_TOKENS: Final = 256
"""Tokens of a block. A larger page is a block of its own."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one block."""

    tokens: slice
    """Place of the rows in T."""
    numbers_3R: Tensor
    """Row in the page table, first and last token that it sees, of each row."""
    num_blocks: int
    """Number of blocks of tokens, from the block of the first page that the row sees."""


class OneShapeAttention:
    """See `Attention`. Products and sums are in float32."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._pages = max(1, BLOCK_TOKENS // shape.page_size)

    def plan(self, batch: ForwardBatch) -> Attend:
        """Divide the tokens of the step into blocks of rows."""
        window, block_tokens = self._shape.window, self._pages * self._shape.page_size
        rows_T, lengths_T = seen_by_tokens(batch)
        firsts_T = np.maximum(lengths_T - window, 0) if window else np.zeros_like(lengths_T)
        before_T = firsts_T - firsts_T % self._shape.page_size
        numbers_3T = on_device(np.stack((rows_T, firsts_T, lengths_T - 1)), self._shape.device)
        groups = []
        for begin in range(0, len(rows_T), BLOCK_ROWS):
            tokens = slice(begin, min(begin + BLOCK_ROWS, len(rows_T)))
            farthest = int((lengths_T - before_T)[tokens].max())
            numbers_3R = numbers_3T[:, tokens]
            numbers_3R = torch.cat((numbers_3R, numbers_3R[:, :1].expand(-1, BLOCK_ROWS - numbers_3R.shape[1])), 1)
            groups.append(_Rows(tokens, numbers_3R, -(-farthest // block_tokens)))
        table_BN, places = batch.page_table_BN.long(), places_of(batch.slots_T, self._shape.page_size)

        def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv_2PKSD: Tensor) -> Tensor:
            write_pages(kv_2PKSD, k_TKD, v_TKD, places)
            o_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            for rows in groups:
                q_RHD = padded(q_THD[rows.tokens], BLOCK_ROWS - (rows.tokens.stop - rows.tokens.start))
                o_RHD = self._of_rows(rows, q_RHD, table_BN, kv_2PKSD)
                o_THD[rows.tokens] = o_RHD[: rows.tokens.stop - rows.tokens.start]
            return o_THD

        return attend

    def _of_rows(self, rows: _Rows, q_RHD: Tensor, table_BN: Tensor, kv_2PKSD: Tensor) -> Tensor:
        """Return o_RHD: the running maximum, sum and product of a softmax over one block of tokens after the other."""
        shape = self._shape
        q_RKGD = q_RHD.float().view(BLOCK_ROWS, shape.num_kv_heads, -1, shape.head_dim) * shape.scale
        o_RKGD = torch.zeros_like(q_RKGD)
        sum_RKG1 = o_RKGD[..., :1].clone()
        most_RKG1 = torch.full_like(sum_RKG1, float("-inf"))
        for block in range(rows.num_blocks):
            k_RKCD, v_RKCD, hidden_R11C = self._block(rows, block, table_BN, kv_2PKSD)
            scores_RKGC = shape.capped(q_RKGD @ k_RKCD.transpose(2, 3)).masked_fill(hidden_R11C, float("-inf"))
            following_RKG1 = torch.maximum(most_RKG1, scores_RKGC.amax(-1, keepdim=True))
            p_RKGC = (scores_RKGC - following_RKG1).exp()
            kept_RKG1 = (most_RKG1 - following_RKG1).exp()
            sum_RKG1 = sum_RKG1 * kept_RKG1 + p_RKGC.sum(-1, keepdim=True)
            o_RKGD = o_RKGD * kept_RKG1 + p_RKGC @ v_RKCD
            most_RKG1 = following_RKG1
        return (o_RKGD / sum_RKG1).view(q_RHD.shape).to(q_RHD.dtype)

    def _block(self, rows: _Rows, block: int, table_BN: Tensor, kv_2PKSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values of a block of tokens of each row, and which of these tokens the row does not see."""
        page_size, device = self._shape.page_size, self._shape.device
        table_R, first_R, last_R = rows.numbers_3R
        places_RP = (first_R // page_size + block * self._pages)[:, None] + torch.arange(self._pages, device=device)
        pages_RP = table_BN[table_R[:, None], places_RP.clamp(max=table_BN.shape[1] - 1)]
        positions_RPS = places_RP[..., None] * page_size + torch.arange(page_size, device=device)
        positions_RC = positions_RPS.flatten(1)
        hidden_R11C = ((positions_RC < first_R[:, None]) | (positions_RC > last_R[:, None]))[:, None, None]
        k_RKCD, v_RKCD = (pages_PKSD[pages_RP].transpose(1, 2).flatten(2, 3).float() for pages_PKSD in kv_2PKSD)
        unseen_R1C1 = hidden_R11C.transpose(2, 3)
        return k_RKCD, v_RKCD.masked_fill(unseen_R1C1, 0), hidden_R11C  # they may be NaN, and 0 * NaN is NaN
