"""A command on a pseudo-terminal, what its screen shows, and somebody who types."""

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
from support.servers import ROOT

TIMEOUT_S = 60.0


class _Screen(pyte.HistoryScreen):
    """A screen that answers who asks where the cursor is."""

    def __init__(self, child: Any, columns: int, rows: int) -> None:
        super().__init__(columns, rows, history=5000)
        self._child = child

    def write_process_input(self, data: str) -> None:
        self._child.send(data)


class Terminal:
    """One command and its screen, with what has left it at the top."""

    def __init__(self, child: Any, columns: int, rows: int) -> None:
        self.child = child
        self.sent = b""
        """Every byte that the terminal was sent."""
        self._screen = _Screen(child, columns, rows)
        self._lines: list[str] = []
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """What there is to read, the lines above the screen included."""
        self._look()
        if not self._lines:
            columns = range(self._screen.columns)
            above = ("".join(line[column].data for column in columns) for line in self._screen.history.top)
            self._lines = [line.rstrip() for line in (*above, *self._screen.display)]
        return self._lines

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    @property
    def is_asking(self) -> bool:
        """Whether the cursor stands at an empty prompt."""
        self._look()
        cursor = self._screen.cursor
        return cursor.x == 2 and self._screen.display[cursor.y].rstrip() == ">"

    def _look(self) -> None:
        """Take in what has come; not all that comes, which would be over when something is done about it."""
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            data = self.child.read_nonblocking(65536, 0.02)
            self.sent += data
            self._stream.feed(data)
            self._lines = []

    def until(self, check: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until *check* holds; fail with *what* was waited for, and the screen."""
        deadline_s = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < deadline_s, f"waited {timeout_s:.0f} s in vain: {what}\n{self.text}"

    def until_shown(self, words: str) -> None:
        self.until(lambda: words in " ".join(self.text.split()), f"{words!r} on the screen")

    def shows(self, *texts: str, without: str = "\0") -> list[str]:
        """Wait until a whole frame has all *texts* and not what it must be *without*; return its lines.

        A busy machine writes a frame in pieces. It is whole when its last character is there, in the last place.
        """
        seen: list[str] = []

        def is_there() -> bool:
            self._look()
            seen[:] = [line.rstrip() for line in self._screen.display]
            cursor, text = self._screen.cursor, "\n".join(seen)
            is_whole = (cursor.x, cursor.y) == (self._screen.columns, self._screen.lines - 1)
            return is_whole and all(each in text for each in texts) and without not in text

        self.until(is_there, f"a frame with {texts} and without {without!r}")
        return seen

    def until_asking(self) -> None:
        self.until(lambda: self.is_asking, "an empty prompt")

    def resize(self, columns: int, rows: int) -> None:
        """Make it another size, as somebody who pulls at the window."""
        self._screen.resize(rows, columns)
        self._lines = []
        self.child.setwinsize(rows, columns)

    def press(self, keys: str) -> None:
        """Send *keys* as they are."""
        self.child.send(keys)

    def until_at_prompt(self, line: str) -> None:
        self.until(lambda: self._at_prompt().endswith(line[-40:]), f"{line!r} at the prompt")

    def recall(self, line: str) -> None:
        """Press Up, and see *line* at the prompt. The key does nothing until a thread has read the history."""
        before, pressed_s = self._at_prompt(), 0.0

        def is_another() -> bool:
            nonlocal pressed_s
            if self._at_prompt() != before:
                return True
            if time.monotonic() - pressed_s > 3:
                pressed_s = time.monotonic()
                self.press("\x1b[A")
            return False

        self.until(is_another, "another line at the prompt")
        self.until_at_prompt(line)

    def enter(self, line: str) -> None:
        """Type a line at an empty prompt, see it there, and press Enter."""
        self.until_asking()
        self.press(line)
        self.until_at_prompt(line)
        self.press("\r")

    def _at_prompt(self) -> str:
        return self.lines[-1 - self._below()]

    def _below(self) -> int:
        return self._screen.lines - 1 - self._screen.cursor.y

    def said(self, line: str) -> str:
        """Enter a line, wait for the next prompt, and return what came between them, in one line."""
        self.enter(line)
        self.until_asking()
        *_, after = self.text.rpartition(f"> {line}")
        return " ".join(after.removesuffix(">").split())

    def ended(self) -> int | None:
        """Wait for the end; return the exit code, or nothing if a signal killed it."""

        def is_over() -> bool:
            before = len(self.sent)
            self._look()
            return len(self.sent) == before and not self.child.isalive()

        self.until(is_over, "the end")
        code: int | None = self.child.exitstatus
        return code


@contextlib.contextmanager
def on_a_terminal(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = (sys.executable, str(ROOT / "minisgl.py")),
    *,
    columns: int = 100,
    rows: int = 30,
) -> Iterator[Terminal]:
    """Run `minisgl <arguments>` in *folder*, with its state there too, until the block ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_") and name != "NO_COLOR"}
    own = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(folder / "state"), **(environment or {})}
    words = [*program[1:], *arguments]
    child = pexpect.spawn(program[0], words, cwd=str(folder), env=kept | own, dimensions=(rows, columns))
    child.delaybeforesend = None
    try:
        yield Terminal(child, columns, rows)
    finally:
        with contextlib.suppress(pexpect.ExceptionPexpect):  # it has got SIGKILL, but was not gone 0.1 s later
            child.close(force=True)
