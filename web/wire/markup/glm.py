"""Calls as GLM 4.5 and later write them: `<tool_call>F<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Values are plain text. Between tags there may be line breaks.
"""

from __future__ import annotations

from typing import Final

from web.wire.markup.mistral import word
from web.wire.markup.pythonic import quoted
from web.wire.markup.source import Sink, Source, Steps, ToolParameters
from web.wire.markup.typed_text import member, types_of

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
KEY: Final = "<arg_key>"
KEY_END: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
VALUE_END: Final = "</arg_value>"


class Glm:
    """A name counts only if the first argument or the end marker follows. A later missing end marker is forgiven."""

    markers = (BEGIN,)
    bare = ""

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        name = yield from word(source)
        is_named = yield from source.need(1)
        yield from source.space()
        has_key = yield from source.skip(KEY)
        is_over = not has_key and (yield from source.skip(END))
        is_cut = is_named and source.cut and source.ran_out
        if not name or not sink.allows(name) or not (has_key or is_over or is_cut):
            return False
        sink.begin(name)
        if is_over:
            sink.arguments("{}")
        elif has_key:
            yield from self._arguments(source, sink, sink.tools.get(name))
        return True

    @staticmethod
    def _arguments(source: Source, sink: Sink, tool: ToolParameters | None) -> Steps[None]:
        before = "{"
        while True:
            key = yield from source.until(KEY_END)
            if key is None:
                source.at = len(source.text)
                return
            yield from source.space()
            if not (yield from source.skip(VALUE)):
                return
            opening = f"{before}{quoted(key.strip())}: "
            if not (yield from member(source, sink, opening, types_of(key.strip(), tool), VALUE_END)):
                return
            before = ", "
            yield from source.space()
            if not (yield from source.skip(KEY)):
                break
        if not source.ran_out:
            sink.arguments("}")
        yield from source.skip(END)
