"""MemoryLog where no contract reaches: what it keeps."""

from __future__ import annotations

from pipeline.events import SamplingParams, Submitted
from pipeline.memory_log import MemoryLog
from pipeline.names import Names


def test_histories_that_nobody_reads_again_do_not_pile_up() -> None:
    log = MemoryLog(Names())
    event = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams())
    for i in range(5000):
        log.submit(f"r{i}", event, timeout_ms=0, retention_ms=0, max_queued=10_000)
    assert len(log._streams) <= 1001
