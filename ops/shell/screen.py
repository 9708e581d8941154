"""What the shell prints: answers as they come, and what it says itself. Nothing is painted twice."""

from __future__ import annotations

import contextlib
import termios
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ops.shell.reply import Piece
from ops.shell.text import one_line, printable


class Screen:
    """A terminal. Colours are rich's business: NO_COLOR counts."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        self._out = out
        self._kind = "text"
        self._is_at_start = True
        """Whether the next character comes first in its line."""

    def piece(self, piece: Piece) -> None:
        """Print what came of an answer, without its control characters; what is not of it is dim."""
        if piece.kind != self._kind and "thought" in (piece.kind, self._kind):
            self.end_line()  # the answer begins in a line of its own
        self._kind = piece.kind
        text = printable(piece.text)
        if piece.kind == "text":
            self._out.write(text)
            self._out.flush()
        else:
            self._console.print(Text(text, "dim"), end="", soft_wrap=True)
        self._is_at_start = text.endswith("\n")

    def end_line(self) -> None:
        """Go to a new line, unless it is one."""
        if not self._is_at_start:
            self._out.write("\n")
            self._out.flush()
        self._is_at_start, self._kind = True, "text"

    def say(self, text: str) -> None:
        """Print a line."""
        self.end_line()
        self._console.print(Text(one_line(text)))

    def note(self, text: str) -> None:
        """Print a dim line."""
        self.end_line()
        self._console.print(Text(one_line(text), "dim"))

    def error(self, text: str) -> None:
        """Print a line about what went wrong."""
        self.end_line()
        self._console.print(Text.assemble(("error: ", "bold red"), one_line(text)))

    def table(self, rows: Sequence[Sequence[str]], header: Sequence[str] = (), right: Sequence[int] = ()) -> None:
        """Print rows as columns, those of *right* to the right; the last column wraps within itself."""
        self.end_line()
        grid = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for index in range(len(rows[0])):
            is_last = index == len(rows[0]) - 1
            grid.add_column(
                header[index] if header else "",
                justify="right" if index in right else "left",
                no_wrap=not is_last,
                overflow="fold",
            )
        for row in rows:
            grid.add_row(*(Text(one_line(cell)) for cell in row))
        self._console.print(grid)

    @contextlib.contextmanager
    def unechoed(self, keyboard: int) -> Iterator[None]:
        """Show nothing of what is typed meanwhile; it waits, as it is, for the next prompt. Ctrl-C still interrupts."""
        before = termios.tcgetattr(keyboard)
        during = termios.tcgetattr(keyboard)
        during[0] &= ~termios.ICRNL
        during[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, during)
        try:
            yield
        finally:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
