"""MemoryLog where no contract reaches: what it keeps."""

from __future__ import annotations

import pytest

import pipeline.log.memory
from pipeline.events import SamplingParams, Submitted
from pipeline.log.memory import MemoryLog
from pipeline.log.protocol import Quota, Submission, SubmittedOnce
from pipeline.names import Names


def test_histories_that_nobody_reads_again_do_not_pile_up() -> None:
    log = MemoryLog(Names())
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams())
    for i in range(5000):
        log.submit(f"r{i}", event, timeout_ms=0, retention_ms=0, max_queued=10_000)
    assert len(log._streams) <= 1001


def test_each_minute_has_a_count_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog(Names())
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams())
    outcomes = []
    for moment_ms in (119_000, 119_999, 120_000, 120_001):
        monkeypatch.setattr(pipeline.log.memory, "_now_ms", lambda: moment_ms)  # noqa: B023 - called in this round
        uid = str(moment_ms)
        outcomes.append(
            log.submit_once(uid, [event], None, timeout_ms=1, retention_ms=1, max_queued=9, quota=Quota("key", 1))
        )
    assert outcomes == [
        SubmittedOnce(Submission.ACCEPTED, "119000"),
        SubmittedOnce(Submission.TOO_FAST, "119999", 1),
        SubmittedOnce(Submission.ACCEPTED, "120000"),
        SubmittedOnce(Submission.TOO_FAST, "120001", 59_999),
    ]
