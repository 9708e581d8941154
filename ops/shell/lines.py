"""What a typed line means: a command, or something to say. Knows the commands' names, not what they do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "/help": ("", "this list"),
    "/reset": ("", "forget the conversation; system text and settings stay"),
    "/retry": ("", "answer the last question again"),
    "/undo": ("", "take the last question and its answer back"),
    "/system": ("[TEXT]", 'show what comes before the conversation, or set it; "" takes it away'),
    "/set": ("NAME=VALUE ..", "set fields of the requests, say temperature=0.2 max_tokens=64; NAME= takes one back"),
    "/params": ("", "show the fields that are set"),
    "/model": ("[NAME]", "list the server's models, or choose one"),
    "/stats": ("", "times and tokens of the last answer and of all"),
    "/save": ("FILE", "keep conversation, system text and settings in a file"),
    "/load": ("FILE", "go on with those of a file"),
    "/exit": ("", "leave; so do /quit and Ctrl-D"),
}
"""Name -> what follows it, and what it does."""
ALIASES: Final[Mapping[str, str]] = {"/quit": "/exit"}
NAMES: Final = (*COMMANDS, *ALIASES)


@dataclass(frozen=True, slots=True)
class Say:
    """A text for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what follows its name."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A line that begins as a command does and is none; *near* are names that may have been meant."""

    name: str
    near: tuple[str, ...]


def read_line(line: str) -> Say | Command | Unknown | None:
    """Return what *line* means; None when there is nothing in it. `//text` says `/text`."""
    if not line.strip():
        return None
    text = line.lstrip()
    if text.startswith("//"):
        return Say(text[1:])
    if not text.startswith("/"):
        return Say(line)
    name, *rest = text.split(maxsplit=1)
    name = ALIASES.get(name, name)
    if name in COMMANDS:
        return Command(name, rest[0].strip() if rest else "")
    near = [each for each in NAMES if len(name) > 1 and each.startswith(name)]
    return Unknown(name, tuple(near or difflib.get_close_matches(name, NAMES, n=3)))
