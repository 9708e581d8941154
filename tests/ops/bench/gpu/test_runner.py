"""The phases' processes: what raises, hangs, dies or prints garbage is reported, and the next phase runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
from reported import STUBS, TOY
from servers import ROOT, eventually

from ops.bench.gpu.document import Phase
from ops.bench.gpu.runner import Planned, interruptible, run_all, run_one

PATIENCE_S = 60.0
HALF_A_LINE = """os.write(os.open(sys.argv[4], os.O_APPEND | os.O_WRONLY), b'{"item": "ha')"""
PRINTED = """print('{"item": "printed", "ok": true, "figures": {}}')"""
MODULES = {
    **STUBS,
    "wrong": "def run(scale, report): report('sum', ok=False, error='2'); report('rest', ok=True)",
    "killed": "import os\ndef run(scale, report): report('a'); print('allocates', flush=True); os.kill(os.getpid(), 9)",
    "leaves": f"import os, sys\ndef run(scale, report): report('whole'); {HALF_A_LINE}; os._exit(3)",
    "ignores": "import signal as s, time\ndef run(scale, report): s.signal(s.SIGTERM, s.SIG_IGN); time.sleep(600)",
    "prints": f"import os\ndef run(scale, report): os.write(1, bytes(range(256)) * 999); {PRINTED}; report('item')",
}
GONE = Planned("gone", "stub_gone", PATIENCE_S)
ENDS = [
    ("wrong", "wrong", "wrong: sum", ["sum", "rest"]),
    ("raises", "failed", "ValueError: no such kernel", ["begun"]),
    ("skips", "skipped", "needs a GPU", []),
    ("killed", "killed", "by SIGKILL; the last it said: allocates", ["a"]),
    ("leaves", "failed", "exit code 3", ["whole"]),
    ("hangs", "timeout", "ended at its limit of 2 s", ["before"]),
    ("ignores", "timeout", "ended at its limit of 2 s", []),
    ("gone", "failed", "ModuleNotFoundError: No module named 'stub_gone'", []),
    ("prints", "ok", "", ["item"]),
    ("fine", "ok", "", ["sum"]),
]
Stub: TypeAlias = Callable[..., Planned]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A function that writes the module of a phase and returns it as planned."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def written(name: str, body: str = "", limit_s: float = PATIENCE_S) -> Planned:
        (tmp_path / f"stub_{name}.py").write_text(textwrap.dedent(body or MODULES[name]))
        return Planned(name, f"stub_{name}", limit_s)

    return written


def run(phase: Planned) -> Phase:
    return run_one(phase, TOY, 600.0, threading.Event())


# how a phase ends


def test_what_became_of_each_phase_is_told_and_the_next_one_runs(stub: Stub) -> None:
    phases = [
        stub(name, limit_s=2.0 if status == "timeout" else PATIENCE_S) if name in MODULES else GONE
        for name, status, *_ in ENDS
    ]
    seen: list[int] = []
    done = run_all(phases, TOY, 600.0, threading.Event(), lambda ended: seen.append(len(ended)))
    assert [(one.name, one.status, one.reason, [item.item for item in one.items]) for one in done] == ENDS
    assert seen == list(range(1, len(ENDS) + 1))
    assert all(0 < one.wall_s < 15 for one in done)
    assert [(item.ok, item.error) for item in done[0].items] == [(False, "2"), (True, "")]


def test_a_phase_is_told_where_and_how_much(stub: Stub) -> None:
    (item,) = run(stub("told", "def run(scale, report): report('a', device=scale.device, size=scale.size)")).items
    assert item.figures == {"device": "cpu", "size": "toy"}


def test_figures_that_json_lacks_become_text_or_plain_numbers(stub: Stub) -> None:
    body = """\
        import numpy, pathlib
        def run(scale, report):
            report('odd', nan=float('nan'), number=numpy.float32(0.5), path=pathlib.Path('a'), nested={1: (True, None)})
    """
    (item,) = run(stub("odd", body)).items
    assert item.figures == {"nan": None, "number": 0.5, "path": "a", "nested": {"1": [True, None]}}


def test_an_item_that_raises_or_is_skipped_does_not_end_the_others(stub: Stub) -> None:
    body = """\
        from ops.bench.gpu.phase import Skip, attempt
        def run(scale, report):
            with attempt(report, 'first'):
                raise RuntimeError('CUDA error: ' + 1000 * 'x')
            with attempt(report, 'second'):
                raise Skip('one GPU')
            with attempt(report, 'third'):
                report('third', ok=True)
    """
    done = run(stub("items", body))
    assert done.status == "wrong"
    first, second, third = done.items
    assert first.ok is False
    assert first.error.startswith("RuntimeError: CUDA error: xxx")
    assert len(first.error) <= 300
    assert (second.ok, second.skipped, third.ok) == (None, "one GPU", True)


# what it leaves behind


def test_what_a_phase_has_started_ends_with_it(stub: Stub, tmp_path: Path) -> None:
    body = f"""\
        import pathlib, subprocess, sys, time
        def run(scale, report):
            child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
    """
    assert run(stub("leaves_a_child", body)).status == "ok"
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not _runs(pid), "the child has ended")


def test_a_phase_that_is_ended_can_clean_up(stub: Stub, tmp_path: Path) -> None:
    body = f"""\
        import pathlib, time
        def run(scale, report):
            try:
                time.sleep(600)
            finally:
                pathlib.Path({str(tmp_path / "cleaned")!r}).touch()
    """
    assert run(stub("cleans", body, limit_s=2.0)).status == "timeout"
    assert (tmp_path / "cleaned").exists()


def test_temporary_files_of_a_phase_are_gone_however_it_ends(stub: Stub, tmp_path: Path) -> None:
    body = f"""\
        import os, pathlib, signal, tempfile
        def run(scale, report):
            pathlib.Path({str(tmp_path / "where")!r}).write_text(tempfile.mkdtemp())
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(stub("litters", body)).status == "killed"
    assert not Path((tmp_path / "where").read_text()).exists()


def test_a_phase_ends_when_the_command_is_killed(stub: Stub, tmp_path: Path) -> None:
    body = f"""\
        import os, pathlib, time
        def run(scale, report):
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
            time.sleep(600)
    """
    phase = stub("orphan", body)
    run = f"run_one(Planned('a', {phase.module!r}, 600), Scale('cpu', 'toy'), 600, threading.Event())"
    program = f"from ops.bench.gpu.runner import *; {run}"
    command = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        eventually(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), "the phase runs")
        pid = int((tmp_path / "pid").read_text())
    finally:
        command.kill()
        command.wait()
    eventually(lambda: not _runs(pid), "the phase has ended")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# all of them


def test_the_budget_cuts_the_phase_that_runs_and_names_those_after_it(stub: Stub) -> None:
    phases = [stub("fine"), stub("hangs"), stub("after", MODULES["fine"]), stub("last", MODULES["fine"])]
    done = run_all(phases, TOY, 6.0, threading.Event(), lambda _: None)
    assert [phase.status for phase in done] == ["ok", "cut", "cut", "cut"]
    assert done[1].reason.startswith("the rest of --budget")
    assert [item.item for item in done[1].items] == ["before"]
    assert done[2].reason == "6 s of --budget were spent before it"
    assert done[2].wall_s == 0


def test_ctrl_c_ends_the_phase_that_runs_and_keeps_what_it_found(stub: Stub) -> None:
    kept: list[Sequence[Phase]] = []
    began: list[float] = []

    def interrupt_soon(phase: Planned) -> None:
        began.append(time.monotonic())
        threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    phases = [stub("hangs"), stub("after", MODULES["fine"])]
    with interruptible() as stop:
        assert len(run_all(phases, TOY, 600.0, stop, lambda done: kept.append([*done]), interrupt_soon)) == 1
    (phase,) = kept[-1]
    assert (phase.status, phase.reason) == ("cut", "interrupted while it ran")
    assert [item.item for item in phase.items] == ["before"]
    assert time.monotonic() - began[0] < 15


def test_a_signal_while_a_phase_is_being_started_loses_nothing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen.__init__

    def interrupted(self: subprocess.Popen[bytes], *arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        start(self, *arguments, **more)

    monkeypatch.setattr(subprocess.Popen, "__init__", interrupted)
    kept: list[Sequence[Phase]] = []
    handler = signal.getsignal(signal.SIGTERM)
    with interruptible() as stop:
        run_all([stub("hangs"), stub("after", MODULES["fine"])], TOY, 600.0, stop, lambda done: kept.append([*done]))
    assert [(phase.name, phase.status) for phase in kept[-1]] == [("hangs", "cut")]
    assert signal.getsignal(signal.SIGTERM) == handler
