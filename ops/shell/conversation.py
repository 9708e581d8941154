"""The conversation so far, its settings, and its file. Knows neither terminal nor server."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ops.shell.params import no_constant, why_not_settable
from pipeline.errors import MiniSGLError

KIND: Final = "minisgl conversation"
"""Marks our files; /save overwrites no other file."""


class NotKept(MiniSGLError):
    """A conversation cannot be written to the file, or read from it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str
    cut: bool = False
    """Whether the user stopped the answer."""


@dataclass(slots=True)
class Conversation:
    """The turns so far, the system text before them, and the fields that every request gets."""

    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def body(self, model: str, question: str, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the request that asks *question* after *turns*."""
        head = [_message("system", self.system)] if self.system else []
        pairs = [(_message("user", turn.question), _message("assistant", turn.answer)) for turn in turns]
        messages = [*head, *itertools.chain(*pairs), _message("user", question)]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, "messages": messages, **stream, **self.params}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def save(conversation: Conversation, path: Path) -> None:
    """Write *conversation* to *path*, all or nothing. Only a conversation may be overwritten.

    Raises:
        NotKept: The file cannot be written.
    """
    path = Path(os.path.realpath(path.expanduser()))
    if path.exists():
        try:
            load(path)
        except NotKept as error:
            raise NotKept(f"{path} already exists and is not a conversation; pass another name") from error
    document = {
        "kind": KIND,
        "system": conversation.system,
        "params": conversation.params,
        "turns": [
            {"question": turn.question, "answer": turn.answer, **({"cut": True} if turn.cut else {})}
            for turn in conversation.turns
        ],
    }
    text = json.dumps(document, indent=2, ensure_ascii=False)
    try:
        _replace(path, (text + "\n").encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise NotKept(f"{path} cannot be written: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    """Write *content* to a new file and move it to *path*; only its owner may read it."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def load(path: Path) -> Conversation:
    """Return the conversation in *path*.

    Raises:
        NotKept: It cannot be read, or is not a conversation.
    """
    path = path.expanduser()
    try:
        if not path.is_file() and path.exists():
            raise NotKept(f"{path} is not a file")
        content = path.read_bytes()
    except OSError as error:
        raise NotKept(f"{path} cannot be read: {error.strerror}") from error
    try:
        document = json.loads(content.decode("utf-8", "surrogatepass"), parse_constant=no_constant)
    except (ValueError, RecursionError):
        raise NotKept(f"{path} is not a conversation: it is not JSON") from None
    if wrong := _what_is_wrong(document):
        raise NotKept(f"{path} is not a conversation: {wrong}")
    turns = [Turn(turn["question"], turn["answer"], turn.get("cut", False)) for turn in document["turns"]]
    return Conversation(document["system"], document["params"], turns)


def _what_is_wrong(document: object) -> str:
    """Return why a document cannot come from `save`, or ""."""
    if not isinstance(document, dict) or document.get("kind") != KIND:
        return f'expected an object with "kind": "{KIND}"'
    expected = {"kind": str, "system": str, "params": dict, "turns": list}
    if wrong := _unlike(document, expected):
        return wrong
    for name in document["params"]:
        if wrong := why_not_settable(name):
            return f"params: {wrong}"
    for number, turn in enumerate(document["turns"], 1):
        if not isinstance(turn, dict):
            return f"turn {number} is not an object"
        if wrong := _unlike({"cut": False} | turn, {"question": str, "answer": str, "cut": bool}):
            return f"turn {number}: {wrong}"
    return ""


def _unlike(document: Mapping[str, object], expected: Mapping[str, type]) -> str:
    for name, kind in expected.items():
        if name not in document:
            return f"`{name}` is missing"
        if not isinstance(document[name], kind):
            return f"`{name}` should be of another type ({kind.__name__})"
    unknown = sorted(document.keys() - expected.keys())
    return f"`{unknown[0]}` is unknown" if unknown else ""
