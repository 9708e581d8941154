"""What can be asked of Redis, as values: a script, a command or a batch of commands, and what the reply means.

Knows no connection. `pipeline.log.drivers` sends an operation, for threads or for asyncio.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from pipeline.log.protocol import RequestLimits
from pipeline.names import Names

T = TypeVar("T")

Words: TypeAlias = Sequence[str | int | bytes]


class LogContext(Protocol):
    """The log that an operation is for."""

    names: Names
    limits: RequestLimits


@dataclass(frozen=True, slots=True)
class Script(Generic[T]):
    """A commit: the script of this name in commits/, its keys and arguments, and what its reply means."""

    name: str
    keys: Sequence[str]
    args: Words
    parse: Callable[[Any], T]
    once: bool = False
    """Never sent again after a broken connection: the script delivers entries, which `pending` finds, or it builds on
    what was committed before. The others are safe to run twice."""

    def __iter__(self) -> Steps[T]:
        return self.parse((yield self))


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """One command, and what its reply means."""

    words: Words
    parse: Callable[[Any], T]
    once: bool = False
    """Never sent again, because the command delivers entries, or blocks, or its caller asks again soon anyway. It has a
    connection of its own, which is kept: that takes half of the time."""

    def __iter__(self) -> Steps[T]:
        return self.parse((yield self))


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Reads that are sent in one piece, and what their replies mean. The reply is None where a group is missing."""

    commands: Sequence[Words]
    parse: Callable[[list[Any]], T]
    any_type: bool = False
    """The reply is None also where a key is of another type: one history that is none must not hide all others."""

    def __iter__(self) -> Steps[T]:
        return self.parse((yield self))


Operation: TypeAlias = Script[T] | Command[T] | Batch[T]
Steps: TypeAlias = Generator[Operation[Any], Any, T]
"""Several operations, of which a later one depends on the reply to an earlier one. `yield from` an operation gives what
its reply means."""


@functools.cache
def script_text(name: str) -> str:
    """Return the Lua text of a commit. The functions that the commits share come first."""
    folder = resources.files("pipeline.log") / "commits"
    return (folder / "lib.lua").read_text() + (folder / f"{name}.lua").read_text()


@functools.cache
def script_sha(name: str) -> str:
    """Return the hash by which EVALSHA knows the script."""
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


def blocking(block_ms: int) -> list[str | int]:
    """Return the words that make a read wait. There are none for 0, which Redis takes as forever."""
    return ["BLOCK", min(block_ms, LONGEST_BLOCK_MS)] if block_ms > 0 else []


LONGEST_BLOCK_MS = 2000
"""No read waits longer, so that a stop, a lost group or a deleted stream is noticed soon."""
