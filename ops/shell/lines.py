"""Parses a typed line: a command, or a message. Knows the commands' names, not what they do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "/help": ("", "this list"),
    "/reset": ("", "clear the conversation; keep system text and settings"),
    "/retry": ("", "ask the last question again"),
    "/undo": ("", "remove the last question and its answer"),
    "/system": ("[TEXT]", 'show or set the system text; "" removes it'),
    "/set": ("NAME=VALUE ..", "set request fields, say temperature=0.2 max_tokens=64; NAME= unsets one"),
    "/params": ("", "show the fields that are set"),
    "/model": ("[NAME]", "list the server's models, or choose one"),
    "/stats": ("", "times and tokens of the last answer and of all answers"),
    "/trace": ("[UID]", "what happened to the last request, or to any other, also to an archived one"),
    "/save": ("FILE", "save conversation, system text and settings to a file"),
    "/load": ("FILE", "load them from a file"),
    "/exit": ("", "leave; so do /quit and Ctrl-D"),
}
"""Name -> its argument and its effect."""
ALIASES: Final[Mapping[str, str]] = {"/quit": "/exit"}
NAMES: Final = (*COMMANDS, *ALIASES)


@dataclass(frozen=True, slots=True)
class Say:
    """A text for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its argument."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A line that looks like a command but is none; *near* are similar names."""

    name: str
    near: tuple[str, ...]


def read_line(line: str) -> Say | Command | Unknown | None:
    """Parse *line*; None if it is blank. `//text` is the message `/text`."""
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
