"""Operations of Redis as values: a script, a command or a batch of commands, and the function that parses the reply.

Knows no connection. `pipeline.log.drivers` sends an operation, for threads or for asyncio.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import orjson

from pipeline.log.protocol import RequestLimits
from pipeline.names import Names

T = TypeVar("T")

Words: TypeAlias = Sequence[str | int | bytes]


class LogContext(Protocol):
    """The log of an operation."""

    names: Names
    limits: RequestLimits


@dataclass(frozen=True, slots=True)
class Script(Generic[T]):
    """A commit: its script in commits/, the keys and arguments, and the function that parses its reply."""

    name: str
    keys: Sequence[str]
    args: Words
    parse: Callable[[Any], T]
    once: bool = False
    """Whether it is never sent again after a broken connection: it delivers entries, which `pending` finds, or builds
    on earlier commits. The others are safe to run twice."""
    then: Words = ()
    """A command that is sent with it, on a connection that it may block. `parse` gets both replies."""

    def __iter__(self) -> Steps[T]:
        return self.parse((yield self))


def commit(
    name: str,
    parse: Callable[[Any], T],
    keys: Mapping[str, str | Sequence[str] | None],
    *more: str | int | bytes,
    once: bool = False,
    **args: str | int | Sequence[str | int] | None,
) -> Script[T]:
    """Return a commit. Its script finds *keys* and *args* by name (`named` in lib.lua), and *more* in this order.

    None and False are missing there. Numbers are sent as texts, because Lua's are doubles.
    """
    flat: list[str] = []
    index: dict[str, int | list[int]] = {}
    for called, key in keys.items():
        if isinstance(key, str):
            flat.append(key)
            index[called] = len(flat)
        elif key is not None:
            index[called] = list(range(len(flat) + 1, len(flat) + 1 + len(key)))
            flat += key
    said: dict[str, Any] = {"keys": index}
    for called, value in args.items():
        if isinstance(value, str | int):
            if value is not False:
                said[called] = str(value)
        elif value is not None:
            said[called] = [*map(str, value)]
    return Script(name, flat, [orjson.dumps(said), *more], parse, once)


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """One command, and the function that parses its reply."""

    words: Words
    parse: Callable[[Any], T]
    once: bool = False
    """Whether it is never sent again: it delivers entries, or blocks, or its caller asks again soon anyway. It has a
    connection of its own, which is kept: that halves its time."""

    def __iter__(self) -> Steps[T]:
        return self.parse((yield self))


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Reads that are sent together, and the function that parses the replies. A reply is None if a group is missing."""

    commands: Sequence[Words]
    parse: Callable[[list[Any]], T]
    any_type: bool = False
    """Whether a reply is None also if a key is of another type: one wrong key must not hide all other histories."""

    def __iter__(self) -> Steps[T]:
        return self.parse((yield self))


@dataclass(frozen=True, slots=True)
class Computation(Generic[T]):
    """What takes too long between two operations for an event loop: for asyncio, a thread does it."""

    compute: Callable[[], T]

    def __iter__(self) -> Steps[T]:
        computed: T = yield self
        return computed


Operation: TypeAlias = Script[T] | Command[T] | Batch[T]
Steps: TypeAlias = Generator[Operation[Any] | Computation[Any], Any, T]
"""Several operations that depend on the replies to earlier ones. `yield from` an operation returns its parsed reply."""


@functools.cache
def script_text(name: str) -> str:
    """Return the Lua text of a commit. It begins with what it uses of lib.lua: Redis makes each function anew at each
    call, and all of them take as long as four commands."""
    folder = resources.files("pipeline.log") / "commits"
    text = (folder / f"{name}.lua").read_text()
    for part in reversed((folder / "lib.lua").read_text().split("\n\n")):  # a function uses those before it
        names = re.findall(r"^local (?:function )?(\w+)", part, re.MULTILINE)
        if any(re.search(rf"\b{name}\b", text) for name in names):
            text = f"{part}\n\n{text}"
    return text


@functools.cache
def script_sha(name: str) -> str:
    """Return the hash of the script for EVALSHA."""
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


def blocking(block_ms: int) -> list[str | int]:
    """Return the words that make a read wait. There are none for 0, because Redis would wait forever."""
    return ["BLOCK", min(block_ms, LONGEST_BLOCK_MS)] if block_ms > 0 else []


LONGEST_BLOCK_MS = 2000
"""Longest wait of a read, so that a stop, a lost group or a deleted stream is noticed soon."""
