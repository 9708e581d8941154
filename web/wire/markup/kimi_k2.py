"""Calls as Kimi K2 writes them, each with an id that has the name of its tool.

`<|tool_calls_section_begin|><|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{..}<|tool_call_end|>
<|tool_calls_section_end|>`
"""

from __future__ import annotations

import re
from typing import Final

from web.wire.markup.json_text import arguments
from web.wire.markup.mistral import word
from web.wire.markup.source import Sink, Source, Steps

SECTION: Final = "<|tool_calls_section_begin|>"
SECTION_END: Final = "<|tool_calls_section_end|>"
BEGIN: Final = "<|tool_call_begin|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
END: Final = "<|tool_call_end|>"
_ID: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d*)?")


class KimiK2:
    """A missing section and missing end markers are forgiven."""

    markers = (SECTION, BEGIN)
    bare = ""

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        if marker == SECTION and not (yield from source.skip(BEGIN)):
            return False
        if not (yield from self._call(source, sink)):
            return False
        while True:
            yield from source.space()
            end = source.at
            if (yield from source.skip(SECTION_END)):
                return True
            if not (yield from source.skip(BEGIN)) or not (yield from self._call(source, sink)):
                source.at = end
                return True

    @staticmethod
    def _call(source: Source, sink: Sink) -> Steps[bool]:
        yield from source.space()
        found = _ID.fullmatch((yield from word(source)))
        is_named = yield from source.need(1)
        yield from source.space()
        has_arguments = yield from source.skip(ARGUMENTS)
        is_cut = is_named and source.cut and source.ran_out
        if found is None or not sink.allows(found[1]) or not (has_arguments or is_cut):
            return False
        sink.begin(found[1])
        yield from source.space()
        yield from arguments(source, sink.arguments, stop=END)
        yield from source.space()
        yield from source.skip(END)
        return True
