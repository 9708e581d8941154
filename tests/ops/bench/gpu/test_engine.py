"""The phase `engine` at its smallest, and what it makes of a profile."""

from __future__ import annotations

import pytest
import torch
from reported import toy_run

from ops.bench.gpu import engine
from ops.bench.gpu.profiled import profiled, summary
from stages.generate.attention import ATTENTION
from stages.generate.attention.cpu import CpuAttention


def test_every_step_is_timed_and_profiled() -> None:
    report = toy_run(engine)
    assert not report.wrong and not report.skipped
    steps = ("tiny cpu decode of 1 rows", "tiny cpu decode of 3 rows", "tiny cpu prefill of 64 tokens")
    for step in steps:
        assert report.items[step]["ok"] is True
        assert float(str(report.items[step]["tokens_per_s"])) > 0
        longest = report.items[f"{step}, profile"]["longest"]
        assert isinstance(longest, list) and len(longest) == engine.NUM_LONGEST
    assert "copy_bandwidth_share" in report.items[steps[0]] and "matmul_rate_share" in report.items[steps[2]]


def test_the_reference_runs_beside_the_best_backend_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "resolve_attention", lambda name, shape: "fi")
    monkeypatch.setattr("stages.generate.forward.engine.ATTENTION", {**ATTENTION, "fi": CpuAttention})
    report = toy_run(engine)
    assert not report.wrong
    steps = [item for item, figures in report.items.items() if "step_ms" in figures]
    assert steps == [
        "tiny fi decode of 1 rows",
        "tiny fi decode of 3 rows",
        "tiny fi prefill of 64 tokens",
        "tiny reference decode of 1 rows",
    ]


def test_a_model_that_cannot_be_made_is_one_wrong_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Engine", None)
    report = toy_run(engine)
    assert set(report.wrong) == {"tiny cpu load"}


def test_gaps_are_where_nothing_ran() -> None:
    found = summary([("a", 100, 50), ("b", 120, 60), ("a", 300, 100)], 1)
    assert (found["kernels"], found["device_ms"], found["gap_share"]) == (3, 180e-6, pytest.approx(0.4))
    assert found["longest"] == [{"kernel": "a", "count": 2, "ms": 150e-6}]
    assert summary([], 1)["gap_share"] == 0


def test_a_profile_names_what_ran() -> None:
    x = torch.randn(64, 64)
    found = profiled(lambda: x @ x, torch.device("cpu"), 10)
    assert any("mm" in one["kernel"] for one in found["longest"])
    assert found["device_ms"] > 0 and 0 <= found["gap_share"] < 1
