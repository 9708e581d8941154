"""The phases `overlap`, `protocol` and `fa` at their smallest, and what they find out."""

from __future__ import annotations

import sys

import pytest
import torch
from support.flashinfer_double import Double, fake_record
from support.reported import Reported
from torch import Tensor

from ops.bench.gpu import fa, overlap, protocol
from ops.bench.gpu.phase import Scale, Skip
from stages.generate.attention import flashinfer
from stages.generate.forward import engine, graphs
from stages.generate.model.spec import ModelSpec

TOY = Scale("cpu", "toy")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(graphs, "record", fake_record)
    return double


def test_tokens_are_compared_with_preempted_and_cancelled_requests_and_steps_are_timed() -> None:
    report = Reported()
    overlap.run(TOY, report)
    assert not report.wrong and list(report.skipped) == ["bfloat16 deterministic"]
    found = report.items["float32 torch"]
    assert min(int(str(found[name])) for name in ("preempted", "preempted_with_overlap", "cancelled")) >= 1
    assert float(str(report.items["decode of 3 rows"]["step_with_overlap_ms"])) > 0


def test_steps_that_compute_with_other_tokens_than_those_that_were_drawn_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(token_ids_T: Tensor, last_R: Tensor) -> None:
        token_ids_T.clamp_(min=0)

    monkeypatch.setattr(engine, "fill_in", forget)
    report = Reported()
    overlap.run(TOY, report)
    assert "float32 torch" in report.wrong


def test_the_protocol_runs_in_four_ways_and_all_sequences_have_their_length(
    library: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_flashinfer(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str:
        return "fi"

    monkeypatch.setattr(protocol, "best_attention", with_flashinfer)
    report = Reported()
    protocol.run(TOY, report)
    assert not report.wrong and not report.skipped
    rates = {item: figures.get("output_tokens_per_s") for item, figures in report.items.items() if item != "workload"}
    assert set(rates) == {"graphs and overlap", "graphs", "overlap", "eager"}
    assert all(isinstance(rate, float) and rate > 0 for rate in rates.values())


def test_without_flashinfer_the_protocol_runs_without_graphs_and_says_why() -> None:
    report = Reported()
    protocol.run(TOY, report)
    assert not report.wrong and {"overlap", "eager"} <= set(report.items)
    assert report.skipped == {"graphs and overlap and graphs": "attention torch cannot be recorded in a CUDA graph"}


def test_the_kernels_for_hopper_are_held_against_float64_or_skipped_by_name(
    library: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Skip, match="CUDA devices only"):
        fa.run(TOY, Reported())
    monkeypatch.setattr(fa, "why_not", lambda shape, prefill: "")
    report = Reported()
    fa.run(TOY, report)
    assert not report.wrong and report.items["chunks and decode rows"]["ok"] is True
    assert {"fa,fi: chunk of 32 tokens", "fi: chunk of 32 tokens"} <= set(report.items)
    assert {kernels[0] for kernels in library.loaded} == {"fa2", "fa3"}
