"""The phase `sampling` at its smallest, and that it can fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.reported import Reported
from torch import Tensor

from ops.bench.gpu import sampling
from ops.bench.gpu.phase import Scale
from stages.generate.sampling.sampler import sample
from stages.generate.schedule.plan import Sample

TOY = Scale("cpu", "toy")


def test_one_device_draws_the_same_tokens_twice() -> None:
    report = Reported()
    sampling.run(TOY, report)
    assert not report.wrong
    for kind in ("normal", "bfloat16", "flat", "sharp"):
        item = report.items[f"{kind} logits, vocabulary of 1000"]
        assert item["mismatches"] == 0 and int(str(item["distinct_tokens"])) > 8
    assert float(str(report.items["time of top_p, vocabulary of 1000"]["rows_4_ms"])) > 0


def test_a_row_that_depends_on_its_batch_is_counted_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(logits_RV: Tensor, samples: Sequence[Sample], **how: int) -> list[int]:
        tokens = sample(logits_RV, samples, **how)
        return tokens if len(samples) > 1 else [(tokens[0] + 1) % 1000]

    monkeypatch.setattr(sampling, "sample", leaky)
    report = Reported()
    sampling.run(TOY, report)
    item = report.wrong["normal logits, vocabulary of 1000"]
    assert item["mismatches"] == item["rows"] == len(sampling.PARAMS)
    assert str(item["shown"]).startswith("greedy alone: ")


def test_no_batch_begins_after_its_time_and_the_rows_that_were_compared_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "MOST_S", -1.0)
    report = Reported()
    sampling._compare(report, "a", "normal", 1000, torch.device("cpu"), 100 * sampling.AT_ONCE)
    assert report.items["a"]["ok"] is True
    assert report.items["a"]["rows"] == sampling.AT_ONCE * len(sampling.PARAMS)
