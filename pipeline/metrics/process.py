"""Metrics of a process as in Prometheus' own client libraries, read from /proc; none where that does not exist."""

from __future__ import annotations

import functools
import os
import resource
import time
from pathlib import Path
from typing import Final

from pipeline.metrics.counters import Measures
from pipeline.metrics.families import CPU_SECONDS, MAX_FDS, OPEN_FDS, RESIDENT_BYTES, START_SECONDS, VIRTUAL_BYTES

PROC: Final = Path("/proc")


class ProcessMeasures(Measures):
    """All metrics of one process, including those of the process itself."""

    def snapshot(self) -> str:
        """See Measures.snapshot; the metrics of the process are read now."""
        self._look()
        return super().snapshot()

    def _look(self) -> None:
        try:
            *_, start, virtual, resident = _stat()
            num_fds = len(os.listdir(PROC / "self/fd"))
            booted_s = _booted_s()
        except (OSError, ValueError):  # hidden, or in another format than Linux'
            return
        times = os.times()
        self.set(OPEN_FDS, num_fds)
        self.set(CPU_SECONDS, round(times.user + times.system, 2))
        self.set(MAX_FDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self.set(START_SECONDS, round(booted_s + start / os.sysconf("SC_CLK_TCK"), 2))
        self.set(VIRTUAL_BYTES, virtual)
        self.set(RESIDENT_BYTES, resident * os.sysconf("SC_PAGE_SIZE"))


def _stat() -> list[int]:
    """Return the fields of proc(5)'s /proc/self/stat from `ppid` to `rss`; the second one, a name, may have spaces."""
    return [int(field) for field in (PROC / "self/stat").read_text().rpartition(")")[2].split()[1:22]]


@functools.cache
def _booted_s() -> float:
    """Return when the machine was started, in seconds since 1970. /proc/stat has it, too, but may be hidden
    (ProcSubset=pid)."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
