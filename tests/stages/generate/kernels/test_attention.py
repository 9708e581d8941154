"""Attention over pages: right against float64, and the same bits for a query in any company."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_variants import Functions
from support.selection import by_night
from torch import Tensor

from stages.generate.kernels.library import Pages

# T = tokens of a row, H = query heads, K = kv heads, G = query heads of one kv head, D = head dim,
# P = pages, S = slots of a page, 2 = keys and values

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of `Format` in kernels.h."""
SEGMENT: Final = 1024
NAN: Final = float("nan")
LIBC: Final = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy behind which no memory may be read."""
    page_bytes = mmap.PAGESIZE
    num_bytes = tensor.nbytes
    kept = -(-num_bytes // page_bytes) * page_bytes
    memory = mmap.mmap(-1, kept + page_bytes)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    assert LIBC.mprotect(ctypes.c_void_p(whole.data_ptr() + kept), ctypes.c_size_t(page_bytes), 0) == 0
    copy = whole[kept - num_bytes : kept].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@dataclass(frozen=True, slots=True)
class Shape:
    group: int = 2
    head_dim: int = 64
    page_size: int = 64
    window: int = 0
    dtype: torch.dtype = torch.bfloat16
    num_kv_heads: int = 2

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def factor(self) -> float:
        """What queries are multiplied with."""
        return math.log2(math.e) / math.sqrt(self.head_dim)


def as_they_lie(k_PKSD: Tensor) -> Tensor:
    """Return keys in the order of `Pages` in kernels.h: on large pages 16 lie together, dimension by dimension."""
    num_pages, num_heads, page_size, head_dim = k_PKSD.shape
    if page_size < 16:
        return k_PKSD
    word = 2 if k_PKSD.dtype == torch.bfloat16 else 1
    k_PKGSDW = k_PKSD.view(num_pages, num_heads, page_size // 16, 16, head_dim // word, word)
    return k_PKGSDW.transpose(3, 4).reshape(k_PKSD.shape)


@dataclass(slots=True)
class Row:
    """One row whose tokens lie on pages among those of others. All else on the pages is NaN."""

    shape: Shape
    length: int
    seed: int = 0
    spread: float = 1.0
    """Of queries and keys."""
    begin: int = 0
    """The position of the first token. The pages before it are gone."""
    any_queries: bool = False
    """False: as if rounded to bfloat16, which some variants do, after scaling."""
    q_THD: Tensor = field(init=False)
    k_TKD: Tensor = field(init=False)
    v_TKD: Tensor = field(init=False)
    kv_2PKSD: Tensor = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(self.seed)
        q_THD = torch.randn(self.length, shape.num_heads, shape.head_dim, generator=generator) * self.spread
        if not self.any_queries:
            q_THD = (q_THD * shape.factor).bfloat16().float() / shape.factor
        self.q_THD = guarded(q_THD)
        k_TKD, self.v_TKD = torch.randn(2, self.length, shape.num_kv_heads, shape.head_dim, generator=generator)
        self.k_TKD = k_TKD * self.spread
        positions_T = self.begin + torch.arange(self.length)
        first_page, num_pages = self.begin // shape.page_size, int(positions_T[-1]) // shape.page_size + 1
        table = torch.full((num_pages,), -(2**31), dtype=torch.int32)
        num_pages -= first_page
        table[first_page:] = torch.randperm(num_pages + 2, generator=generator)[:num_pages]
        self.table = guarded(table)
        kv_2PKSD = torch.full(
            (2, num_pages + 2, shape.num_kv_heads, shape.page_size, shape.head_dim), NAN, dtype=shape.dtype
        )
        pages_T, slots_T = table[positions_T // shape.page_size].long(), positions_T % shape.page_size
        kv_2PKSD[0, pages_T, :, slots_T] = self.k_TKD.to(shape.dtype)
        kv_2PKSD[1, pages_T, :, slots_T] = self.v_TKD.to(shape.dtype)
        kv_2PKSD[0] = as_they_lie(kv_2PKSD[0].clone())
        self.kv_2PKSD = guarded(kv_2PKSD)

    def expected(self, tokens: Sequence[int] | None = None) -> Tensor:
        """Return o_THD of all or of some tokens in float64."""
        shape = self.shape
        chosen_T = torch.arange(self.length) if tokens is None else torch.tensor(tokens)
        q_THD = self.q_THD[chosen_T].double()
        k_TKD, v_TKD = (x.to(shape.dtype).double() for x in (self.k_TKD, self.v_TKD))
        q_TKGD = q_THD.view(len(chosen_T), shape.num_kv_heads, shape.group, -1)
        scores_KGTC = torch.einsum("tkgd,ckd->kgtc", q_TKGD, k_TKD) * shape.head_dim**-0.5
        distance_TC = chosen_T[:, None] - torch.arange(self.length)
        hidden_TC = (distance_TC < 0) | (distance_TC >= (shape.window or self.length))
        scores_KGTC.masked_fill_(hidden_TC, float("-inf"))
        return torch.einsum("kgtc,ckd->tkgd", scores_KGTC.softmax(-1), v_TKD).reshape(q_THD.shape)


@dataclass(frozen=True, slots=True)
class Attention:
    """The functions of one variant."""

    functions: Functions

    def call(self, name: str, *arguments: object) -> int:
        return self.functions.call(name, *arguments)

    def _pages(self, row: Row) -> Pages:
        shape, (keys, values) = row.shape, row.kv_2PKSD
        return Pages(
            keys.data_ptr(),
            values.data_ptr(),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            shape.window,
            DTYPES.index(shape.dtype),
            shape.head_dim**-0.5,
        )

    def chunk(self, row: Row, begin: int, end: int, *, at_once: int = 0) -> Tensor:
        """Return o_THD of the tokens [begin, end), at most *at_once* in a call; 0: as many as may be."""
        shape, pages = row.shape, self._pages(row)
        most = self.call("queries", ctypes.byref(pages))
        scratch = guarded(torch.full((self.call("attend_scratch", ctypes.byref(pages)),), 0xFF, dtype=torch.uint8))
        o_THD = guarded(torch.full((end - begin, shape.num_heads, shape.head_dim), NAN))
        step = min(at_once or most, most)
        for first in range(begin, end, step):
            count = min(step, end - first)
            for head in range(shape.num_kv_heads):
                heads = slice(head * shape.group, (head + 1) * shape.group)
                q, o = row.q_THD[first:, heads], o_THD[first - begin :, heads]
                place = (ctypes.byref(pages), row.table, row.begin + first, count, head)
                self.call("attend", *place, q, q.stride(0), o, o.stride(0), scratch)
        return o_THD

    def merged(self, row: Row, token: int) -> Tensor:
        """Return o_HD of one token from the parts of its segments."""
        shape, pages, position = row.shape, self._pages(row), row.begin + token
        scratch = guarded(torch.full((self.call("attend_scratch", ctypes.byref(pages)),), 0xFF, dtype=torch.uint8))
        segment_tokens = max(SEGMENT, shape.page_size)
        first = max(0, position + 1 - shape.window) // segment_tokens if shape.window else 0
        num_parts = position // segment_tokens + 1 - first
        o_HD = guarded(torch.full((shape.num_heads, shape.head_dim), NAN))
        for head in range(shape.num_kv_heads):
            heads = slice(head * shape.group, (head + 1) * shape.group)
            parts = guarded(torch.full((num_parts, shape.group, self.call("part_floats", ctypes.byref(pages))), NAN))
            for part in reversed(range(num_parts)):
                place = (ctypes.byref(pages), row.table, position, head, first + part)
                self.call("attend_segment", *place, row.q_THD[token, heads], parts[part], scratch)
            self.call("merge", ctypes.byref(pages), parts, num_parts, o_HD[heads])
        return o_HD

    def check_bits(self, row: Row, chunks: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Compute the row in *chunks*, and again with the tokens at *positions* alone and from parts. Return o_THD."""
        begins = accumulate(chunks, initial=0)
        o_THD = torch.cat([self.chunk(row, begin, end) for begin, end in pairwise(begins)])
        for position in positions:
            assert torch.equal(self.chunk(row, position, position + 1)[0], o_THD[position])
            assert torch.equal(self.merged(row, position), o_THD[position])
        return o_THD


@pytest.fixture(scope="module")
def attention(functions: Functions) -> Attention:
    return Attention(functions)


TOLERANCE: Final = 3e-6
"""Of outputs that are means of numbers around 1."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "window", "length"),
    [
        (1, 64, 64, 0, 200),
        (2, 128, 64, 0, 130),
        (3, 64, 16, 100, 230),
        (4, 2, 1, 5, 70),
        (5, 20, 2, 1, 40),
        (6, 6, 2048, 64, 150),
        (7, 80, 256, 300, 270),
        (8, 96, 16, 0, 100),
        (12, 32, 64, 65, 140),
        (16, 256, 2, 0, 33),
        (2, 6, 64, 0, 2100),
        (1, 2, 16, 1500, 2600),
        (1, 6, 2048, 0, 2100),
    ],
)
def test_attention_is_that_of_float64_and_the_same_bits_however_it_is_computed(
    attention: Attention, dtype: torch.dtype, group: int, head_dim: int, page_size: int, window: int, length: int
) -> None:
    row = Row(Shape(group, head_dim, page_size, window, dtype), length)
    third = length // 3
    o_THD = attention.check_bits(row, [third, length - third], [0, third, length - 1, length // 2])
    tokens = [*range(0, length, 1 + length // 50), length - 1]
    error = (o_THD[tokens].double() - row.expected(tokens)).abs().max().item()
    assert error < TOLERANCE


@settings(max_examples=by_night(25, 300))
@given(data=st.data())
def test_any_shape_has_the_same_bits_in_any_chunks(attention: Attention, data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([0, 0, 1, 5, 64, 1000]))
    shape = Shape(
        group=data.draw(st.integers(1, 16)),
        head_dim=2 * data.draw(st.integers(1, 70)),
        page_size=2 ** data.draw(st.integers(0, 11)),
        window=window,
        dtype=data.draw(st.sampled_from(DTYPES)),
        num_kv_heads=data.draw(st.integers(1, 3)),
    )
    length = data.draw(st.integers(1, 1200 if shape.head_dim * shape.group < 64 else 150))
    row = Row(shape, length, seed=data.draw(st.integers(0, 99)), spread=data.draw(st.sampled_from([0.1, 1, 10])))
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {0, length})
    chunks = [end - begin for begin, end in pairwise(cuts)]
    positions = data.draw(st.lists(st.integers(0, length - 1), max_size=3))
    o_THD = attention.check_bits(row, chunks, positions)
    assert torch.equal(attention.chunk(row, 0, length, at_once=data.draw(st.integers(1, length))), o_THD)


def test_a_token_far_behind_the_start_needs_only_the_pages_of_its_window(attention: Attention) -> None:
    row = Row(Shape(group=3, head_dim=20, page_size=16, window=40, dtype=torch.float32), 95, begin=130_980)
    chunk_THD = attention.chunk(row, 39, row.length)
    assert (chunk_THD.double() - row.expected()[39:]).abs().max().item() < TOLERANCE
    for token in (39, 60, row.length - 1):
        assert torch.equal(attention.merged(row, token), chunk_THD[token - 39])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_far_from_zero_choose_the_greatest(attention: Attention, dtype: torch.dtype) -> None:
    row = Row(Shape(head_dim=32, dtype=dtype), 150, spread=40)
    o_THD = attention.check_bits(row, [150], [149])
    assert (o_THD.double() - row.expected()).abs().max().item() < 0.01


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1.1), (torch.bfloat16, 0.7), (torch.float16, 0.7)], ids=str
)
def test_the_error_is_below_that_of_torch(attention: Attention, dtype: torch.dtype, most: float) -> None:
    """In float32 both round as often, and chance decides by a few per cent whose error is larger."""
    row = Row(Shape(group=3, head_dim=80, dtype=dtype), 200, any_queries=True)
    q_HTD, k_KTD, v_KTD = (x.to(dtype).transpose(0, 1) for x in (row.q_THD, row.k_TKD, row.v_TKD))
    torch_HTD = F.scaled_dot_product_attention(q_HTD[None], k_KTD[None], v_KTD[None], is_causal=True, enable_gqa=True)[
        0
    ]
    expected_THD = row.expected()
    error, error_of_torch = (
        (o_THD - expected_THD).square().mean().sqrt().item()
        for o_THD in (attention.chunk(row, 0, row.length), torch_HTD.transpose(0, 1))
    )
    assert error <= most * error_of_torch


def test_scores_of_minus_infinity_have_no_weight(attention: Attention) -> None:
    row = Row(Shape(group=1, head_dim=2, num_kv_heads=1, dtype=torch.float32), 200)
    row.q_THD.fill_(1e30)
    row.kv_2PKSD[0, row.table[:3].long()] = -1e30
    row.kv_2PKSD[0, row.table[3].long()] = 0
    o_THD = attention.chunk(row, 0, row.length)
    assert o_THD[:192].isnan().all()  # no score is finite
    for token in range(192, row.length):
        mean_D = row.v_TKD[192 : token + 1, 0].double().mean(0)
        assert (o_THD[token, 0].double() - mean_D).abs().max().item() < TOLERANCE
    assert torch.equal(attention.merged(row, 199), o_THD[199])


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_a_bad_value_reaches_only_those_that_see_it(attention: Attention, bad: float) -> None:
    row = Row(Shape(group=3, head_dim=32, window=70), 200)
    good_THD = attention.chunk(row, 0, row.length)
    row.kv_2PKSD[1, int(row.table[1]), 1, 36] = bad  # the value of token 100
    o_THD = attention.chunk(row, 0, row.length)
    bad_TH = ~o_THD.isfinite().all(2)
    assert torch.equal(bad_TH.nonzero(), torch.cartesian_prod(torch.arange(100, 170), torch.arange(3, 6)))
    assert torch.equal(o_THD[~bad_TH], good_THD[~bad_TH])
