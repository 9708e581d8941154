"""Calls as Mistral writes them, in both spellings.

Older models write `[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`, newer ones `[TOOL_CALLS]name[ARGS]{..}`.
"""

from __future__ import annotations

import re
from typing import Final

from web.wire.markup.json_text import called, skim
from web.wire.markup.source import Sink, Source, Steps

BEGIN: Final = "[TOOL_CALLS]"
ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"
_IN_NAME: Final = re.compile(r"[\w.:/-]")


class Mistral:
    """A list has one marker, a call by name has one of its own."""

    markers = (BEGIN,)
    bare = ""

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        match (yield from source.peek()):
            case "[":
                return (yield from self._list(source, sink))
            case "{":
                return (yield from called(source, sink, stop=BEGIN))
            case _:
                return (yield from self._named(source, sink))

    @staticmethod
    def _list(source: Source, sink: Sink) -> Steps[bool]:
        source.at += 1
        yield from source.space()
        if not (yield from called(source, sink, stop=BEGIN)):
            return False
        while True:
            yield from source.space()
            end = source.at
            if (yield from source.skip("]")):
                return True
            is_joined = yield from source.skip(",")
            yield from source.space()
            if not is_joined or not (yield from called(source, sink, stop=BEGIN)):
                source.at = end
                return True

    @staticmethod
    def _named(source: Source, sink: Sink) -> Steps[bool]:
        name = yield from word(source)
        if has_id := (yield from source.skip(ID)):  # the model's own id is not sent: ours come from the uid
            yield from word(source)
        if has_arguments := (yield from source.skip(ARGUMENTS)):
            yield from source.space()
        if not name or not sink.allows(name):
            return False
        is_cut = not (yield from source.need(1)) and source.cut and (has_id or has_arguments)
        if not is_cut and (yield from source.peek()) != "{":
            return False
        sink.begin(name)
        yield from skim(source, sink.arguments, stop=BEGIN)
        return True


def word(source: Source) -> Steps[str]:
    """Read a name or an id."""
    start = source.at
    while _IN_NAME.match((yield from source.peek())):
        source.at += 1
    return source.text[start : source.at]
