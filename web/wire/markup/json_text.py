"""Reads JSON that is not complete yet, without parsing it: clients get the text that the model wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import orjson

from web.wire.markup.source import SPACE, Sink, Source, Steps

MEMBERS: Final = ("name", "arguments", "parameters", "type", "function", "id")
"""Members that a call has. Bare JSON with another one before its arguments is not a call."""
LONGEST_ESCAPE: Final = 12
"""Characters of an escape: `\\ud83d\\ude42`, two for one character."""
_ENDS: Final = SPACE + ",]};<"
"""What ends a number, `true`, `false` or `null`."""


def parsed(text: str) -> object:
    """Return what a JSON text holds; None if it is not valid."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def skim(source: Source, tell: Callable[[str], None], *, stop: str = "") -> Steps[None]:
    """Read one value, complete or not; *tell* is called with pieces of its text.

    *stop*, outside of strings, ends a value that is not complete.
    """
    depth, quoted, escaped = 0, False, False
    while (yield from source.need(1)):
        text, place, ended, waits = source.text, source.at, False, False
        while place < len(text) and not ended:
            char = text[place]
            if quoted:
                quoted, escaped = escaped or char != '"', char == "\\" and not escaped
                ended = not quoted and depth == 0
            elif char == '"':
                quoted = True
            elif stop and char == stop[0] and _is_here(stop, text, place):
                is_value = source.over and text[place:] == "["
                ended = text.startswith(stop, place) or (source.over and not is_value)
                waits = not ended and not source.over
                if ended or waits:
                    break
            elif char in "{[":
                depth += 1
            elif depth and char in "}]":
                depth -= 1
                ended = depth == 0
            elif depth == 0 and char in _ENDS:
                ended = True
                break
            place += 1
        piece, source.at = text[source.at : place], place
        if piece:
            tell(piece)
        if ended:
            return
        if waits:
            yield


def _is_here(word: str, text: str, place: int) -> bool:
    """Return whether *word*, or its beginning up to the end of *text*, is at *place*."""
    return word.startswith(text[place : place + len(word)])


def string(source: Source) -> Steps[str | None]:
    """Read a string; return its content. None: the next value is not a valid string."""
    if (yield from source.peek()) != '"':
        return None
    pieces: list[str] = []
    yield from skim(source, pieces.append)
    found = parsed("".join(pieces))
    return found if isinstance(found, str) else None


def called(source: Source, sink: Sink, *, stop: str = "", bare: bool = False) -> Steps[bool]:
    """Read an object with the name and the arguments of a call. Return whether it is one.

    Arguments that are a string are the JSON in it. A call without arguments has an empty object.
    """
    if not (yield from source.skip("{")):
        return False
    name, held, has_arguments, begun = "", list[str](), False, False
    while True:
        key = yield from _key(source)
        if key is None:
            return (yield from _end(source, sink, name, begun=begun, bare=bare))
        if bare and not begun and key not in MEMBERS:
            return False
        if key == "name" and not name:
            name = (yield from string(source)) or ""
            if not name or not sink.allows(name, bare=bare):
                return False
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            if name:
                begun = True
                sink.begin(name)
            yield from arguments(source, sink.arguments if begun else held.append, stop=stop)
        else:
            yield from skim(source, _nothing, stop=stop)
        if name and has_arguments and not begun:
            begun = True
            sink.begin(name)
            sink.arguments("".join(held))
        yield from source.space()
        if not (yield from source.skip(",")):
            return (yield from _end(source, sink, name, begun=begun, bare=bare))


def _end(source: Source, sink: Sink, name: str, *, begun: bool, bare: bool) -> Steps[bool]:
    """Read the end of an object. Return whether it was a call. A call without arguments begins here."""
    is_whole = yield from source.skip("}")
    if begun or not name:
        return begun
    if is_whole and not bare:
        sink.begin(name)
        sink.arguments("{}")
        return True
    if not is_whole and source.cut and source.ran_out:
        sink.begin(name)
        return True
    return False


def _key(source: Source) -> Steps[str | None]:
    """Read the name of a member, and its colon."""
    yield from source.space()
    key = yield from string(source)
    yield from source.space()
    if key is None or not (yield from source.skip(":")):
        return None
    yield from source.space()
    return key


def arguments(source: Source, tell: Callable[[str], None], *, stop: str = "") -> Steps[None]:
    """Read arguments; *tell* is called with pieces of them. If the answer ends before them, there are none."""
    if (yield from source.peek()) in ("{", "["):
        yield from skim(source, tell, stop=stop)
        return
    pieces: list[str] = []
    yield from skim(source, pieces.append, stop=stop)
    written = "".join(pieces)
    if not written and source.ran_out:
        return
    if source.ran_out and written[0] == '"':
        tell(_cut_string(written))
        return
    within = parsed(written)
    tell(within if isinstance(within, str) and within else "{}" if written in ("", "null", '""') else written)


def _cut_string(written: str) -> str:
    """Return the content of a string that has no end, without an incomplete escape."""
    for end in range(len(written), max(len(written) - LONGEST_ESCAPE, 0), -1):
        found = parsed(f'{written[:end]}"')
        if isinstance(found, str):
            return found
    return ""


def _nothing(text: str) -> None: ...
