"""Calls as Qwen3-Coder writes them: `<tool_call><function=F><parameter=KEY>VALUE</parameter></function></tool_call>`.

Values are plain text. The tool's schema says which of them become strings.
"""

from __future__ import annotations

from typing import Final

from web.wire.markup.pythonic import quoted
from web.wire.markup.source import Sink, Source, Steps, ToolParameters
from web.wire.markup.typed_text import member, types_of

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
FUNCTION: Final = "<function="
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"


class Qwen3Coder:
    """A missing `<tool_call>` and a missing end marker are forgiven."""

    markers = (BEGIN, FUNCTION)
    bare = ""

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        if marker == BEGIN and not (yield from source.skip(FUNCTION)):
            return False
        name = yield from _name(source)
        if not name or not sink.allows(name, bare=marker != BEGIN):
            return False
        sink.begin(name)
        yield from self._parameters(source, sink, sink.tools.get(name))
        for end in ("</function>", END):
            yield from source.space()
            yield from source.skip(end)
        return True

    @staticmethod
    def _parameters(source: Source, sink: Sink, tool: ToolParameters | None) -> Steps[None]:
        before = "{"
        while True:
            yield from source.space()
            if not (yield from source.skip(PARAMETER)):
                if not source.ran_out:  # else the answer ended within the call
                    sink.arguments("{}" if before == "{" else "}")
                return
            key = yield from _name(source)
            if not key:
                return
            yield from source.skip("\n")
            ended = yield from member(
                source, sink, f"{before}{quoted(key)}: ", types_of(key, tool), PARAMETER_END, gap="\n"
            )
            if not ended:
                return
            before = ", "


def _name(source: Source) -> Steps[str]:
    """Read a name and the bracket behind it; "" if there is none in this line."""
    start = source.at
    while (char := (yield from source.peek())) not in ("", ">", "\n", "<"):
        source.at += 1
    if char != ">":
        return ""
    source.at += 1
    return source.text[start : source.at - 1].strip()
