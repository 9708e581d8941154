"""The phases' processes: what raises, hangs, dies or prints garbage is reported, and the next phase runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from servers import eventually

from ops.bench.gpu import runner
from ops.bench.gpu.document import Phase
from ops.bench.gpu.phase import Scale
from ops.bench.gpu.runner import Planned, run_all, run_one

TOY = Scale("cpu", "toy")
PATIENCE_S = 60.0
ENDS_AT_ONCE = "def run(scale, report):\n    report('late', ok=True)\n"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A function that writes a phase and returns it as planned."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def written(name: str, body: str, limit_s: float = PATIENCE_S) -> Planned:
        module = f"stub_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(body))
        return Planned(name, module, limit_s)

    return written


def run(phase: Planned) -> Phase:
    return run_one(phase, TOY, left_s=600.0)
