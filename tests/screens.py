"""Programs on a terminal of their own, for tests: what its screen shows, and keys pressed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import pexpect
import pyte
from servers import ROOT, eventually

PATIENCE_S = 60.0


class Terminal:
    """A terminal with one program on it, as a person sees it."""

    def __init__(self, arguments: Sequence[str], columns: int, lines: int, environment: Mapping[str, str]) -> None:
        command = [str(ROOT / "minisgl.py"), *arguments]
        self.process = pexpect.spawn(
            sys.executable, command, dimensions=(lines, columns), env=dict(environment), timeout=5
        )
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.sent = b""
        """All bytes that the program wrote."""

    @property
    def lines(self) -> list[str]:
        """What stands on the screen now, without the spaces at the ends."""
        self._read()
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def resize(self, columns: int, lines: int) -> None:
        """Make it another size, as who pulls at the window does."""
        self._screen.resize(lines, columns)
        self.process.setwinsize(lines, columns)

    def press(self, key: str) -> None:
        self.process.send(key)

    def shows(self, *texts: str, without: str = "\0") -> list[str]:
        """Wait for a frame with all *texts* and not what it must be *without*; return its lines.

        A frame that a busy machine writes in pieces counts when its last character is there, in the last place.
        """
        seen: list[str] = []

        def is_there() -> bool:
            seen[:] = self.lines
            cursor, text = self._screen.cursor, "\n".join(seen)
            is_whole = (cursor.x, cursor.y) == (self._screen.columns, self._screen.lines - 1)
            return is_whole and all(each in text for each in texts) and without not in text

        try:
            eventually(is_there, f"the screen shows {texts} and not {without!r}", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.text}") from None
        return seen

    def ends(self, check: Callable[[], bool] = lambda: True) -> int:
        """Wait until the program has ended; return its exit code, or the negative number of the signal. *check* is what
        must hold of its terminal then."""
        eventually(lambda: not self._read() and not self.process.isalive(), "the program ends", PATIENCE_S)
        self._read()
        assert check()
        self.process.close()
        signalled, code = self.process.signalstatus, self.process.exitstatus
        return int(code) if signalled is None else -int(signalled)

    def _read(self) -> bool:
        """Take in what was written; say whether there was anything."""
        before = len(self.sent)
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            while not self.process.closed:
                data = self.process.read_nonblocking(65536, timeout=0)
                self.sent += data
                self._stream.feed(data)
        return len(self.sent) > before


@contextlib.contextmanager
def terminal(
    *arguments: str, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run `minisgl <arguments>` on a terminal of that size until the block ends."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    opened = Terminal(arguments, columns, lines, kept | {"TERM": "xterm-256color"} | dict(environment or {}))
    try:
        yield opened
    finally:
        opened.process.close(force=True)
