"""Calls as DeepSeek writes them, in both spellings.

R1 and V3 write the type, the name, and JSON in a fence: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>F` and the lines
"```json", `{..}` and "```". V3.1 writes `<｜tool▁call▁begin｜>F<｜tool▁sep｜>{..}`.
"""

from __future__ import annotations

from typing import Final

from web.wire.markup.json_text import arguments
from web.wire.markup.mistral import word
from web.wire.markup.source import Sink, Source, Steps

CALLS: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
BEGIN: Final = "<｜tool▁call▁begin｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
END: Final = "<｜tool▁call▁end｜>"
TYPE: Final = "function"
FENCE: Final = "```"


class DeepSeek:
    """A missing `<｜tool▁calls▁begin｜>` and missing end markers are forgiven."""

    markers = (CALLS, BEGIN)
    bare = ""

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        if marker == CALLS and not (yield from source.skip(BEGIN)):
            return False
        if not (yield from self._call(source, sink)):
            return False
        while True:
            yield from source.space()
            end = source.at
            if (yield from source.skip(CALLS_END)):
                return True
            if not (yield from source.skip(BEGIN)) or not (yield from self._call(source, sink)):
                source.at = end
                return True

    @staticmethod
    def _call(source: Source, sink: Sink) -> Steps[bool]:
        yield from source.space()
        name, stop = (yield from word(source)), END
        is_named = yield from source.need(1)
        if (yield from source.skip(SEPARATOR)) and (yield from source.peek()) != "{" and name == TYPE:
            name = yield from word(source)
            is_named = yield from source.need(1)
            yield from source.space()
            stop = FENCE if (yield from source.skip(f"{FENCE}json")) else END
        elif name == TYPE:
            is_named = False
        yield from source.space()
        is_cut = is_named and source.cut and source.ran_out
        if not name or not sink.allows(name) or not (is_cut or (yield from source.peek()) == "{"):
            return False
        sink.begin(name)
        if is_cut:
            return True
        yield from arguments(source, sink.arguments, stop=stop)
        for end in (FENCE, END):
            yield from source.space()
            yield from source.skip(end)
        return True
