"""Blocks of GGUF files and of INT4: their weights bit for bit; products have the same bits on any CPU, in any batch."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from numpy.typing import NDArray
from support import gguf_files
from support.gemm import Gemm, library_functions
from support.gguf_files import SMALL
from support.int4 import KINDS, int4_weights, random_int4
from support.kernel_variants import VARIANTS, Functions
from torch import Tensor

from stages.generate.model.gguf import BLOCKS

# R = rows, I = inputs, O = outputs

BLOCK_TYPES = [*gguf_files.BLOCK_TYPES, *KINDS]


def blocks_of(kind: str, outputs: int, inputs: int) -> NDArray[np.uint8]:
    make = random_int4 if kind in KINDS else gguf_files.random_blocks
    return make(kind, outputs, inputs, np.random.default_rng(outputs + inputs))


def dequantized(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return int4_weights(kind, blocks) if kind in KINDS else gguf_files.dequantized(kind, blocks)


def inputs_of(kind: str) -> int:
    """Return a number of inputs that is no multiple of a unit, where blocks allow that."""
    return 608 if kind in SMALL or kind == "INT4_32" else 704 if kind == "INT4_64" else 640 if kind in KINDS else 768


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rounded(x_RI: Tensor) -> Tensor:
    """Return activations as the kernels round them: 32 share a scale."""
    groups = x_RI.double().view(len(x_RI), -1, 32)
    scales = (x_RI.view(len(x_RI), -1, 32).abs().amax(-1, keepdim=True) / 127).double()
    return ((groups / scales).round() * scales).view(x_RI.shape)


def widened(kind: str, blocks: NDArray[np.uint8], inputs: int) -> NDArray[np.float32]:
    rows = blocks.ctypes.data + np.arange(len(blocks), dtype=np.uint64) * np.uint64(blocks.shape[1])
    found = np.full((len(blocks), inputs), np.nan, np.float32)
    at = (ctypes.c_int64(len(blocks)), ctypes.c_int64(inputs), 2, ctypes.c_void_p(found.ctypes.data))
    library_functions().kernels_widen(BLOCKS[kind][0], ctypes.c_void_p(rows.ctypes.data), *at)
    return found


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F32", "F16", "BF16"])
def test_widened_blocks_have_the_bits_that_their_description_means(kind: str) -> None:
    inputs = 768
    if kind in BLOCK_TYPES:
        blocks = blocks_of(kind, 21, inputs)
    else:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        blocks = numbers(21, inputs).to(dtype).view(torch.uint8).numpy()
    expected = dequantized(kind, blocks)
    assert (widened(kind, blocks, inputs).view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_products_are_those_of_the_weights_and_the_rounded_activations(kind: str, functions: Functions) -> None:
    gemm, inputs = Gemm(functions), inputs_of(kind)
    blocks, x_RI = blocks_of(kind, 50, inputs), numbers(13, inputs)
    y_RO = gemm(gemm.pack_blocks(kind, blocks, inputs), x_RI)
    weight_OI = torch.from_numpy(dequantized(kind, blocks)).double()
    exact_RO = F.linear(rounded(x_RI), weight_OI)
    size_RO = rounded(x_RI).norm(dim=1)[:, None] * weight_OI.norm(dim=1)
    assert ((y_RO - exact_RO).abs() / size_RO).max() < 2**-22
    whole_RO = F.linear(x_RI.double(), weight_OI)
    assert (y_RO - whole_RO).norm() < 0.01 * whole_RO.norm()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_row_has_the_same_bits_in_any_company_and_on_every_variant(kind: str) -> None:
    inputs, found = inputs_of(kind), []
    blocks, x_RI = blocks_of(kind, 100, inputs), numbers(80, inputs)
    for variant in VARIANTS:
        gemm = Gemm(Functions(variant))
        packed = gemm.pack_blocks(kind, blocks, inputs)
        rows = gemm.prepare(packed, x_RI)
        y_RO = gemm.multiply(packed, rows)
        for count in range(1, 14):
            some = np.concatenate([rows[:count], np.zeros((1, rows.shape[1]), np.uint8)])[:-1]
            assert torch.equal(gemm.multiply(packed, some), y_RO[:count]), count
        assert torch.equal(gemm.multiply(packed, rows, [0, 1, 3, 6, 7]), y_RO)
        found.append(y_RO)
    for y_RO in found:
        assert torch.equal(y_RO, found[0])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_the_largest_integers_do_not_overflow(kind: str, functions: Functions) -> None:
    gemm, inputs = Gemm(functions), 512
    _, weights, size = BLOCKS[kind]
    scales = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    for value in (0x00, 0x80, 0xFF):  # the ends of unsigned and of signed integers
        blocks = np.full((32, inputs // weights, size), value, np.uint8)
        blocks[..., 208:210] = scales if kind == "Q6_K" else blocks[..., 208:210]
        if kind != "Q6_K":
            blocks[..., 0:2] = scales
            if kind in KINDS:
                blocks[..., 2] = 16 if value == 0 else 0
            elif kind not in ("Q4_0", "Q5_0", "Q8_0"):
                blocks[..., 2:4] = scales
        blocks = np.ascontiguousarray(blocks.reshape(32, -1))
        weight_OI = torch.from_numpy(dequantized(kind, blocks)).double()
        for sign in (1, -1):
            x_RI = torch.full((3, inputs), 127.0 * sign)
            exact_RO = F.linear(x_RI.double(), weight_OI)
            y_RO = gemm(gemm.pack_blocks(kind, blocks, inputs), x_RI)
            torch.testing.assert_close(y_RO.double(), exact_RO, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_number_that_is_none_makes_its_own_row_so(kind: str, functions: Functions) -> None:
    gemm, inputs = Gemm(functions), 512
    packed = gemm.pack_blocks(kind, blocks_of(kind, 20, inputs), inputs)
    x_RI = numbers(9, inputs)
    clean_RO = gemm(packed, x_RI)
    x_RI[4, 100], x_RI[6, 7] = float("nan"), float("inf")
    y_RO = gemm(packed, x_RI)
    wrong = torch.isin(torch.arange(9), torch.tensor([4, 6]))
    assert y_RO[wrong].isnan().all()
    assert torch.equal(y_RO[~wrong], clean_RO[~wrong])
