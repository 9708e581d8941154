"""A plan as tensors, for the decoder and the attention. Knows pages and positions, not requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.generate.schedule.plan import BatchPlan, PlanRow

# T = packed tokens, B = rows of the batch, N = pages of a row, A = rows of the page table, M = parts of a page,
# X = several of these in one


@dataclass(slots=True, kw_only=True)
class HostBatch:
    """The rows of one step on the host, with their tokens packed one after the other.

    Decode rows, of one token each, come first. A row is `seq_lens[b]` long after the step, which computes its last
    `query_starts[b + 1] - query_starts[b]` tokens.
    """

    inputs_3T: npt.NDArray[np.int32]
    """Id, position and slot of each token."""
    query_starts: tuple[int, ...]
    """B + 1 numbers: row b's tokens are [query_starts[b], query_starts[b + 1]) of T."""
    seq_lens: tuple[int, ...]
    host_table_BN: npt.NDArray[np.int32]
    """Pages of each row. Only the first ceil(seq_lens[b] / page_size) are row b's own; ignore the rest."""
    num_decode_rows: int


@dataclass(slots=True, kw_only=True)
class ForwardBatch(HostBatch):
    """The same with tensors (int32) on the device."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """Slot of each token's key and value: page * page_size + offset."""
    page_table_BN: Tensor


class PageTables:
    """Pages of each running request, on the host. Every rank keeps one."""

    def __init__(self, max_running_requests: int, max_seq_len: int, page_size: int, num_parts: int = 1) -> None:
        """*num_parts*: of a page, see `LocalLayers`; what the table has of local parts that were given back is void."""
        self.page_size = page_size
        self.pages_AMN = np.zeros((max_running_requests, num_parts, -(-max_seq_len // page_size)), np.int32)
        self.pages_AN = self.pages_AMN[:, 0]
        self._address, self._row_bytes = self.pages_AMN.ctypes.data, self.pages_AMN.strides[0]

    def address(self, table: int) -> int:
        """Return the address of a row of the table. NumPy itself takes long for that."""
        return self._address + table * self._row_bytes

    def update(self, rows: Iterable[PlanRow]) -> None:
        """Append the new pages and local parts of *rows*."""
        for row in rows:
            if row.new_local:
                local_NM = np.reshape(row.new_local, (-1, self.pages_AMN.shape[1] - 1))
                self.pages_AMN[row.table, 1:, row.first_local : row.first_local + len(local_NM)] = local_NM.T
            if row.new_pages:
                end = row.first_page + len(row.new_pages)
                assert end <= self.pages_AN.shape[1], f"{end} pages in a row of {self.pages_AN.shape[1]}"
                self.pages_AN[row.table, row.first_page : end] = row.new_pages


def build_batch(plan: BatchPlan, tables: PageTables, device: torch.device) -> ForwardBatch:
    """Return *plan* as tensors on *device*; *tables* must have been updated with it.

    There is one copy at most. Nothing waits for the device.
    """
    return copied(host_batch(plan, tables), device)


def host_batch(plan: BatchPlan, tables: PageTables) -> HostBatch:
    """Return *plan* as arrays; *tables* must have been updated with it."""
    rows, page_size, pages_AN = plan.rows, tables.page_size, tables.pages_AN
    starts, tables_B = [row.start for row in rows], [row.table for row in rows]
    if plan.num_decode_rows == len(rows):  # one token each, so T is B
        ends = [*range(1, len(rows) + 1)]
        seq_lens = [start + 1 for start in starts]
        numbers_XT = np.array(([row.token_ids[0] for row in rows], starts, tables_B), np.int32)
    else:
        lengths_B = np.array([len(row.token_ids) for row in rows])
        assert lengths_B.min() > 0, "a row without tokens"
        seq_lens_B, ends_B = lengths_B + starts, lengths_B.cumsum()
        ends, seq_lens = ends_B.tolist(), seq_lens_B.tolist()
        numbers_XT = np.empty((3, ends[-1]), np.int32)
        numbers_XT[0] = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int32, ends[-1])
        numbers_XT[1] = np.arange(ends[-1]) + (seq_lens_B - ends_B).repeat(lengths_B)
        numbers_XT[2] = np.repeat(tables_B, lengths_B)
    _, positions_T, slots_T = numbers_XT  # slots_T holds tables until the next lines
    places_T = positions_T // page_size
    pages_T = pages_AN.reshape(-1)[slots_T * pages_AN.shape[1] + places_T]
    slots_T[:] = (pages_T - places_T) * page_size + positions_T
    pages_BN = np.ascontiguousarray(pages_AN[tables_B, : -(-max(seq_lens) // page_size)])
    return HostBatch(
        inputs_3T=numbers_XT,
        query_starts=(0, *ends),
        seq_lens=tuple(seq_lens),
        host_table_BN=pages_BN,
        num_decode_rows=plan.num_decode_rows,
    )


def copied(batch: HostBatch, device: torch.device) -> ForwardBatch:
    """Return *batch* with its tensors on *device*, where they are parts of one tensor."""
    arrays = (*batch.inputs_3T, batch.host_table_BN)
    if device.type == "cpu":
        tensors = [torch.from_numpy(array) for array in arrays]
    else:
        parts = on_device(np.concatenate(arrays, axis=None), device).split_with_sizes([array.size for array in arrays])
        tensors = [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
    token_ids_T, positions_T, slots_T, page_table_BN = tensors
    return ForwardBatch(
        inputs_3T=batch.inputs_3T,
        query_starts=batch.query_starts,
        seq_lens=batch.seq_lens,
        host_table_BN=batch.host_table_BN,
        num_decode_rows=batch.num_decode_rows,
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        slots_T=slots_T,
        page_table_BN=page_table_BN,
    )


def seen_by_tokens(batch: HostBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the row of each token, and how many tokens it sees, itself included, if there is no window."""
    counts_B = np.diff(batch.query_starts)
    rows_T = np.arange(len(counts_B)).repeat(counts_B)
    before_B = np.array(batch.seq_lens) - np.array(batch.query_starts[1:])
    return rows_T, before_B[rows_T] + np.arange(1, len(rows_T) + 1)


def parted(batch: HostBatch) -> tuple[HostBatch, HostBatch]:
    """Return the decode rows of *batch*, and its chunks."""
    num = batch.num_decode_rows
    decode, chunks = (
        HostBatch(
            inputs_3T=batch.inputs_3T[:, tokens],
            query_starts=tuple(start - starts[0] for start in starts),
            seq_lens=batch.seq_lens[rows],
            host_table_BN=batch.host_table_BN[rows],
            num_decode_rows=num_decode_rows,
        )
        for tokens, rows, starts, num_decode_rows in (
            (slice(num), slice(num), batch.query_starts[: num + 1], num),
            (slice(num, None), slice(num, None), batch.query_starts[num:], 0),
        )
    )
    return decode, chunks


def on_device(numbers: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor. Nothing waits for the device."""
    tensor = torch.from_numpy(np.asarray(numbers))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def fill_in(token_ids_T: Tensor, last_R: Tensor) -> None:
    """Replace the placeholders in *token_ids_T* by tokens of *last_R*; NOT_A_NUMBER becomes 0."""
    if len(last_R):
        places_T = (-1 - token_ids_T).clamp_(min=0)
        token_ids_T.copy_(last_R.clamp(min=0)[places_T].where(token_ids_T < 0, token_ids_T))
