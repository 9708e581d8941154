"""Multiplication with packed weights: right against float64, and the same bits for a row in any company."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from support.gemm import DTYPES, FORMATS, PANEL, Gemm, Packed, padded
from support.kernel_variants import VARIANTS, Functions
from torch import Tensor

from stages.generate.kernels.library import Matrix

# R = rows, I = inputs, O = outputs

GROUP = 32


@pytest.fixture(scope="module")
def gemm(functions: Functions) -> Gemm:
    return Gemm(functions)


SHAPES = [(17, 6), (40, 36), (16, 1), (1, 63), (33, 65), (80, 520), (130, 129), (64, 1030)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def stored(format_name: str, outputs: int, inputs: int) -> Tensor:
    """Return a weight as a checkpoint has it."""
    return numbers(outputs, inputs, seed=1).to(DTYPES.get(format_name, torch.bfloat16))


def dequantised(packed: Packed) -> Tensor:
    """Return the weights that the panels of int8 have: those of Q8_0 in gemm.h."""
    num_panels = padded(packed.matrix.outputs, PANEL) // PANEL
    units = packed.panels[:-64].reshape(num_panels, -1, 64 + 64 * PANEL)
    scales = units[:, :, :64].copy().view(np.float16).astype(np.float64).reshape(*units.shape[:2], 2, PANEL)
    integers = units[:, :, 64:].copy().view(np.int8).astype(np.float64).reshape(*units.shape[:2], 2, 8, PANEL, 4)
    weights_PUGKON = integers * scales[:, :, :, None, :, None]
    whole = weights_PUGKON.transpose(0, 4, 1, 2, 3, 5).reshape(num_panels * PANEL, -1)
    return torch.from_numpy(whole[: packed.matrix.outputs, : packed.matrix.inputs].copy())


@pytest.mark.parametrize("format_name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_float64(gemm: Gemm, format_name: str, outputs: int, inputs: int) -> None:
    weight, bias, x = stored(format_name, outputs, inputs), numbers(outputs), numbers(50, inputs)
    exact = F.linear(x.double(), weight.double(), bias.double())
    error = (gemm(gemm.pack(format_name, weight, bias), x) - exact).abs()
    if format_name == "bfloat16" and gemm.variant == "avx512":
        torchs = (F.linear(x.bfloat16(), weight, bias.bfloat16()) - exact).abs()
        assert error.norm() <= torchs.norm()
    else:
        size = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1) + bias.abs()
        assert (error / size).max() <= 2**-24 * inputs**0.5 + 2**-24


@pytest.mark.parametrize("format_name", ["float32", "bfloat16"])
def test_weights_may_have_any_size(gemm: Gemm, format_name: str) -> None:
    weight = numbers(16, 200) * torch.tensor([1e30, 1e-30, 1e36, 1e-34, 1.0, 0.0, 1e-7, 3e7] * 2)[:, None]
    weight[9, 5] = 1e4  # one that is large among small ones
    weight, x = weight.to(DTYPES[format_name]), numbers(7, 200)
    exact = F.linear(x.double(), weight.double())
    size = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    rounding = 2**-8 if format_name == "bfloat16" and gemm.variant == "avx512" else 2**-20
    assert ((gemm(gemm.pack(format_name, weight), x) - exact).abs() <= rounding * size).all()


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("format_name", DTYPES)
def test_weights_of_any_dtype_are_rounded_once(gemm: Gemm, source: str, format_name: str) -> None:
    weight = (numbers(20, 70) * 100).to(DTYPES[source])
    rounded = weight.float().to(DTYPES[format_name])
    assert (gemm.pack(format_name, weight).panels == gemm.pack(format_name, rounded).panels).all()
    one_each = gemm(gemm.pack(format_name, weight), torch.eye(70))
    assert torch.equal(one_each.T, rounded.float())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int8_products_are_those_of_the_quantised_numbers(gemm: Gemm, outputs: int, inputs: int) -> None:
    weight, bias, x = numbers(outputs, inputs), numbers(outputs), numbers(50, inputs)
    packed = gemm.pack("int8", weight, bias)
    weight_OI = dequantised(packed)
    x_RGN = F.pad(x, (0, padded(inputs, GROUP) - inputs)).reshape(50, -1, GROUP)
    scales = x_RGN.abs().amax(2, keepdim=True) / 127
    x_RI = ((x_RGN / scales).nan_to_num().round().double() * scales).reshape(50, -1)[:, :inputs]
    exact = F.linear(x_RI, weight_OI, bias.double())
    size = x_RI.norm(dim=1)[:, None] * weight_OI.norm(dim=1) + bias.abs()
    assert ((gemm(packed, x) - exact).abs() <= 2**-18 * size).all()
    assert_eight_bits(weight, weight_OI)


def assert_eight_bits(weight: Tensor, weight_OI: Tensor) -> None:
    """No weight is further from its quantised one than half a step, and 127 steps are the largest of its group.

    A step is a half, and the smallest halves are 2^-24 apart.
    """
    for first in range(0, weight.shape[1], GROUP):
        group_OI = weight[:, first : first + GROUP].double()
        step = group_OI.abs().amax(1, keepdim=True) / 127
        assert ((weight_OI[:, first : first + GROUP] - group_OI).abs() <= 0.5011 * step + 2**-25).all()


def test_int8_keeps_eight_bits_of_weights_of_all_sizes_that_models_have(gemm: Gemm) -> None:
    weight = numbers(16, 200) * torch.tensor([1e6, 1e-1, 1e3, 1e-3, 1.0, 65504.0, 1e-2, 3e-3] * 2)[:, None]
    weight[8:, 64:128] *= 0.05  # a group that is small beside the others of its output
    weight[3, 128:] = 0
    weight[7] = 0
    weight[9, 5] *= 50  # one that is large among small ones
    packed = gemm.pack("int8", weight)
    assert_eight_bits(weight, dequantised(packed))


def test_a_weight_too_large_for_int8_shows(gemm: Gemm) -> None:
    weight = numbers(16, 70)
    weight[3, 40] = 9e6
    y = gemm(gemm.pack("int8", weight), numbers(2, 70))
    assert y[:, 3].isnan().all() and y[:, 4:].isfinite().all()


def int4_weights(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return the weights that the panels of int4 have, those of INT4_32 in gemm.h; and their scales, each for 32."""
    num_panels, num_units = padded(packed.matrix.outputs, PANEL) // PANEL, padded(packed.matrix.inputs, 64) // 64
    panels = packed.panels[:-64].reshape(num_panels, -1)
    fronts = panels[:, : 2 * num_units * 64].reshape(num_panels, -1, 64)
    scales_PGO = fronts[..., : 2 * PANEL].copy().view(np.float16).astype(np.float64)
    zeros_PGO = -fronts[..., 2 * PANEL : 3 * PANEL].copy().view(np.int8).astype(np.float64)
    lines = panels[:, 2 * num_units * 64 :].reshape(num_panels, 2 * num_units, 4, PANEL, 4)
    integers = np.stack((lines & 15, lines >> 4), axis=3).transpose(0, 4, 1, 2, 3, 5)  # P, O, G, line, half, 4
    integers_POGI = integers.reshape(num_panels, PANEL, 2 * num_units, 32)
    scales_POG1 = scales_PGO.transpose(0, 2, 1)[..., None]
    whole = (integers_POGI - zeros_PGO.transpose(0, 2, 1)[..., None]) * scales_POG1
    outputs, inputs = packed.matrix.outputs, packed.matrix.inputs
    weights = whole.reshape(num_panels * PANEL, -1)[:outputs, :inputs].copy()
    return torch.from_numpy(weights), torch.from_numpy(scales_POG1.reshape(num_panels * PANEL, -1)[:outputs].copy())


@pytest.mark.parametrize(("outputs", "inputs"), [(17, 70), (100, 512)])
def test_int4_is_nearer_than_the_nearest_of_sixteen_equal_steps(gemm: Gemm, outputs: int, inputs: int) -> None:
    weight, x = numbers(outputs, inputs) * 0.02, numbers(50, inputs)
    packed = gemm.pack("int4", weight)
    weight_OI, _ = int4_weights(packed)
    parts = F.pad(weight, (0, -inputs % 32)).view(outputs, -1, 32).double()
    low, high = parts.amin(2, keepdim=True).clamp(max=0), parts.amax(2, keepdim=True).clamp(min=0)
    step = ((high - low) / 15).clamp(min=1e-9)
    zero = (-low / step).round()
    plain = (((parts / step + zero).round().clamp(0, 15) - zero) * step).view(outputs, -1)[:, :inputs]
    importance = parts.pow(2).mean(2, keepdim=True).sqrt() + parts.abs()
    importance = importance.view(outputs, -1)[:, :inputs]
    loss, plain_loss = (((each - weight) ** 2 * importance).sum() for each in (weight_OI, plain))
    assert loss < 0.9 * plain_loss
    exact = F.linear(x.double(), weight_OI)
    assert (gemm(packed, x) - exact).norm() < 0.01 * exact.norm()


def test_int4_is_rounded_alike_on_every_cpu() -> None:
    weight = numbers(33, 200).bfloat16()
    panels = [Gemm(Functions(variant)).pack("int4", weight).panels for variant in VARIANTS]
    assert all((each == panels[0]).all() for each in panels)


def test_a_weight_that_int4_has_no_scale_for_shows(gemm: Gemm) -> None:
    weight = numbers(16, 70)
    weight[3, 40], weight[5, 1] = 9e6, float("nan")
    y = gemm(gemm.pack("int4", weight), numbers(2, 70))
    assert y[:, [3, 5]].isnan().all() and y[:, [0, 1, 2, 4, *range(6, 16)]].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 1e29])
def test_int8_takes_activations_of_any_size(gemm: Gemm, scale: float) -> None:
    weight, x = numbers(16, 70), numbers(3, 70) * scale
    packed = gemm.pack("int8", weight)
    exact = F.linear(x.double(), dequantised(packed))
    assert ((gemm(packed, x) - exact).abs() <= 0.02 * exact.abs().max() + 1e-40).all()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(gemm: Gemm, format_name: str, bad: float) -> None:
    packed = gemm.pack(format_name, stored(format_name, 40, 70))
    x = numbers(5, 70)
    fine = gemm(packed, x)
    x[2, 33] = bad
    y = gemm(packed, x)
    assert not y[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], fine[others])


@pytest.mark.parametrize("format_name", FORMATS)
def test_an_infinite_weight_or_one_that_is_no_number_shows(gemm: Gemm, format_name: str) -> None:
    weight = numbers(20, 70)
    weight[3, 65], weight[17, 2] = float("nan"), float("inf")
    y = gemm(gemm.pack(format_name, weight), numbers(2, 70))
    assert not y[:, [3, 17]].isfinite().any()
    assert y[:, [o for o in range(20) if o not in (3, 17)]].isfinite().all()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_bits_of_a_row_do_not_depend_on_the_others(gemm: Gemm, format_name: str) -> None:
    packed = gemm.pack(format_name, stored(format_name, 100, 1100), numbers(100))
    rows = gemm.prepare(packed, numbers(513, 1100))
    alone = torch.cat([gemm.multiply(packed, rows[r : r + 1]) for r in range(513)])
    for count in (*range(2, 65), 100, 513):
        assert same_bits(gemm.multiply(packed, rows[:count]), alone[:count]), count
        assert same_bits(gemm.multiply(packed, rows[513 - count :]), alone[513 - count :]), count


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 32, 100])
def test_the_bits_do_not_depend_on_how_the_panels_are_split(gemm: Gemm, format_name: str, count: int) -> None:
    packed = gemm.pack(format_name, stored(format_name, 200, 300), numbers(200))
    rows = gemm.prepare(packed, numbers(count, 300))
    whole = gemm.multiply(packed, rows)
    splits: Iterable[list[int]] = ([0, 4, 8, 12, 13], list(range(14)), [0, 2, 3, 13], [0, 1, 6, 13], [0, 5, 12, 13])
    for split in splits:
        assert same_bits(gemm.multiply(packed, rows, split), whole), split


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_tile_is_even_or_whole_and_leaves_work_for_every_thread(gemm: Gemm, format_name: str) -> None:
    for outputs, inputs in [(4608, 768), (768, 3072), (151936, 1024), (40, 36), (16, 1), (17, 100_000)]:
        for num_rows, threads in [(1, 1), (1, 32), (7, 2), (32, 8), (100, 2), (2048, 1), (2048, 32)]:
            rows, panels = gemm.tile(Matrix(None, None, outputs, inputs, FORMATS[format_name]), num_rows, threads)
            num_panels = padded(outputs, PANEL) // PANEL
            assert 1 <= rows <= padded(num_rows, 6)
            assert panels == num_panels or (panels % 2 == 0 and 0 < panels < num_panels)
            chunks = -(-num_rows // rows) * -(-num_panels // panels)
            assert chunks >= min(threads, num_panels // 4)
