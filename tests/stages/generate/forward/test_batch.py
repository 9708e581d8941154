"""A plan becomes tensors."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from support.attention_cases import make_plan
from support.pretend_cuda import CUDA, pretend_cuda

from pipeline.events import SamplingParams
from stages.generate.batch import HostBatch, PageTables, build_batch, host_batch, parted
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample

CPU = torch.device("cpu")


def test_a_mixed_batch_packs_decode_rows_and_chunks() -> None:
    tables = PageTables(max_running_requests=4, max_seq_len=10, page_size=4)
    tables.update([PlanRow(2, 0, (1, 2, 3, 4), (7,), 0, None), PlanRow(0, 0, (1, 2, 3), (5,), 0, None)])
    sample = Sample(SamplingParams(), 5, ())
    rows = (
        PlanRow(2, 4, (50,), (3,), 1, sample),
        PlanRow(0, 3, (60, 61), (9,), 1, None),
        PlanRow(1, 0, (70, 71), (8,), 0, sample),
    )
    tables.update(rows)
    batch = build_batch(BatchPlan(1, rows, 1), tables, CPU)
    assert batch.token_ids_T.tolist() == [50, 60, 61, 70, 71]
    assert batch.positions_T.tolist() == [4, 3, 4, 0, 1]
    assert batch.slots_T.tolist() == [3 * 4, 5 * 4 + 3, 9 * 4, 8 * 4, 8 * 4 + 1]
    assert batch.query_starts == (0, 1, 3, 5)
    assert batch.seq_lens == (5, 5, 2)
    assert batch.page_table_BN[:2].tolist() == [[7, 3], [5, 9]]
    assert batch.page_table_BN[2, 0] == 8
    assert batch.num_decode_rows == 1


def test_rows_that_all_decode_are_laid_out_as_beside_a_chunk() -> None:
    plan, tables, _ = make_plan([(5, 1), (16, 1), (0, 9), (63, 1)], 4)
    decodes = BatchPlan(1, tuple(row for row in plan.rows if row.start), 3)
    tables.update(plan.rows)
    beside, _ = parted(host_batch(BatchPlan(1, (*decodes.rows, plan.rows[2]), 3), tables))
    alone = host_batch(decodes, tables)
    assert (alone.query_starts, alone.seq_lens, alone.num_decode_rows) == ((0, 1, 2, 3), (6, 17, 64), 3)
    for name in (field.name for field in fields(HostBatch)):
        mine, its = getattr(alone, name), getattr(beside, name)
        assert np.array_equal(mine, its), name


def test_a_table_row_is_taken_over_by_the_next_request() -> None:
    tables = PageTables(1, 8, 2)
    tables.update([PlanRow(0, 0, (1,) * 8, (4, 3, 2, 1), 0, None)])
    row = PlanRow(0, 0, (1, 2, 3), (6, 7), 0, None)
    tables.update([row])
    assert build_batch(BatchPlan(0, (row,), 0), tables, CPU).slots_T.tolist() == [12, 13, 14]


def test_local_parts_are_put_where_their_pages_are() -> None:
    tables = PageTables(2, 16, 4, num_parts=3)
    tables.update([PlanRow(1, 0, (1,) * 9, (4, 3, 2), 0, None, new_local=(10, 11, 20, 21, 30, 31))])
    tables.update([PlanRow(1, 9, (1,) * 4, (5,), 3, None, new_local=(40, 41), first_local=3)])
    assert tables.pages_AMN[1].tolist() == [[4, 3, 2, 5], [10, 20, 30, 40], [11, 21, 31, 41]]
    assert not tables.pages_AMN[0].any()


def test_more_pages_than_a_row_has_are_our_bug() -> None:
    with pytest.raises(AssertionError):
        PageTables(1, 8, 4).update([PlanRow(0, 0, (1,), (1, 2, 3), 0, None)])


def test_a_step_is_one_copy_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, tables, _ = make_plan([(5, 1), (0, 9)], 4)
    tables.update(plan.rows)
    on_cpu = build_batch(plan, tables, CPU)
    with pretend_cuda(monkeypatch) as device:
        batch = build_batch(plan, tables, CUDA)
        assert device.num_copies == 1
    for name in ("token_ids_T", "positions_T", "slots_T", "page_table_BN"):
        there, here = getattr(batch, name), getattr(on_cpu, name)
        assert there.dtype == torch.int32 and torch.equal(there.held, here)
