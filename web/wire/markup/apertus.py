"""Calls as Apertus writes them: `<|tools_prefix|>[{"F": {..}}, ..]<|tools_suffix|>`."""

from __future__ import annotations

from typing import Final

from web.wire.markup.json_text import arguments, string
from web.wire.markup.source import Sink, Source, Steps

BEGIN: Final = "<|tools_prefix|>"
END: Final = "<|tools_suffix|>"


class Apertus:
    """A list of objects, each with the name of one tool. Missing ends are forgiven."""

    markers = (BEGIN,)
    bare = ""

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        if not (yield from source.skip("[")) or not (yield from self._call(source, sink)):
            return False
        while True:
            yield from source.space()
            end = source.at
            if (yield from source.skip("]")):
                yield from source.space()
                yield from source.skip(END)
                return True
            if not (yield from source.skip(",")) or not (yield from self._call(source, sink)):
                source.at = end
                yield from source.skip(END)
                return True

    @staticmethod
    def _call(source: Source, sink: Sink) -> Steps[bool]:
        yield from source.space()
        if not (yield from source.skip("{")):
            return False
        yield from source.space()
        name = yield from string(source)
        yield from source.space()
        has_arguments = yield from source.skip(":")
        is_cut = source.cut and source.ran_out
        if not name or not sink.allows(name) or not (has_arguments or is_cut):
            return False
        sink.begin(name)
        yield from source.space()
        yield from arguments(source, sink.arguments, stop=END)
        yield from source.space()
        yield from source.skip("}")
        return True
