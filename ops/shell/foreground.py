"""The shell in the foreground of `serve --shell`: where the server's lines go meanwhile, and who gets the signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.errors import ConfigError
from pipeline.process.parent import request_death_signal
from pipeline.process.supervisor import Supervisor

LOG_NAME: Final = "serve.log"
LINES_SHOWN: Final = 20
"""How many of the log's last lines say why the server did not start."""
LEAVE_S: Final = 5.0
"""How long the shell may take to end when it is told to."""


def check_terminal() -> None:
    """Make sure that somebody can type. Raises ConfigError."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("--shell: needs a terminal; without one leave it out, and ask with `minisgl shell -q`")


class Foreground:
    """A terminal that is the shell's, while the server writes into a file of its *folder*."""

    def __init__(self, folder: Path) -> None:
        self.log_path = folder / LOG_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.log: BinaryIO = self.log_path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--data-dir {folder}: {error.strerror}; pass a folder that can be written") from error
        self.code = 0
        """What the shell ended with."""
        self._shown = ""

    def show_progress(self, late: Sequence[str]) -> None:
        """Say in one line who is not ready yet."""
        line = f"starting: {', '.join(late)}"[: shutil.get_terminal_size().columns - 1] if late else ""
        if line != self._shown:
            sys.stdout.write(f"\r\x1b[K{line}")
            sys.stdout.flush()
            self._shown = line

    def tell_why(self) -> None:
        """Print what the log ends with."""
        self.show_progress(())
        lines = self.log_path.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
        sys.stderr.write("".join(f"{line}\n" for line in (*lines, f"({self.log_path} has all of it)")))

    def run(self, supervisor: Supervisor, command: Sequence[str], key: str) -> None:
        """Run the shell, *command*, which sends the API key *key*, until it ends or a SIGTERM comes.

        Raises:
            ChildFailed: A worker cannot go on.
        """
        with supervisor.without_interrupts():  # Ctrl-C reaches both of us, and is for the shell
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
        supervisor.signals = max(supervisor.signals, 1)  # as if by Ctrl-C: one more ends what drains


def _environment(environment: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the shell's environment: what the server's flags are set by there means something else to it."""
    kept = {name: value for name, value in environment.items() if not name.startswith("MINISGL_")}
    return kept | ({"MINISGL_API_KEY": key} if key else {})


def _leave_with_parent() -> None:
    request_death_signal(signal.SIGTERM)


def _end(shell: subprocess.Popen[bytes]) -> int:
    """Wait for the shell, which is told to leave where it has not; return its code, 0 where it was told."""
    if shell.poll() is not None:
        return shell.returncode
    shell.terminate()
    try:
        shell.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        shell.kill()
        shell.wait()
    return 0
