"""Calls as Llama 3 writes them: an answer that is `{"name": .., "parameters": {..}}`, or several joined by `;`."""

from __future__ import annotations

from typing import Final

from web.wire.markup.json_text import called
from web.wire.markup.source import Sink, Source, Steps

TAG: Final = "<|python_tag|>"


class Llama3Json:
    """Only an answer that begins with the JSON of a call, or a tag before one, makes calls."""

    markers = (TAG,)
    bare = "{"

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        if not (yield from called(source, sink, bare=marker != TAG)):
            return False
        while True:
            end = source.at
            yield from source.space()
            is_joined = yield from source.skip(";")
            yield from source.space()
            if not is_joined or not (yield from called(source, sink, bare=marker != TAG)):
                source.at = end
                return True
