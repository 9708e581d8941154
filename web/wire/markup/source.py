"""The text of an answer while it comes, and what its parsers write.

A parser is a generator. It reads the source at `at` and yields where it needs more text, so that what it finds does not
depend on the pieces in which the text came.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A parser that returns a T. It yields where it needs more text, or the word that there is no more."""
SPACE: Final = " \t\r\n"
_SPACES: Final = frozenset(SPACE)


class Source:
    """The text that is not settled yet. What is before `at` has been read."""

    __slots__ = ("at", "cut", "over", "ran_out", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.over = False
        """Whether the text is complete."""
        self.cut = False
        """Whether the limit of its length ended the answer."""
        self.ran_out = False
        """Whether a parser needed more text than there was."""

    def drop(self) -> str:
        """Forget what has been read; return it."""
        read, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return read

    def need(self, count: int) -> Steps[bool]:
        """Wait for *count* characters. Return whether there are as many."""
        while len(self.text) - self.at < count:
            if self.over:
                self.ran_out = True
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character, without reading it; "" at the end."""
        return self.text[self.at] if (yield from self.need(1)) else ""

    def space(self) -> Steps[None]:
        """Read whitespace."""
        while (yield from self.peek()) in _SPACES:
            self.at += 1

    def skip(self, word: str) -> Steps[bool]:
        """Read *word* if it comes next. Return whether it did."""
        for index, char in enumerate(word):
            if not (yield from self.need(index + 1)) or self.text[self.at + index] != char:
                return False
        self.at += len(word)
        return True

    def until(self, end: str) -> Steps[str | None]:
        """Read up to and including *end*; return the text before it. Without an *end*, read nothing and return None."""
        start = self.at
        while (place := self.text.find(end, start)) < 0:
            if self.over:
                self.ran_out = True
                return None
            start = max(self.at, len(self.text) - len(end) + 1)
            yield
        before, self.at = self.text[self.at : place], place + len(end)
        return before


class ToolParameters(NamedTuple):
    """What a parser has to know about a tool."""

    properties: Mapping[str, Any]
    """Name of a parameter -> its schema, in the client's order."""
    definitions: Mapping[str, Any]
    """The schemas that others refer to."""


class Sink(Protocol):
    """Takes what a family's parser finds. What it has taken is never taken back."""

    tools: Mapping[str, ToolParameters]

    def allows(self, name: str, *, bare: bool = False) -> bool:
        """Return whether a call of *name* counts. A *bare* call, without a marker, needs a known tool."""
        ...

    def begin(self, name: str) -> None:
        """A call begins. The source forgets what has been read."""
        ...

    def message(self, *, thinks: bool) -> None:
        """A message begins, whose text is reasoning if it *thinks*, else content. The source forgets what has been
        read."""
        ...

    def arguments(self, text: str) -> None:
        """The arguments of the call go on with *text*. The source forgets what has been read."""
        ...


class Family(Protocol):
    """One way in which models write calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Each of these texts may begin calls."""
        ...

    @property
    def bare(self) -> str:
        """This character may begin calls at the start of the answer; empty: only markers do."""
        ...

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """Read calls behind *marker*, which is read already; say whether there was one. `bare` is to be read.

        If there was none, what has been read is text. If the answer ended within a call, `Source.ran_out` says so.
        """
        ...
