"""A process ends with the one that started it."""

from __future__ import annotations

import subprocess
import sys

from pipeline.process.parent import SUPERVISOR_VARIABLE


def test_a_worker_dies_with_its_supervisor() -> None:
    """The supervisor here is a process that starts a worker and is killed; the worker's pipe then ends."""
    worker_code = (
        "import os, threading; from pipeline.process.parent import die_with_supervisor as d; d(os.environ); "
        "print('up', flush=True); threading.Event().wait(30); print('still here', flush=True)"
    )
    supervisor_code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {worker_code!r}],\n"
        f"    env=os.environ | {{{SUPERVISOR_VARIABLE!r}: str(os.getpid())}})\n"
        "time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", supervisor_code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "up\n"
    supervisor.kill()
    assert supervisor.stdout.read() == ""  # the worker held the pipe open; it ended without another word
    supervisor.stdout.close()
    supervisor.wait()


def test_a_worker_whose_supervisor_is_gone_already_ends_at_once() -> None:
    code = "import os; from pipeline.process.parent import die_with_supervisor as d; d(os.environ); print('still here')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={SUPERVISOR_VARIABLE: "1"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
