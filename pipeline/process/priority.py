"""The share of busy cores that a process gets.

A stage that computes for long lowers its priority. Then short work, such as an answer of the web process, comes first.
On a machine with free cores, nothing changes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

LOWEST: Final = 19
AUTOGROUP: Final = Path("/proc/self/autogroup")
THREADS: Final = Path("/proc/self/task")
TRIES: Final = 5
AGAIN_S: Final = 0.15


def give_way(steps: int) -> None:
    """Lower the priority of this process by *steps* of niceness; each makes its share about a fifth smaller.

    On Linux each thread has a niceness, and inherits it from the thread that starts it. All threads of the process get
    the same: threads that compute together wait for the one with the lowest priority.

    Linux may group processes by session (sched(7), "The autogroup feature"). Then only the niceness of the group counts
    among sessions. So a process that leads a session sets both. Other processes, such as the workers of a supervisor,
    do not change their group, because it has other members. Settings that fail stay as they are.
    """
    for thread in map(int, os.listdir(THREADS)) if THREADS.exists() else (0,):
        with contextlib.suppress(OSError):  # the thread has ended
            nicer = min(os.getpriority(os.PRIO_PROCESS, thread) + steps, LOWEST)
            os.setpriority(os.PRIO_PROCESS, thread, nicer)
    if os.getsid(0) != os.getpid():
        return
    with contextlib.suppress(OSError, ValueError):
        nicer = min(int(AUTOGROUP.read_text().rpartition(" ")[2]) + steps, LOWEST)
        for _ in range(TRIES):
            try:
                AUTOGROUP.write_text(str(nicer))
                return
            except BlockingIOError:  # Linux accepts ten changes a second, of all users together
                time.sleep(AGAIN_S)
