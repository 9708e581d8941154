"""The phase `engine` at its smallest, and what it makes of a profile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.flashinfer_double import Double, fake_record
from support.reported import Reported

from ops.bench.gpu import engine
from ops.bench.gpu.phase import Scale
from ops.bench.gpu.profiled import profiled, summary
from ops.bench.models import SHAPE_8B, SHAPES, write_config
from stages.generate.attention import fused
from stages.generate.model.spec import read_spec

TOY = Scale("cpu", "toy")


def test_every_step_is_timed_and_profiled() -> None:
    report = Reported()
    engine.run(TOY, report)
    assert not report.wrong and not report.skipped
    steps = ("tiny torch decode of 1 rows", "tiny torch decode of 3 rows", "tiny torch prefill of 64 tokens")
    for step in steps:
        assert report.items[step]["ok"] is True
        assert float(str(report.items[step]["tokens_per_s"])) > 0
        longest = report.items[f"{step}, profile"]["longest"]
        assert isinstance(longest, list) and len(longest) == engine.NUM_LONGEST
    assert "copy_bandwidth_share" in report.items[steps[0]] and "matmul_rate_share" in report.items[steps[2]]


@pytest.mark.night
def test_decode_steps_are_measured_with_graphs_too_where_flashinfer_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "resolve_attention", lambda name, shape: "fi")
    monkeypatch.setitem(sys.modules, "flashinfer", Double())
    monkeypatch.setattr("stages.generate.attention.flashinfer.WORKSPACE_BYTES", 1024)
    monkeypatch.setattr("stages.generate.forward.graphs.record", fake_record)
    report = Reported()
    engine.run(TOY, report)
    assert not report.wrong
    steps = [item for item, figures in report.items.items() if "step_ms" in figures]
    assert steps == [
        "tiny fi decode of 1 rows",
        "tiny fi decode of 3 rows",
        "tiny fi prefill of 64 tokens",
        "tiny fi graphs decode of 1 rows",
        "tiny fi graphs decode of 3 rows",
        "tiny fi graphs, layers in torch decode of 1 rows",
        "tiny fi graphs, layers in torch decode of 3 rows",
        "tiny fi graphs, layers in torch prefill of 64 tokens",
    ]
    loads = ("tiny fi load", "tiny fi graphs load", "tiny fi graphs, layers in torch load")
    assert [report.items[load]["fused"] for load in loads] == [list(fused.MODULES)] * 2 + [[]]


def test_a_model_that_cannot_be_made_is_one_wrong_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Engine", None)
    report = Reported()
    engine.run(TOY, report)
    assert set(report.wrong) == {"tiny torch load"}


def test_gaps_are_where_nothing_ran() -> None:
    found = summary([("a", 100, 50), ("b", 120, 60), ("a", 300, 100)])
    assert (found.num_kernels, found.span_s, found.busy_s) == (3, 300e-9, 180e-9)
    assert found.gap_share == pytest.approx(0.4)
    assert found.longest == (("a", 2, 150e-9), ("b", 1, 60e-9))


def test_nothing_has_no_gaps() -> None:
    assert summary([]).gap_share == 0


def test_a_profile_names_what_ran() -> None:
    x = torch.randn(64, 64)
    found = profiled(lambda: x @ x, torch.device("cpu"))
    assert any("mm" in name for name, _, _ in found.longest)
    assert 0 < found.busy_s <= found.span_s


def test_what_a_step_reads_and_computes(tmp_path: Path) -> None:
    write_config(SHAPES["0.6b"], tmp_path)
    spec = read_spec(tmp_path)
    assert engine._num_weights(spec) == engine._num_multiplied(spec) == 596_049_920
    one_token = 2 * 28 * 8 * 128 * 2
    assert engine._bytes_read(spec, ((511, 1),) * 3, torch.bfloat16) == 2 * 596_049_920 + 3 * 512 * one_token
    write_config(SHAPE_8B, tmp_path)
    spec = read_spec(tmp_path)
    assert engine._num_weights(spec) == 8_190_735_360
    assert engine._num_multiplied(spec) == 8_190_735_360 - 151_936 * 4096
