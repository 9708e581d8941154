"""The shell's output: answers as they come, and its own messages. Printed text never changes."""

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
    """A terminal. rich decides about colours, so NO_COLOR works."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        self._out = out
        self._kind = "text"
        self._is_at_start = True
        """Whether the cursor is at the start of a line."""

    def piece(self, piece: Piece) -> None:
        """Print a piece with control characters escaped; thoughts and notes are dim."""
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
        """Start a new line, unless the line is empty."""
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
        """Print an error."""
        self.end_line()
        self._console.print(Text.assemble(("error: ", "bold red"), one_line(text)))

    def table(self, rows: Sequence[Sequence[str]], header: Sequence[str] = (), right: Sequence[int] = ()) -> None:
        """Print a table; the columns *right* are right-aligned, and the last column wraps."""
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
        """Hide typed keys until the block ends; the next prompt receives them. Ctrl-C still interrupts."""
        before = termios.tcgetattr(keyboard)
        during = termios.tcgetattr(keyboard)
        during[0] &= ~termios.ICRNL
        during[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, during)
        try:
            yield
        finally:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
