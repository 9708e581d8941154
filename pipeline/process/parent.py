"""What a process has from the one that started it: its variables, and the wish to end with it. Imports nothing slow."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

SUPERVISOR_VARIABLE = "MINISGL_SUPERVISOR"
"""In a worker's environment: the process id of the supervisor that started it."""
RUN_VARIABLE = "MINISGL_RUN"
"""In a worker's environment: the name that its supervisor has given to itself."""


def die_with_supervisor(environment: Mapping[str, str]) -> None:
    """Make a supervised process end when its supervisor does, however that ends.

    Where there is no prctl(2), a thread looks who the parent is.
    """
    supervisor = int(environment.get(SUPERVISOR_VARIABLE, "0"))
    if not supervisor:
        return
    if sys.platform == "linux":
        request_death_signal(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    if sys.platform == "linux":
        return

    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def request_death_signal(number: signal.Signals) -> None:
    """Ask Linux to send *number* to this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
