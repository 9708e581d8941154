"""A packed weight multiplies as the plain one does."""

from __future__ import annotations

import pytest
import torch

from stages.generate.model.layers import linear
from stages.generate.model.layers.linear import Linear, can_pack, computed_rows, pack

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def packs(dtype: torch.dtype) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this CPU or torch does not multiply with packed {dtype}")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize(("rows", "columns"), [(48, 32), (1001, 70), (3, 144)])
def test_a_packed_weight_gives_what_the_plain_one_gives(
    dtype: torch.dtype, bias: bool, num_tokens: int, rows: int, columns: int
) -> None:
    packs(dtype)
    torch.manual_seed(0)
    weight_OI, bias_O = torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype) if bias else None
    x_TI = torch.randn(num_tokens, columns).to(dtype)
    y_TO = Linear(pack(weight_OI), bias_O)(x_TI)
    assert (y_TO.shape, y_TO.dtype) == ((num_tokens, rows), dtype)
    torch.testing.assert_close(y_TO, Linear(weight_OI, bias_O)(x_TI), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_few_numbers_of_rows_are_computed_and_none_far_above_what_was_asked() -> None:
    asked = range(2049)
    computed = [computed_rows(rows) for rows in asked]
    assert computed[:33] == list(range(33)), "decode batches are what is computed most"
    assert len(set(computed[33:])) <= 40
    assert all(rows <= more <= 1.25 * rows for rows, more in zip(asked, computed, strict=True))
    assert computed == sorted(computed)


@pytest.mark.parametrize("num_tokens", [32, 33, 300])
def test_only_rounded_numbers_of_rows_reach_one_dnn(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    packs(torch.float32)
    seen = []
    multiply = torch.ops.mkldnn._linear_pointwise

    class Watched:
        @staticmethod
        def _linear_pointwise(x_TI: torch.Tensor, *rest: object) -> torch.Tensor:
            seen.append(len(x_TI))
            y_TO: torch.Tensor = multiply(x_TI, *rest)
            return y_TO

    layer = Linear(pack(torch.randn(48, 32)), None)
    monkeypatch.setattr(torch.ops, "mkldnn", Watched)
    assert len(layer(torch.randn(num_tokens, 32))) == num_tokens
    assert seen == [computed_rows(num_tokens)]


def test_what_cannot_be_packed_is_said_and_not_raised() -> None:
    assert not can_pack(torch.float64)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AttributeError])
def test_a_torch_without_the_operation_leaves_the_weights_plain(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def missing(*_: object) -> None:
        raise error("gone")

    monkeypatch.setattr(linear, "pack", missing)
    assert not can_pack(torch.float32)


def test_an_operation_that_means_something_else_by_now_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    packs(torch.float32)
    monkeypatch.setattr(linear, "pack", lambda weight_OI: pack(-weight_OI))
    assert not can_pack(torch.float32)
