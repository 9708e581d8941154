"""The contract of `Attention`, held against a dense computation without pages: one head, one query, float64."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from itertools import takewhile

import pytest
import torch
from support.flashinfer_double import Double
from support.flashinfer_signatures import VERSIONS
from support.selection import by_night, rest_at_night
from torch import Tensor

from stages.generate.attention import ATTENTION, DETERMINISTIC, Attention, AttentionShape, flashinfer
from stages.generate.batch import ForwardBatch, PageTables, build_batch
from stages.generate.schedule.plan import BatchPlan, PlanRow

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 20
CPU = torch.device("cpu")
EXPECTED: dict[object, Tensor] = {}
USES_FLASHINFER = [name for name in ATTENTION if "fi" in name]
OTHERS = [name for name in ATTENTION if name not in USES_FLASHINFER]
BOTH = [f"{name} {version}" for name in USES_FLASHINFER for version in VERSIONS]
SURE = [f"{name} deterministic" for name in DETERMINISTIC]
NAMES = [*OTHERS, *SURE, *by_night(["fi 0.6.13", "fa,fi 0.7.2"], BOTH)]

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def flashinfer_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """Its calls are held against the contract here, and its kernels against float64 on a GPU by test_on_pages.py."""
    version = name.partition(" ")[2]
    library = Double(version if version in VERSIONS else VERSIONS[0])
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    yield library
    assert library.late == []


def dense(q_QHD: Tensor, k_CKD: Tensor, v_CKD: Tensor, window: int = 0) -> Tensor:
    """The queries are the last ones of the C tokens."""
    start = len(k_CKD) - len(q_QHD)
    out = torch.empty(q_QHD.shape, dtype=torch.float64)
    for i in range(len(q_QHD)):
        seen = slice(max(0, start + i + 1 - window) if window else 0, start + i + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            weights = (k_CKD[seen, kv_head].double() @ q_QHD[i, head].double() / HEAD_DIM**0.5).softmax(0)
            out[i, head] = weights @ v_CKD[seen, kv_head].double()
    return out


class Case:
    """Rows of (start, number of new tokens), their keys and values, and pages in a shuffled order amid NaN."""

    def __init__(self, rows: list[tuple[int, int]], page_size: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.rows, self.page_size = rows, page_size
        self.k = [torch.randn(start + count, KV_HEADS, HEAD_DIM).to(dtype) for start, count in rows]
        self.v = [torch.randn(start + count, KV_HEADS, HEAD_DIM).to(dtype) for start, count in rows]
        self.q_THD = torch.randn(sum(count for _, count in rows), HEADS, HEAD_DIM).to(dtype)
        needed = [-(-(start + count) // page_size) for start, count in rows]
        num_pages = sum(needed) + 3
        order = iter(random.Random(0).sample(range(num_pages), num_pages))
        self.pages = [tuple(next(order) for _ in range(count)) for count in needed]
        self.kv_2PKSD = torch.full((2, num_pages, KV_HEADS, page_size, HEAD_DIM), float("nan"), dtype=dtype)
        for row, (start, _) in enumerate(rows):
            self.store(row, 0, start)

    def store(self, row: int, begin: int, end: int) -> None:
        for position in range(begin, end):
            page, offset = self.pages[row][position // self.page_size], position % self.page_size
            self.kv_2PKSD[0, page, :, offset] = self.k[row][position]
            self.kv_2PKSD[1, page, :, offset] = self.v[row][position]

    def batch(self) -> ForwardBatch:
        tables = PageTables(len(self.rows), 1000, self.page_size)
        numbered = enumerate(self.rows)
        rows = tuple(PlanRow(row, start, (0,) * count, self.pages[row], 0, None) for row, (start, count) in numbered)
        tables.update(rows)
        num_decode_rows = sum(1 for _ in takewhile(lambda row: row[1] == 1, self.rows))
        return build_batch(BatchPlan(0, rows, num_decode_rows), tables, CPU)

    def attend(self, name: str, window: int = 0) -> Tensor:
        return self.attend_with(make(name, self.page_size, window, self.q_THD.dtype))

    def attend_with(self, attention: Attention) -> Tensor:
        k_TKD = torch.cat([k[start:] for k, (start, _) in zip(self.k, self.rows, strict=True)])
        v_TKD = torch.cat([v[start:] for v, (start, _) in zip(self.v, self.rows, strict=True)])
        return attention.plan(self.batch())(self.q_THD, k_TKD, v_TKD, self.kv_2PKSD)

    def expected(self, window: int = 0) -> Tensor:
        """Return o_THD, which is computed once for all backends and sizes of pages."""
        numbers = hashlib.sha256(b"".join(each.float().numpy().tobytes() for each in (self.q_THD, *self.k, *self.v)))
        key = (numbers.digest(), tuple(self.rows), window)
        if key not in EXPECTED:
            queries = torch.split(self.q_THD, [count for _, count in self.rows])
            each = [dense(q, k, v, window) for q, k, v in zip(queries, self.k, self.v, strict=True)]
            EXPECTED[key] = torch.cat(each)
        return EXPECTED[key]

    def check(self, name: str, window: int = 0) -> Tensor:
        """Hold the output of a backend against the dense computation, and return it in float64."""
        output = self.attend(name, window).double()
        torch.testing.assert_close(output, self.expected(window), atol=2e-6, rtol=1e-5)
        return output


def make(name: str, page_size: int, window: int = 0, dtype: torch.dtype = torch.float32) -> Attention:
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, page_size, window, dtype, deterministic=name in SURE)
    return ATTENTION[name.partition(" ")[0]](shape)


MIXED = [(70, 1), (3, 1), (0, 1), (1, 1), (0, 9), (16, 5), (15, 17), (64, 64)]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_mixed_rows_on_shuffled_pages_agree_with_dense_attention(name: str, page_size: int) -> None:
    case = Case(MIXED, page_size)
    case.check(name)


@pytest.mark.parametrize("seed", range(5))
def test_random_rows_agree_with_dense_attention(name: str, seed: int) -> None:
    draw = random.Random(seed)
    rows = [(draw.choice([0, draw.randrange(90)]), draw.choice([1, 1, draw.randrange(1, 40)])) for _ in range(6)]
    case = Case(sorted(rows, key=lambda row: row[1] != 1), draw.choice([1, 2, 8, 32]))  # decode rows come first
    case.check(name)


def test_steps_of_any_size_one_after_the_other_agree_with_dense_attention(name: str) -> None:
    attention, draw = make(name, 4), random.Random(0)
    for num_rows in (3, 1, 3, 20, 3, 4, 17, 1, 2):
        case = Case([(draw.randrange(60), 1) for _ in range(num_rows)] + [(5, 7)] * (num_rows == 4), 4)
        output = case.attend_with(attention).double()
        torch.testing.assert_close(output, case.expected(), atol=2e-6, rtol=1e-5)


def test_keys_and_values_are_written_to_their_slots_and_nowhere_else(name: str) -> None:
    case = Case(MIXED, 4)
    case.attend(name)
    written = case.kv_2PKSD.clone()
    case.kv_2PKSD.fill_(float("nan"))
    for row, (start, count) in enumerate(MIXED):
        case.store(row, 0, start + count)
    assert torch.equal(written.nan_to_num(-99), case.kv_2PKSD.nan_to_num(-99))


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_reads_what_another_row_writes_in_the_same_step(name: str, count: int) -> None:
    case = Case([(8, count), (0, 8)], 8)
    case.k[0][:8], case.v[0][:8] = case.k[1], case.v[1]
    case.kv_2PKSD.fill_(float("nan"))
    case.pages[0] = (case.pages[1][0], case.pages[0][1])
    case.check(name)


@pytest.mark.parametrize(
    ("window", "start"),
    [
        pytest.param(window, start, marks=() if (window, start) in ((0, 0), (7, 10)) else pytest.mark.night)
        for window in (0, 7, 800)
        for start in (0, 10)
    ],
)
def test_a_chunk_longer_than_a_block_is_causal(name: str, start: int, window: int) -> None:
    case = Case([(start, 600)], 16)
    case.check(name, window)


@pytest.mark.parametrize("window", [0, 5])
def test_many_pages_that_are_not_copied_together_agree_with_dense_attention(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.generate.attention.torch.GATHER_BYTES", 3 * KV_HEADS * 4 * HEAD_DIM * 4)  # three pages
    case = Case([(45, 1), (3, 1), (70, 1), (7, 1), (0, 1)], 4)
    case.check(name, window)


def test_a_window_hides_what_lies_before_it(name: str) -> None:
    case = Case(MIXED, 4)
    output = case.check(name, window=5)
    assert not torch.allclose(output, case.expected(), atol=1e-2)


@pytest.mark.parametrize("window", [0, 5, 70, 100])
@pytest.mark.parametrize("rows", [[(70, 1)], [(0, 1)], [(70, 1), (3, 1)], [(70, 1), (2, 9)]])
def test_few_decode_rows_agree_with_dense_attention(name: str, rows: list[tuple[int, int]], window: int) -> None:
    case = Case(rows, 4)
    case.check(name, window)


def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    together, alone = Case(MIXED, 16), Case(MIXED, 16)
    first = sum(count for _, count in MIXED[:4])
    alone.rows, alone.k, alone.v = [MIXED[4]], [together.k[4]], [together.v[4]]
    alone.pages, alone.q_THD = [together.pages[4]], together.q_THD[first : first + MIXED[4][1]]
    torch.testing.assert_close(together.attend(name)[first : first + MIXED[4][1]], alone.attend(name))


@pytest.mark.parametrize("window", rest_at_night([37, 0]))
def test_the_bits_of_a_token_are_its_own_where_they_must_be(name: str, window: int) -> None:
    together = Case([(299, 1), (20, 1), (0, 300), (64, 64)], 16)
    bits = together.attend(name, window)
    first, differ = 0, 0
    for row, (start, count) in enumerate(together.rows):
        for size in (1, 7, 300):
            for begin in range(start, start + count, size)[:: 1 if count < 9 or size > 9 else 11]:
                end = min(begin + size, start + count)
                alone = Case([(begin, end - begin)], 16)
                alone.k, alone.v = [together.k[row][:end]], [together.v[row][:end]]
                alone.kv_2PKSD, alone.pages = together.kv_2PKSD, [together.pages[row]]
                alone.q_THD = together.q_THD[first + begin - start : first + end - start]
                same = bits[first + begin - start : first + end - start]
                differ += not torch.equal(alone.attend(name, window), same)
        first += count
    assert (differ == 0) is (name in SURE)


def test_bfloat16_is_summed_in_float32(name: str) -> None:
    case = Case(MIXED, 16, torch.bfloat16)
    output = case.attend(name)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), case.expected(), atol=2e-2, rtol=1e-2)
