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
from support.servers import ROOT, eventually

from ops.bench.gpu.document import Phase
from ops.bench.gpu.phase import Scale
from ops.bench.gpu.runner import Planned, interruptible, run_all, run_one

TOY = Scale("cpu", "toy")
PATIENCE_S = 60.0
FINE = "def run(scale, report): report('fine', ok=True, device=scale.device, size=scale.size)"
HANGS = """\
    import time
    def run(scale, report):
        report('before', ok=True, figure=1.5)
        time.sleep(600)
"""
Stub: TypeAlias = Callable[..., Planned]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A function that writes the module of a phase and returns it as planned."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def written(name: str, body: str, limit_s: float = PATIENCE_S) -> Planned:
        (tmp_path / f"stub_{name}.py").write_text(textwrap.dedent(body))
        return Planned(name, f"stub_{name}", limit_s)

    return written


def run(phase: Planned) -> Phase:
    return run_one(phase, TOY, 600.0, threading.Event())


# how a phase ends


def test_a_phase_is_told_where_and_how_much_and_its_items_come_back(stub: Stub) -> None:
    done = run(stub("fine", FINE))
    assert (done.status, done.reason) == ("ok", "")
    (item,) = done.items
    assert (item.item, item.ok, item.figures) == ("fine", True, {"device": "cpu", "size": "toy"})
    assert 0 < done.wall_s < PATIENCE_S


def test_a_phase_with_a_wrong_item_is_wrong_and_names_it(stub: Stub) -> None:
    done = run(stub("wrong", "def run(scale, report): report('sum', ok=False, error='2'); report('rest', ok=True)"))
    assert (done.status, done.reason) == ("wrong", "wrong: sum")
    assert [(item.item, item.ok, item.error) for item in done.items] == [("sum", False, "2"), ("rest", True, "")]


def test_a_phase_that_raises_has_failed_and_says_why(stub: Stub) -> None:
    done = run(stub("raises", "def run(scale, report):\n    report('a')\n    raise ValueError('no  such\\nkernel')"))
    assert (done.status, done.reason) == ("failed", "ValueError: no such kernel")
    assert [item.item for item in done.items] == ["a"]


def test_a_phase_that_cannot_run_here_is_skipped(stub: Stub) -> None:
    body = "from ops.bench.gpu.phase import Skip\ndef run(scale, report): raise Skip('needs a GPU')"
    done = run(stub("skips", body))
    assert (done.status, done.reason, done.items) == ("skipped", "needs a GPU", ())


def test_a_phase_that_is_not_there_has_failed() -> None:
    done = run(Planned("gone", "stub_gone", PATIENCE_S))
    assert (done.status, done.reason) == ("failed", "ModuleNotFoundError: No module named 'stub_gone'")


def test_a_phase_that_is_killed_names_the_signal_and_keeps_what_it_found(stub: Stub) -> None:
    body = """\
        import os, signal
        def run(scale, report):
            report('before', ok=True, figure=1.5)
            print('about to allocate', flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run(stub("killed", body))
    assert (done.status, done.reason) == ("killed", "by SIGKILL; the last it said: about to allocate")
    assert [(item.item, item.figures) for item in done.items] == [("before", {"figure": 1.5})]


def test_a_phase_that_leaves_without_a_word_has_failed_with_its_exit_code(stub: Stub) -> None:
    done = run(stub("leaves", "import os\ndef run(scale, report): os._exit(3)"))
    assert (done.status, done.reason) == ("failed", "exit code 3")


def test_a_phase_that_hangs_is_ended_at_its_limit_and_keeps_what_it_found(stub: Stub) -> None:
    done = run(stub("hangs", HANGS, limit_s=2.0))
    assert (done.status, done.reason) == ("timeout", "ended at its limit of 2 s")
    assert [item.item for item in done.items] == ["before"]
    assert done.wall_s < 10


def test_a_phase_that_ignores_the_signal_is_killed(stub: Stub) -> None:
    body = """\
        import signal, time
        def run(scale, report):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
    """
    done = run(stub("ignores", body, limit_s=2.0))
    assert done.status == "timeout"
    assert done.wall_s < 15


def test_what_a_phase_prints_is_no_report(stub: Stub) -> None:
    body = """\
        import os, sys
        def run(scale, report):
            os.write(1, bytes(range(256)) * 1000)
            print('{"item": "printed", "ok": true, "figures": {}}')
            print('[', file=sys.stderr)
            report('reported')
    """
    done = run(stub("garbage", body))
    assert (done.status, [item.item for item in done.items]) == ("ok", ["reported"])


def test_half_a_line_of_a_report_is_left_out(stub: Stub) -> None:
    body = """\
        import os, sys
        def run(scale, report):
            report('whole')
            with open(sys.argv[4], 'a') as file:
                file.write('{"item": "ha')
            os._exit(9)
    """
    done = run(stub("half", body))
    assert (done.status, [item.item for item in done.items]) == ("failed", ["whole"])


def test_figures_that_json_lacks_become_text_or_plain_numbers(stub: Stub) -> None:
    body = """\
        import numpy, pathlib
        def run(scale, report):
            report('odd', nan=float('nan'), number=numpy.float32(0.5), path=pathlib.Path('a'), nested={1: (True, None)})
    """
    (item,) = run(stub("odd", body)).items
    assert item.figures == {"nan": "nan", "number": 0.5, "path": "a", "nested": {"1": [True, None]}}


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


def test_the_next_phase_runs_whatever_became_of_the_one_before(stub: Stub) -> None:
    phases = [
        stub("raises", "def run(scale, report): raise ValueError('x')"),
        stub("killed", "import os\ndef run(scale, report): os.kill(os.getpid(), 9)"),
        stub("hangs", HANGS, limit_s=1.0),
        stub("fine", FINE),
    ]
    seen: list[list[str]] = []
    done = run_all(phases, TOY, 600.0, threading.Event(), lambda ended: seen.append([phase.name for phase in ended]))
    assert [phase.status for phase in done] == ["failed", "killed", "timeout", "ok"]
    assert seen == [["raises"], ["raises", "killed"], ["raises", "killed", "hangs"], [p.name for p in phases]]


def test_the_budget_cuts_the_phase_that_runs_and_names_those_after_it(stub: Stub) -> None:
    phases = [stub("fine", FINE), stub("hangs", HANGS), stub("after", FINE), stub("last", FINE)]
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

    phases = [stub("hangs", HANGS), stub("after", FINE)]
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
        run_all([stub("hangs", HANGS), stub("after", FINE)], TOY, 600.0, stop, lambda done: kept.append([*done]))
    assert [(phase.name, phase.status) for phase in kept[-1]] == [("hangs", "cut")]
    assert signal.getsignal(signal.SIGTERM) == handler
