"""A plan as tensors, for the decoder and the attention. Knows pages and positions, not requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from stages.generate.schedule.plan import BatchPlan, PlanRow

# T = packed tokens, B = rows of the batch, N = pages of a row, A = rows of the page table


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one step, their tokens packed one after the other. Lengths are on the host, tensors on the device.

    Decode rows, of one token each, come first. A row is `seq_lens[b]` long after the step, and its last
    `query_starts[b + 1] - query_starts[b]` tokens are computed in it.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """The place of each token's key and value: page * page_size + offset."""
    query_starts: tuple[int, ...]
    """B + 1 numbers: row b's tokens are [query_starts[b], query_starts[b + 1]) of T."""
    seq_lens: tuple[int, ...]
    page_table_BN: Tensor
    """int32. Row b's first ceil(seq_lens[b] / page_size) pages are its own. Ignore the rest."""
    num_decode_rows: int


class PageTables:
    """Which pages each running request has, [max_running_requests, pages per row] on the host. Every rank keeps one."""

    def __init__(self, max_running_requests: int, max_seq_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages_AN = torch.zeros(max_running_requests, -(-max_seq_len // page_size), dtype=torch.int32)

    def update(self, rows: Iterable[PlanRow]) -> None:
        """Append the new pages of *rows*."""
        for row in rows:
            if row.new_pages:
                end = row.first_page + len(row.new_pages)
                assert end <= self.pages_AN.shape[1], f"{end} pages in a row of {self.pages_AN.shape[1]}"
                self.pages_AN[row.table, row.first_page : end] = torch.tensor(row.new_pages, dtype=torch.int32)


def build_batch(plan: BatchPlan, tables: PageTables, device: torch.device) -> ForwardBatch:
    """Return *plan* as tensors on *device*; *tables* must have been updated with it."""
    rows, page_size = plan.rows, tables.page_size
    lengths = [len(row.token_ids) for row in rows]
    assert min(lengths) > 0, "a row without tokens"
    starts = (0, *accumulate(lengths))
    seq_lens = tuple(row.start + length for row, length in zip(rows, lengths, strict=True))
    pages_BN = tables.pages_AN[[row.table for row in rows], : -(-max(seq_lens) // page_size)]
    token_ids_T = torch.tensor([*chain.from_iterable(row.token_ids for row in rows)])
    positions_T = torch.cat([torch.arange(seq - length, seq) for seq, length in zip(seq_lens, lengths, strict=True)])
    rows_T = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    slots_T = pages_BN[rows_T, positions_T // page_size].long() * page_size + positions_T % page_size
    return ForwardBatch(
        token_ids_T=token_ids_T.to(device),
        positions_T=positions_T.to(device),
        slots_T=slots_T.to(device),
        query_starts=starts,
        seq_lens=seq_lens,
        page_table_BN=pages_BN.to(device),
        num_decode_rows=plan.num_decode_rows,
    )
