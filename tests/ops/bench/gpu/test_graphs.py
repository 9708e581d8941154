"""The phase `graphs` on a CPU, where a graph is a call that is made again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import flashinfer_double
from support.reported import Reported
from torch import Tensor

from ops.bench.gpu import flashinfer, graphs
from ops.bench.gpu.capture import Captured
from ops.bench.gpu.phase import Scale
from stages.generate.attention import Attend
from stages.generate.attention.flashinfer import FlashInferAttention
from stages.generate.attention.reference import ReferenceAttention
from stages.generate.batch import ForwardBatch

TOY = Scale("cpu", "toy")


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_capture(call: Callable[[], object], device: torch.device) -> Captured:
        call()
        return Captured(call)

    monkeypatch.setattr(graphs, "capture", fake_capture)
    monkeypatch.setattr(graphs, "_library", lambda shape: flashinfer_double.Double())
    monkeypatch.setitem(flashinfer.WORKSPACE_BYTES, "full", 1024)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_double.Double())
    monkeypatch.setattr("stages.generate.attention.flashinfer.WORKSPACE_BYTES", 1024)
    monkeypatch.setattr("stages.generate.forward.graphs.record", flashinfer_double.fake_record)
    monkeypatch.setattr(graphs, "why_not", lambda shape: "")


def test_a_cpu_compares_attention_and_says_that_it_has_no_graphs() -> None:
    report = Reported()
    graphs.run(TOY, report)
    assert not report.wrong
    assert report.items["float32 static attention"]["ok"] is True
    assert report.items["static attention, 3 rows"]["captured"] is False
    assert report.skipped["FlashInfer, 3 rows"] == "it computes on CUDA devices only"


@pytest.mark.usefixtures("with_graphs")
def test_replays_are_compared_with_eager_steps_at_two_lengths() -> None:
    report = Reported()
    graphs.run(TOY, report)
    assert not report.wrong and not report.skipped
    for item in ("float32 static attention", "static attention, 3 rows", "FlashInfer, 3 rows"):
        assert report.items[item]["replay_is_eager_at_other_lengths"] is True
    assert report.items["float32 reference attention"]["replay_is_eager"] is True
    engine = report.items["engine"]
    assert engine["ok"] is True and float(str(engine["distance"])) < graphs.ENGINE_DISTANCE
    assert int(str(engine["steps"])) > int(str(engine["mixed_steps"])) > 2


@pytest.mark.night
@pytest.mark.usefixtures("with_graphs")
def test_an_engine_whose_graphs_write_to_the_wrong_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attending = FlashInferAttention.attending

    def wrong(attention: FlashInferAttention, run: Any, slots_T: Tensor) -> Attend:
        return attending(attention, run, slots_T + (len(slots_T) == 2))

    monkeypatch.setattr(FlashInferAttention, "attending", wrong)
    monkeypatch.setattr("stages.generate.forward.graphs.padded_rows", lambda num_rows: num_rows)
    monkeypatch.setattr("stages.generate.attention.flashinfer.padded_rows", lambda num_rows: num_rows)
    report = Reported()
    graphs._try_engine("engine", torch.device("cpu"), report)
    assert "engine" in report.wrong


@pytest.mark.night
@pytest.mark.usefixtures("with_graphs")
def test_attention_that_keeps_its_first_lengths_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(graphs.StaticAttention):
        def load(self, batch: ForwardBatch) -> Attend:
            kept = self._lengths_B.clone()
            attend = super().load(batch)
            if bool((kept > 1).any()):
                self._lengths_B.copy_(kept)
            return attend

    monkeypatch.setattr(graphs, "StaticAttention", Forgetful)
    report = Reported()
    graphs.run(TOY, report)
    assert "float32 static attention" in report.wrong and "FlashInfer, 3 rows" not in report.wrong


@pytest.mark.night
@pytest.mark.usefixtures("with_graphs")
def test_what_cannot_be_captured_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: Callable[[], object], device: torch.device) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", refuse)
    report = Reported()
    graphs.run(TOY, report)
    assert "not permitted" in str(report.items["float32 reference attention"]["why"])
    assert report.items["float32 reference attention"]["ok"] is None
    assert report.items["static attention, 1 rows"]["ok"] is False


def test_static_attention_does_not_see_what_nobody_wrote() -> None:
    device = torch.device("cpu")
    model = graphs._model(graphs.TINY, torch.float32, device, 2, 40)
    batch = graphs._batch(model, [17, 3])
    q_BHD, k_BKD = torch.randn(2, 4, 16), torch.randn(2, 2, 16)

    def attended(beyond: float) -> Tensor:
        kv_2PKSD = torch.full_like(model.kv_L2PKSD[0], beyond)
        for row, length in enumerate(batch.seq_lens):
            for position in range(length):
                page = int(batch.page_table_BN[row, position // 16])
                kv_2PKSD[:, page, :, position % 16] = float(position)
        attend = graphs.StaticAttention(model).load(batch)
        return attend(q_BHD, k_BKD, k_BKD, kv_2PKSD)

    torch.testing.assert_close(attended(float("nan")), attended(7.0))


@torch.inference_mode()
def test_errors_in_bfloat16_are_those_of_the_reference_unless_attention_is_wrong() -> None:
    model = graphs._model(graphs.TINY, torch.bfloat16, torch.device("cpu"), 10, 40)
    batch = graphs._batches(model)[1]

    def distances(window: int) -> tuple[float, float]:
        attend = ReferenceAttention(replace(model.shape, window=window)).plan(batch)
        return graphs._distances(model, batch, model.decoder.forward(batch, attend, model.kv_L2PKSD))

    ours, reference = distances(0)
    assert 1e-3 < ours == pytest.approx(reference, rel=0.2)
    ours, reference = distances(15)
    assert ours > graphs.WORST_RATIO * reference
