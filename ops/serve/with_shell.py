"""`serve --shell`: a server behind a chat in the same terminal, which ends both.

The chat owns the terminal and the signals, and the server's output goes to a file.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from ops.serve.config import ServerConfig
from ops.serve.processes import PROGRAM, Processes
from pipeline.errors import ConfigError
from pipeline.process.observe import configure_logging
from pipeline.process.parent import request_death_signal
from pipeline.process.private import make_private, open_private
from pipeline.stage.supervisor import StartFailed, Supervisor
from web.http.listener import url_here

LOG_NAME: Final = "serve.log"
LINES_SHOWN: Final = 20
"""Lines of the log to show if the server does not start."""
LEAVE_S: Final = 5.0
"""How long the shell may take to end."""


def check_terminal() -> None:
    """Check that there is a terminal. Raises ConfigError."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("--shell: needs a terminal; without one, use `minisgl serve` and `minisgl shell -q`")


class Foreground:
    """Gives the terminal to the shell; the server writes to a file in *folder*."""

    def __init__(self, folder: Path) -> None:
        self.log_path = folder / LOG_NAME
        try:
            make_private(folder)
            self.log: BinaryIO = os.fdopen(
                open_private(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0
            )
        except OSError as error:
            raise ConfigError(f"--data-dir {folder}: {error.strerror}; pass a folder that can be written") from error
        self.code = 0
        """The shell's exit code."""
        self._shown = ""

    def show_progress(self, late: Sequence[str]) -> None:
        """Show in one line which workers are not ready."""
        line = f"starting: {', '.join(late)}"[: shutil.get_terminal_size().columns - 1] if late else ""
        if line != self._shown:
            sys.stdout.write(f"\r\x1b[K{line}")
            sys.stdout.flush()
            self._shown = line

    def tell_why(self) -> None:
        """Print the end of the log, and before it what workers said for people: others may have logged a lot since."""
        self.show_progress(())
        lines = self.log_path.read_text(errors="replace").splitlines()
        said = [line for line in lines[:-LINES_SHOWN] if line.startswith("minisgl: ")]
        shown = (*said, *lines[-LINES_SHOWN:], f"({self.log_path} has all of it)")
        sys.stderr.write("".join(f"{line}\n" for line in shown))

    def run(self, supervisor: Supervisor, command: Sequence[str], key: str) -> None:
        """Run the shell *command* with the API key *key* until it ends or SIGTERM comes.

        Raises:
            ChildFailed: A worker cannot go on.
        """
        with supervisor.without_interrupts():  # Ctrl-C reaches both; only the shell shall handle it
            shell = subprocess.Popen(
                command,
                env=_environment(os.environ, key),
                preexec_fn=_leave_with_parent if sys.platform == "linux" else None,
            )
            try:
                supervisor.run(until=lambda: shell.poll() is not None)
            finally:
                self.code = _end(shell)
        sys.stdout.write("ending the server ..\n")
        sys.stdout.flush()
        supervisor.signals = max(supervisor.signals, 1)  # as after Ctrl-C: one more ends the drain


def _environment(environment: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the shell's environment, without MINISGL_ variables: they are the server's flags."""
    kept = {name: value for name, value in environment.items() if not name.startswith("MINISGL_")}
    return kept | ({"MINISGL_API_KEY": key} if key else {})


def _leave_with_parent() -> None:
    request_death_signal(signal.SIGTERM)


def _end(shell: subprocess.Popen[bytes]) -> int:
    """End the shell if it still runs; return its exit code, or 0 if it had to be ended."""
    if shell.poll() is not None:
        return shell.returncode
    shell.terminate()
    try:
        shell.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        shell.kill()
        shell.wait()
    return 0


def with_shell_key(config: ServerConfig) -> ServerConfig:
    """Return *config* with an API key for the shell, the first one, if the keys are in the file of limits, which may
    have hashes alone. It is in the memory of this process and in the environment of those that need it."""
    if not config.keys.limits or config.keys.api_key:
        return config
    keys = dataclasses.replace(config.keys, api_key=(f"sk-{secrets.token_urlsafe(32)}",))
    return dataclasses.replace(config, keys=keys)


def run_with_shell(processes: Processes, config: ServerConfig, greeting: str, ready_timeout_s: float) -> int:
    """Run *processes* until the shell before them ends, or a SIGTERM comes; return the exit code."""
    front = Foreground(config.data_dir)
    configure_logging(to=front.log)

    def say_ready() -> None:
        if greeting:
            print(greeting)
        print(f"The server's log is {front.log_path}; Ctrl-D ends chat and server.", flush=True)

    def stay(supervisor: Supervisor) -> None:
        where = url_here(config.web.host, config.web.port)
        key = next(iter(config.keys.api_key), config.keys.admin_key or "")
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
