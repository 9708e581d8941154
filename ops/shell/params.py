"""The fields of a request that a user sets: `temperature=0.2 max_tokens=64 stop=["a b"]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.errors import MiniSGLError

OWN: Final[Mapping[str, str]] = {
    "model": "use /model NAME",
    "messages": "the conversation fills it",
    "stream": "the shell always asks for a stream",
    "stream_options": "the shell always asks for the token counts",
    "n": "the shell shows one answer",
}
"""Fields that the shell sets itself, and the reason."""

_NAME: Final = re.compile(r"([^\s=]+)=")
_WORD: Final = re.compile(r"\S*")
_SPACE: Final = re.compile(r"\s*")


class NotSet(MiniSGLError):
    """The text does not set a field."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Fields to set and fields to unset."""

    values: Mapping[str, Any]
    taken_back: tuple[str, ...]


def why_not_settable(name: str, own: Mapping[str, str] = OWN) -> str:
    """Return the reason why the field *name* cannot be set, or "". *own*: the fields that the command sets itself."""
    return f"{name} cannot be set: {own[name]}" if name in own else ""


def read_settings(text: str, own: Mapping[str, str] = OWN) -> Settings:
    """Parse `name=value ..`: a value is JSON, or else the text up to the next space; no value unsets the field.

    Raises:
        NotSet: The text has another form, or the command sets the field itself (*own*).
    """
    values: dict[str, Any] = {}
    taken_back: list[str] = []
    position = _SPACE.match(text).end()  # type: ignore[union-attr]  # it matches everywhere
    while position < len(text):
        named = _NAME.match(text, position)
        if named is None:
            seen = _WORD.match(text, position)[0]  # type: ignore[index]  # as above
            raise NotSet(f"{seen}: expected NAME=VALUE, say temperature=0.2; a text with spaces goes in double quotes")
        name = named[1]
        if wrong := why_not_settable(name, own):
            raise NotSet(wrong)
        value, end = _value(text, named.end())
        if end == named.end():
            taken_back.append(name)
            values.pop(name, None)
        else:
            values[name] = value
        position = _SPACE.match(text, end).end()  # type: ignore[union-attr]  # as above
    return Settings(values, tuple(name for name in taken_back if name not in values))


def _value(text: str, start: int) -> tuple[Any, int]:
    """Return the value at *start*, and its end."""
    try:
        value, end = json.JSONDecoder(parse_constant=no_constant).raw_decode(text, start)
        if end == len(text) or text[end].isspace():
            return value, end
    except (ValueError, RecursionError):
        pass  # not JSON: a text
    word = _WORD.match(text, start)
    assert word is not None
    return word[0], word.end()


def no_constant(text: str) -> float:
    """Refuse NaN and Infinity, which Python's json takes."""
    raise ValueError(f"{text} is not JSON")
