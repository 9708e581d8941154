"""MemoryLog where no contract reaches: what it keeps."""

from __future__ import annotations

from support.memory_log.log import MemoryLog

from pipeline.events import SamplingParams, Submitted
from pipeline.log.protocol import Quota, RequestLimits, Submission, SubmitResult
from pipeline.names import Names


def test_histories_that_nobody_reads_again_do_not_pile_up() -> None:
    log = MemoryLog(Names(), RequestLimits(timeout_s=0, retention_s=0, max_queued=10_000))
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams())
    for i in range(5000):
        log.submit(f"r{i}", [event])
    assert len(log._streams.by_key) <= 1001


def test_a_bucket_of_requests_is_filled_again() -> None:
    now_ms = 0
    log = MemoryLog(Names(), clock_ms=lambda: now_ms)
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams())
    outcomes = []
    for now_ms in (0, 59_999, 60_000, 60_001):
        outcomes.append(log.submit(str(now_ms), [event], quota=Quota("key", 1)))
    assert outcomes == [
        SubmitResult(Submission.ACCEPTED, "0"),
        SubmitResult(Submission.TOO_FAST, "59999", 1, limit="requests_per_minute"),
        SubmitResult(Submission.ACCEPTED, "60000"),
        SubmitResult(Submission.TOO_FAST, "60001", 59_999, limit="requests_per_minute"),
    ]
