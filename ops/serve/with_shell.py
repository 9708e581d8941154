"""`serve --shell`: a server behind a chat in the same terminal, which ends both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.serve.config import ServerConfig
from ops.serve.processes import PROGRAM, Processes
from ops.shell.foreground import Foreground
from pipeline.process.observe import configure_logging
from pipeline.process.supervisor import StartFailed
from web.listener import url_here

if TYPE_CHECKING:
    from pipeline.process.supervisor import Supervisor


def run_with_shell(processes: Processes, config: ServerConfig, greeting: str, ready_timeout_s: float) -> int:
    """Run *processes* until the shell before them ends, or a SIGTERM comes; return the exit code."""
    front = Foreground(config.data_dir)
    configure_logging(to=front.log)

    def say_ready() -> None:
        if greeting:
            print(greeting)
        print(f"The server's log is {front.log_path}; Ctrl-D ends chat and server.", flush=True)

    def stay(supervisor: Supervisor) -> None:
        from web.keys import first_key

        where = url_here(config.web.host, config.web.port)
        key = first_key(config.keys.api_key, config.keys.limits)
        front.run(supervisor, (*PROGRAM, "shell", "--url", where), key)

    try:
        code = processes.run(say_ready, ready_timeout_s, stay, output=front.log, show=front.show_progress)
    except StartFailed:
        front.tell_why()
        raise
    finally:
        front.show_progress(())
    if code:
        front.tell_why()
    return code or front.code
