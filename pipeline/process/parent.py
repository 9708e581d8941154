"""What a worker inherits from its supervisor: variables, and death with the supervisor. Imports nothing slow."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final

SUPERVISOR_VARIABLE = "MINISGL_SUPERVISOR"
"""Variable with the process id of a worker's supervisor."""
RUN_VARIABLE = "MINISGL_RUN"
"""Variable with the name of the supervisor's run."""
EXIT_REPLACE: Final = 4
"""Exit code of a worker that must be replaced at once: it could not leave a request that took too long."""


def die_with_supervisor(environment: Mapping[str, str]) -> None:
    """Make this process end when its supervisor ends, even by SIGKILL. Without a supervisor, do nothing.

    Linux does it (prctl(2)); on other systems a thread watches the parent.
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
