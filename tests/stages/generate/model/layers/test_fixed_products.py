"""The products of `--deterministic` with `--gpu-new`: a row has its bits in any company, on a double and on a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from support import triton_double
from support.devices import CPU, DEVICES
from torch import Tensor

from stages.generate.model.layers.operations import Operations

DTYPES = {"cpu": (torch.float16,), "cuda": (torch.float16, torch.bfloat16)}


def kernels(device: torch.device) -> ModuleType:
    if device.type == "cuda":
        pytest.importorskip("triton")
    return triton_double.load("stages.generate.model.layers.fixed_products", device)


def random_tensors(
    device: torch.device, dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x_TI, weight_OI and bias_O."""
    generator = torch.Generator(device).manual_seed(num_inputs)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    return normal(num_rows, num_inputs), normal(num_outputs, num_inputs), normal(num_outputs)


SHAPES = [(64, 96), (90, 130), (1024, 256), (1500, 128)]
"""Inputs and outputs: in one segment and in several, with whole tiles and without."""
LARGE = [(4096, 6144), (1024, 4096), (3072, 1024), (2048, 151_936)]
"""Those of Qwen3, for a GPU alone."""


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_a_row_has_its_bits_alone_and_among_others_at_any_place(
    device: torch.device, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    check_rows(kernels(device), device, num_inputs, num_outputs, has_bias=has_bias, sizes=(7, 16, 200))


@pytest.mark.parametrize(("num_inputs", "num_outputs"), LARGE)
@pytest.mark.gpu
@torch.inference_mode()
def test_a_row_of_a_large_product_has_its_bits(num_inputs: int, num_outputs: int) -> None:
    device = torch.device("cuda")
    check_rows(kernels(device), device, num_inputs, num_outputs, has_bias=False, sizes=(16, 64, 65, 200, 257, 2048))


def check_rows(
    module: ModuleType,
    device: torch.device,
    num_inputs: int,
    num_outputs: int,
    *,
    has_bias: bool,
    sizes: tuple[int, ...],
) -> None:
    """Compare the rows of products with each other, and the first ones with float64."""
    for dtype in DTYPES[device.type]:
        x_TI, weight_OI, bias_O = random_tensors(device, dtype, sizes[-1], num_inputs, num_outputs)
        given = (weight_OI, bias_O if has_bias else None)
        y_TO = module.product(x_TI, *given)
        exact_TO = x_TI[:16].double() @ weight_OI.double().T + (bias_O.double() if has_bias else 0)
        best, ours = (float((each.double() - exact_TO).norm()) for each in (exact_TO.to(dtype), y_TO[:16]))
        assert ours <= 1.01 * best, "more than one rounding"
        for num_rows in sizes:
            assert torch.equal(module.product(x_TI[:num_rows], *given), y_TO[:num_rows])
        for row in (0, 5, sizes[-1] - 1):
            assert torch.equal(module.product(x_TI[row : row + 1], *given), y_TO[row : row + 1])
        order_T = torch.randperm(len(x_TI), generator=torch.Generator().manual_seed(1)).to(device)
        assert torch.equal(module.product(x_TI[order_T], *given), y_TO[order_T])


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_a_product_in_one_program_has_the_bits_of_one_that_is_split(device: torch.device) -> None:
    module = kernels(device)
    num_rows, num_inputs, num_outputs = 850, 800, 640
    assert module.segments(num_outputs, num_inputs)[0] == 4, "the order of two would not matter"
    x_TI, weight_OI, bias_O = random_tensors(device, torch.float16, num_rows, num_inputs, num_outputs)
    assert -(-num_rows // module.ROWS) * -(-num_outputs // module.OUTPUTS) >= module.FEW, "else all is split"
    whole_TO = module.product(x_TI, weight_OI, bias_O)
    for rows in (slice(1), slice(60, 130), slice(849, 850)):
        assert torch.equal(module.product(x_TI[rows], weight_OI, bias_O), whole_TO[rows])


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024), (6144, 4096), (128, 1), (1, 28_672)],
)
def test_segments_cover_the_inputs_and_fill_a_gpu(num_outputs: int, num_inputs: int) -> None:
    module = kernels(CPU)
    number, steps = module.segments(num_outputs, num_inputs)
    assert (number - 1) * steps * module.INPUTS < num_inputs <= number * steps * module.INPUTS
    assert 1 <= number <= module.MOST_SEGMENTS and steps >= module.LEAST_STEPS
    assert number * -(-num_outputs // module.OUTPUTS) <= module.PROGRAMS or number == 1


def test_no_rows_give_none_and_float32_keeps_the_products_of_torch() -> None:
    module = kernels(CPU)
    assert module.product(torch.empty(0, 64), torch.empty(96, 64), None).shape == (0, 96)
    assert module.with_products(Operations(), torch.float32) == Operations()
    assert module.with_products(Operations(), torch.bfloat16).product is module.product
