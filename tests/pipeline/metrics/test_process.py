"""What a process says of itself where /proc is there, is hidden in part, or is not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.metrics import process
from pipeline.metrics.counters import Readings, read_snapshot
from pipeline.metrics.families import OPEN_FDS, RESIDENT_BYTES, START_SECONDS
from pipeline.metrics.process import ProcessMeasures


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A /proc that has only what is of processes, as under ProcSubset=pid."""
    (tmp_path / "self/fd").mkdir(parents=True)
    shutil.copy("/proc/self/stat", tmp_path / "self/stat")
    monkeypatch.setattr(process, "PROC", tmp_path)
    process._booted_s.cache_clear()
    yield tmp_path
    process._booted_s.cache_clear()


def said() -> Readings:
    return read_snapshot(ProcessMeasures().snapshot())


def test_a_process_says_when_it_was_started_also_where_proc_has_only_processes(proc: Path) -> None:
    seen = said()
    assert seen[START_SECONDS][()] == pytest.approx(psutil.Process().create_time(), abs=2)
    assert RESIDENT_BYTES in seen


@pytest.mark.parametrize("text", [None, "", "1 (a) S", "1 (a) S " + "x " * 50])
def test_a_process_that_cannot_read_its_numbers_says_none_and_goes_on(proc: Path, text: str | None) -> None:
    if text is None:
        os.remove(proc / "self/stat")
    else:
        (proc / "self/stat").write_text(text)
    assert OPEN_FDS not in said()
