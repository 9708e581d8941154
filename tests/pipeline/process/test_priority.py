"""A process that gives way has a lower priority afterwards, alone and as a group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.process.priority import AUTOGROUP, LOWEST

ROOT = Path(__file__).resolve().parents[3]
ASK = """
import os, sys, threading
from pipeline.process.priority import AUTOGROUP, give_way
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
for steps in sys.argv[1:]:
    give_way(int(steps))
group = AUTOGROUP.read_text().split() if AUTOGROUP.exists() else []
print(os.nice(0), group[-1] if group else "none", os.getpriority(os.PRIO_PROCESS, thread.native_id))
"""
FOLLOW = '"$0" "$@"; exit $?'


def given(*steps: int, leads: bool = True) -> list[str]:
    """Return the niceness of a process that gave way by *steps*, that of its group, "none" where it has none, and that
    of a thread that it had before. It *leads* a new session or is in one that a shell leads."""
    command = [sys.executable, "-c", ASK, *map(str, steps)]
    if not leads:
        command = ["/bin/sh", "-c", FOLLOW, *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, start_new_session=True)
    return done.stdout.split()


def test_the_process_is_nicer_by_so_many_steps() -> None:
    before, after = int(given()[0]), int(given(5)[0])
    assert after == min(before + 5, LOWEST)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux threads have a niceness of their own")
def test_threads_that_ran_before_are_as_nice() -> None:
    main, _, before = given(5)
    assert before == main


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system groups no processes by session")
def test_its_group_is_nicer_too() -> None:
    assert given(5)[1] == "5"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system groups no processes by session")
def test_the_group_of_others_stays_as_it_is() -> None:
    assert given(5, leads=False)[1] == given(leads=False)[1]


def test_there_is_a_lowest_priority() -> None:
    assert given(15, 15)[0] == str(LOWEST)
