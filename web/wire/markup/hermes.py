"""Calls as Hermes and Qwen write them: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`."""

from __future__ import annotations

from typing import Final

from web.wire.markup.json_text import called
from web.wire.markup.source import Sink, Source, Steps

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


class Hermes:
    """A call is one JSON object between two markers. A missing end marker is forgiven."""

    markers = (BEGIN,)
    bare = ""

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        if not (yield from called(source, sink, stop=END)):
            return False
        yield from source.space()
        yield from source.skip(END)
        return True
