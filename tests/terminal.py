"""A command on a pseudo-terminal, what its screen shows, and somebody who types at a prompt or presses keys."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pyte
from servers import ROOT

PROGRAM = (sys.executable, str(ROOT / "minisgl.py"))
COLUMNS, ROWS = 100, 30
TIMEOUT_S = 60.0


class _Emulator(pyte.HistoryScreen):
    """A screen that answers who asks where the cursor is."""

    def __init__(self, process: Any, columns: int, rows: int) -> None:
        super().__init__(columns, rows, history=5000)
        self._process = process

    def write_process_input(self, data: str) -> None:
        self._process.send(data)


class Screen:
    """One command and what its screen shows now."""

    def __init__(self, process: Any, columns: int, rows: int) -> None:
        self.process = process
        self.sent = b""
        """Every byte that the terminal was sent."""
        self._screen = _Emulator(process, columns, rows)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """What there is to read, without the spaces at the ends."""
        self._look()
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def _look(self) -> None:
        """Take in what has come; not all that comes, which would be over when something is done about it."""
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            data = self.process.read_nonblocking(65536, 0.02)
            self.sent += data
            self._stream.feed(data)

    def until(self, check: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until *check* holds; fail with *what* was waited for, and the screen."""
        deadline_s = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < deadline_s, f"waited {timeout_s:.0f} s in vain: {what}\n{self.text}"

    def shows(self, *texts: str, without: str = "\0") -> None:
        """Wait until the screen shows all *texts*, and not what it must be *without*."""

        def is_there() -> bool:
            seen = self.text
            return all(text in seen for text in texts) and without not in seen

        self.until(is_there, f"the screen shows {texts} and not {without!r}")

    def press(self, keys: str) -> None:
        """Send *keys* as they are."""
        self.process.send(keys)

    def resize(self, columns: int, rows: int) -> None:
        """Make it another size, as who pulls at the window does."""
        self._screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

    def ended(self, check: Callable[[], bool] = lambda: True) -> int:
        """Wait for the end; return the exit code, or the negative number of the signal. *check* is what must hold of
        the terminal then."""
        self.until(lambda: self.lines is not None and not self.process.isalive(), "the end")
        before = -1
        while before < len(self.sent):
            before = len(self.sent)
            self._look()
        assert check()
        signalled, code = self.process.signalstatus, self.process.exitstatus
        return int(code) if signalled is None else -int(signalled)


class Terminal(Screen):
    """A screen with a prompt, and what has left it at the top."""

    @property
    def lines(self) -> list[str]:
        self._look()
        above = ["".join(line[column].data for column in range(COLUMNS)) for line in self._screen.history.top]
        return [line.rstrip() for line in (*above, *self._screen.display)]

    @property
    def is_asking(self) -> bool:
        """Whether the cursor stands at an empty prompt."""
        self._look()
        cursor = self._screen.cursor
        return cursor.x == 2 and self._screen.display[cursor.y].rstrip() == ">"

    def until_shown(self, words: str) -> None:
        self.until(lambda: words in " ".join(self.text.split()), f"{words!r} on the screen")

    def until_asking(self) -> None:
        self.until(lambda: self.is_asking, "an empty prompt")

    def enter(self, line: str) -> None:
        """Type a line at an empty prompt, see it there, and press Enter."""
        self.until_asking()
        self.press(line)
        self.until(lambda: self.lines[self._screen.cursor.y - ROWS].endswith(line[-40:]), f"{line!r} at the prompt")
        self.press("\r")

    def said(self, line: str) -> str:
        """Enter a line, wait for the next prompt, and return what came between them, in one line."""
        self.enter(line)
        self.until_asking()
        *_, after = self.text.rpartition(f"> {line}")
        return " ".join(after.removesuffix(">").split())


@contextlib.contextmanager
def _spawned(program: Sequence[str], columns: int, rows: int, own: dict[str, str], folder: Path) -> Iterator[Any]:
    """Run *program* on a terminal of that size until the block ends."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MINISGL_") and name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    environment = kept | {"TERM": "xterm-256color"} | own
    process = pexpect.spawn(program[0], [*program[1:]], cwd=str(folder), env=environment, dimensions=(rows, columns))
    process.delaybeforesend = None
    try:
        yield process
    finally:
        process.close(force=True)


@contextlib.contextmanager
def on_a_screen(
    *arguments: str, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
) -> Iterator[Screen]:
    """Run `minisgl <arguments>` on a terminal of that size until the block ends."""
    with _spawned([*PROGRAM, *arguments], columns, lines, dict(environment or {}), ROOT) as process:
        yield Screen(process, columns, lines)


@contextlib.contextmanager
def on_a_terminal(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> Iterator[Terminal]:
    """Run `minisgl <arguments>` in *folder*, with its state there too, until the block ends."""
    own = {"XDG_STATE_HOME": str(folder / "state"), **(environment or {})}
    with _spawned([*program, *arguments], COLUMNS, ROWS, own, folder) as process:
        yield Terminal(process, COLUMNS, ROWS)
