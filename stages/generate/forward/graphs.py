"""CUDA graphs: a decode step of each size is recorded once, and replayed for every step of that size.

Without graphs, a step of a small model waits for the host, which launches hundreds of kernels one by one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor

from stages.generate.attention.flashinfer import FlashInferAttention, padded_rows
from stages.generate.batch import ForwardBatch, HostBatch, PageTables, copied, fill_in, on_device
from stages.generate.model.decoder import Decoder

# R = rows of a graph, B = decode rows of a step, E = hidden size, L = layers, P = pages, K = kv heads,
# S = slots of a page, D = head dim, A = rows of the page table, N = pages of a row

WARM_CALLS: Final = 3
"""Calls before a recording: a library may allocate or compile in its first calls, which a recording does not allow."""

logger = structlog.get_logger()

T = TypeVar("T")


class DecodeGraphs:
    """Decode steps of up to `most_rows` rows. Rows that pad a step write to one page that no request has."""

    def __init__(
        self,
        decoder: Decoder,
        attention: FlashInferAttention,
        kv_L2PKSD: Tensor,
        tables: PageTables,
        most_rows: int,
        most_step_rows: int,
    ) -> None:
        """Record all sizes, the largest first. The last page of *kv_L2PKSD* is for the rows that pad.

        *most_step_rows*: of any step. One with drafts may have more rows than are recorded.
        """
        self._most_rows = most_rows
        self._attention, self._device = attention, kv_L2PKSD.device
        page = kv_L2PKSD.shape[2] - 1
        sizes = sorted({padded_rows(num_rows) for num_rows in range(1, most_rows + 1)}, reverse=True)
        num_rows = max(sizes[0], padded_rows(most_step_rows))
        attention.reserve(num_rows, num_rows * tables.pages_AN.shape[1])
        attention.is_recorded = True
        self._padding_31 = on_device(np.array([[0], [0], [page * kv_L2PKSD.shape[4]]], np.int32), self._device)
        self._inputs_3R = self._padding_31.repeat(1, sizes[0])
        """Token ids, positions and slots."""
        self._graphs: dict[int, tuple[Callable[[], object], Tensor]] = {}
        self._pool, began_s = None, time.monotonic()
        for num_rows in _seen(sizes):
            batch = _idle_batch(self._inputs(num_rows), page)
            for _ in range(2):
                run = attention.prepare(batch)  # once for each of its two sets of memory

            def step(batch: ForwardBatch = batch, run: Any = run) -> Tensor:
                self._fill_in(batch)
                attend = attention.attending(run, batch.slots_T)
                return decoder.forward(batch, [attend] * decoder.num_kinds, kv_L2PKSD)

            replay, x_RE, self._pool = record(step, self._device, self._pool)
            self._graphs[num_rows] = replay, x_RE
        seconds = round(time.monotonic() - began_s, 2)
        logger.info("graphs_recorded", graphs=len(sizes), most_rows=most_rows, seconds=seconds)

    def records(self, batch: HostBatch) -> bool:
        """Return whether `forward` can compute a step."""
        return 0 < batch.num_decode_rows == len(batch.seq_lens) <= self._most_rows

    def _inputs(self, num_rows: int) -> Tensor:
        return self._inputs_3R[:, :num_rows]

    def _fill_in(self, batch: ForwardBatch) -> None:
        """Do what a recording of *batch* begins with."""

    def forward(self, of_host: HostBatch, last_R: Tensor | None) -> Tensor:
        """Compute decode rows alone; return x_BE, the last layer's output. *last_R* replaces placeholders."""
        batch = copied(of_host, self._device)
        if last_R is not None:
            fill_in(batch.token_ids_T, last_R)
        num_rows = len(batch.seq_lens)
        replay, x_RE = self._graphs[padded_rows(num_rows)]
        for place_R, numbers_B in zip(
            self._inputs_3R, (batch.token_ids_T, batch.positions_T, batch.slots_T), strict=True
        ):
            place_R[:num_rows].copy_(numbers_B)
        self._inputs_3R[:, num_rows : len(x_RE)].copy_(self._padding_31.expand(-1, len(x_RE) - num_rows))
        self._attention.prepare(batch)
        replay()
        return x_RE[:num_rows].clone()  # the next replay writes to the same place


def _idle_batch(inputs_3R: Tensor, page: int) -> ForwardBatch:
    """Return rows of one token each, on one page. Their numbers are in *inputs_3R*."""
    token_ids_R, positions_R, slots_R = inputs_3R
    num_rows = len(slots_R)
    table_R1 = np.full((num_rows, 1), page, np.int32)
    return ForwardBatch(
        inputs_3T=np.empty((3, 0), np.int32),  # they are on the device
        token_ids_T=token_ids_R,
        positions_T=positions_R,
        slots_T=slots_R,
        query_starts=tuple(range(num_rows + 1)),
        seq_lens=(1,) * num_rows,
        page_table_BN=slots_R[:, None],  # not read: FlashInfer has its own
        host_table_BN=table_R1,
        num_decode_rows=num_rows,
    )


def record(call: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[Callable[[], object], T, Any]:
    """Record what *call* launches; return a function that launches it again, the result of *call*, and its memory.

    *pool*: the memory of earlier recordings; only one of them may be replayed at a time.
    """
    stream = _stream_of(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_CALLS):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    first_error: Exception | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                result = call()
            except Exception as error:
                first_error = error
                raise
    except Exception as error:  # the end of a broken recording raises, too, and says less
        raise first_error or error from None
    torch.cuda.synchronize(device)
    return graph.replay, result, graph.pool()


@cache
def _stream_of(device: torch.device) -> Any:
    """Return the stream of all recordings: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _seen(sizes: list[int]) -> Iterable[int]:
    """Return *sizes*; on a terminal also draw a bar on stderr while they are taken."""
    if not sys.stderr.isatty():
        return sizes
    from rich.console import Console
    from rich.progress import track

    return track(sizes, "graphs", console=Console(stderr=True), transient=True)
