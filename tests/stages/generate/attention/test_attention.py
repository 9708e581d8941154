"""The contract of `Attention`, held against a dense computation without pages in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from support.attention_cases import Case, make_case
from support.devices import CPU, flashinfer_double
from support.flashinfer_signatures import VERSIONS
from support.selection import by_night, rest_at_night
from torch import Tensor

from stages.generate.attention import ATTENTION, DETERMINISTIC, Attention, AttentionShape
from stages.generate.batch import PageTables, build_batch
from stages.generate.schedule.plan import BatchPlan, PlanRow

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 20
USES_FLASHINFER = [name for name in ATTENTION if "fi" in name]
OTHERS = [name for name in ATTENTION if name not in USES_FLASHINFER]
BOTH = [f"{name} {version}" for name in USES_FLASHINFER for version in VERSIONS]
SURE = [f"{name} deterministic" for name in DETERMINISTIC]
NAMES = [*OTHERS, *SURE, *by_night(["fi 0.6.13", "fa,fi 0.7.2"], BOTH)]
Rows = Sequence[tuple[int, int]]

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def flashinfer_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its calls are held against the contract here, and its kernels against float64 on a GPU by test_on_pages.py."""
    version = name.partition(" ")[2]
    library = flashinfer_double(monkeypatch, version if version in VERSIONS else VERSIONS[0])
    yield
    assert library.late == []


def a_case(name: str, rows: Rows, page_size: int, window: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, page_size, window, dtype, deterministic=name in SURE)
    return make_case(shape, rows, dtype, CPU)


def make(name: str, shape: AttentionShape) -> Attention:
    return ATTENTION[name.partition(" ")[0]](shape)


def attend(attention: Attention, case: Case) -> Tensor:
    return attention.plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, case.kv_2PKSD)


def check(attention: Attention, case: Case, atol: float = 2e-6, rtol: float = 1e-5) -> None:
    """Hold the output of a backend against the dense computation, and what it wrote against all keys and values."""
    output = attend(attention, case)
    assert output.dtype == case.shape.dtype
    torch.testing.assert_close(output.double(), case.expected(), atol=atol, rtol=rtol)
    assert torch.equal(case.kv_2PKSD.nan_to_num(-99), case.filled_pages().nan_to_num(-99))


def check_rows(name: str, rows: Rows, page_size: int, window: int = 0) -> None:
    case = a_case(name, rows, page_size, window)
    check(make(name, case.shape), case)


MIXED = [(70, 1), (3, 1), (0, 1), (1, 1), (0, 9), (16, 5), (15, 17), (64, 64)]


@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (4, 0), (16, 0), (64, 0), (4, 5)])
def test_mixed_rows_on_shuffled_pages_agree_with_dense_attention(name: str, page_size: int, window: int) -> None:
    check_rows(name, MIXED, page_size, window)


@pytest.mark.parametrize("seed", range(5))
def test_random_rows_agree_with_dense_attention(name: str, seed: int) -> None:
    draw = random.Random(seed)
    rows = [(draw.choice([0, draw.randrange(90)]), draw.choice([1, 1, draw.randrange(1, 40)])) for _ in range(6)]
    check_rows(name, sorted(rows, key=lambda row: row[1] != 1), draw.choice([1, 2, 8, 32]))  # decode rows come first


def test_steps_of_any_size_one_after_the_other_agree_with_dense_attention(name: str) -> None:
    attention, draw = make(name, a_case(name, MIXED, 4).shape), random.Random(0)
    for num_rows in (3, 1, 3, 20, 3, 4, 17, 1, 2):
        rows = [(draw.randrange(60), 1) for _ in range(num_rows)] + [(5, 7)] * (num_rows == 4)
        check(attention, a_case(name, rows, 4))


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_reads_what_another_row_writes_in_the_same_step(name: str, count: int) -> None:
    case = a_case(name, [(8, count), (0, 8)], 8)
    reader_2CKD, writer_2CKD = case.kv_rows_2CKD
    reader_2CKD[:, :8] = writer_2CKD
    case.kv_2PKSD.fill_(float("nan"))
    case.batch.page_table_BN[0, 0] = case.batch.page_table_BN[1, 0]  # the table of the host shares its memory
    check(make(name, case.shape), case)


@pytest.mark.parametrize(
    ("window", "start"),
    [
        pytest.param(window, start, marks=() if (window, start) in ((0, 0), (7, 10)) else pytest.mark.night)
        for window in (0, 7, 800)
        for start in (0, 10)
    ],
)
def test_a_chunk_longer_than_a_block_is_causal(name: str, start: int, window: int) -> None:
    check_rows(name, [(start, 600)], 16, window)


@pytest.mark.parametrize("window", [0, 5])
def test_many_pages_that_are_not_copied_together_agree_with_dense_attention(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.generate.attention.torch.GATHER_BYTES", 3 * KV_HEADS * 4 * HEAD_DIM * 4)  # three pages
    check_rows(name, [(45, 1), (3, 1), (70, 1), (7, 1), (0, 1)], 4, window)


@pytest.mark.parametrize("window", [0, 5, 70, 100])
@pytest.mark.parametrize("rows", [[(70, 1)], [(0, 1)], [(70, 1), (3, 1)], [(70, 1), (2, 9)]])
def test_few_decode_rows_agree_with_dense_attention(name: str, rows: list[tuple[int, int]], window: int) -> None:
    check_rows(name, rows, 4, window)


@pytest.mark.parametrize("window", rest_at_night([37, 0]))
def test_the_bits_of_a_token_are_its_own_where_they_must_be(name: str, window: int) -> None:
    rows = [(299, 1), (20, 1), (0, 300), (64, 64)]
    together = a_case(name, rows, 16, window)
    bits = attend(make(name, together.shape), together)
    differ = 0
    for row, (start, count) in enumerate(rows):
        for size in (1, 7, 300):
            for begin in range(start, start + count, size)[:: 1 if count < 9 or size > 9 else 11]:
                part, tokens = part_of(together, row, begin, min(begin + size, start + count))
                differ += not torch.equal(attend(make(name, part.shape), part), bits[tokens])
    assert (differ == 0) is (name in SURE)


def part_of(case: Case, row: int, begin: int, end: int) -> tuple[Case, slice]:
    """Return a step that computes the tokens [begin, end) of a row again, and where they are in that of *case*."""
    page_size, batch, (k_CKD, v_CKD) = case.shape.page_size, case.batch, case.kv_rows_2CKD[row]
    pages = tuple(batch.page_table_BN[row, : -(-end // page_size)].tolist())
    planned = PlanRow(0, begin, (0,) * (end - begin), pages, 0, None)
    tables = PageTables(1, len(pages) * page_size, page_size)
    tables.update([planned])
    last = batch.query_starts[row + 1] - batch.seq_lens[row]
    tokens = slice(last + begin, last + end)
    new_batch = build_batch(BatchPlan(0, (planned,), int(end - begin == 1)), tables, CPU)
    k_TKD, v_TKD = k_CKD[begin:end], v_CKD[begin:end]
    return replace(case, batch=new_batch, q_THD=case.q_THD[tokens], k_TKD=k_TKD, v_TKD=v_TKD), tokens


def test_bfloat16_is_summed_in_float32(name: str) -> None:
    case = a_case(name, MIXED, 16, dtype=torch.bfloat16)
    check(make(name, case.shape), case, atol=2e-2, rtol=1e-2)
