"""The phase `parity` at its smallest, and that it can fail."""

from __future__ import annotations

import sys

import pytest
import torch
from support import flashinfer_double
from support.reported import Reported
from torch import Tensor

from ops.bench.gpu import parity
from ops.bench.gpu.phase import Scale
from stages.generate.attention import AttentionShape
from stages.generate.attention.flashinfer import HEAD_DIMS
from stages.generate.attention.reference import ReferenceAttention

TOY = Scale("cpu", "toy")


@pytest.fixture(autouse=True)
def one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_backends", lambda device: ["reference"])


def test_todays_path_agrees_with_transformers() -> None:
    report = Reported()
    parity.run(TOY, report)
    assert not report.wrong
    assert report.items["odd float32 reference"]["clear"] is True
    assert report.items["odd bfloat16 reference"]["ok"] is True
    assert report.items["attention reference bfloat16 pages of 64"]["pages_as_expected"] is True


@pytest.mark.night
def test_attention_that_sees_one_token_too_few_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_block = ReferenceAttention._attend_block

    def blind(self: ReferenceAttention, q_QHD: Tensor, kv_2KCD: Tensor) -> Tensor:
        if kv_2KCD.shape[2] > len(q_QHD):
            kv_2KCD = kv_2KCD[:, :, 1:]
        return attend_block(self, q_QHD, kv_2KCD)

    monkeypatch.setattr(ReferenceAttention, "_attend_block", blind)
    report = Reported()
    parity.run(TOY, report)
    expected = {
        f"attention reference {dtype} pages of {size}" for dtype in ("float32", "bfloat16") for size in (16, 64)
    }
    assert expected | {"odd float32 reference", "odd bfloat16 reference"} == set(report.wrong)
    assert "instead of" in str(report.wrong["odd float32 reference"]["differs"])


@pytest.mark.night
def test_flashinfer_is_compared_in_bfloat16_with_a_head_dim_that_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(shape: AttentionShape) -> str:
        return "" if shape.dtype == torch.bfloat16 and shape.head_dim in HEAD_DIMS else "not on this machine"

    monkeypatch.setattr(parity, "why_not", why_not)
    monkeypatch.setattr(parity, "_backends", lambda device: ["fi"])
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_double.Double())
    monkeypatch.setattr("stages.generate.attention.flashinfer.WORKSPACE_BYTES", 1024)
    report = Reported()
    parity.run(TOY, report)
    assert not report.wrong
    assert report.skipped == {
        f"attention fi float32 pages of {page_size}": "not on this machine" for page_size in (16, 64)
    }
    assert report.items["odd bfloat16 fi"]["ok"] is True
    assert report.items["attention fi bfloat16 pages of 16"]["ok"] is True
    monkeypatch.setattr(flashinfer_double, "_attend", lambda q_THD, *_: q_THD)
    report = Reported()
    parity.run(TOY, report)
    assert {"attention fi bfloat16 pages of 64", "odd bfloat16 fi"} <= set(report.wrong)


def test_nan_is_wrong_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceAttention, "_attend_block", lambda self, q_QHD, kv_2KCD: q_QHD * float("nan"))
    report = Reported()
    parity.run(TOY, report)
    assert report.wrong["attention reference float32 pages of 16"]["is_nan"] is True
    assert report.items["odd bfloat16 reference"]["ok"] is False


@pytest.mark.night
def test_a_family_that_raises_is_one_wrong_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "Engine", None)
    report = Reported()
    parity.run(TOY, report)
    assert "TypeError" in str(report.wrong["odd float32 reference"]["error"])
