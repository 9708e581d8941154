"""Answers as gpt-oss writes them (OpenAI's harmony): a row of messages, each behind a header that names its channel.

`<|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..<|return|>`. A call has a
recipient: ` to=functions.F<|channel|>commentary json<|message|>{..}<|call|>`, or it stands behind `commentary`.
"""

from __future__ import annotations

import re
from typing import Final

from web.wire.markup.json_text import arguments
from web.wire.markup.source import Sink, Source, Steps

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT: Final = "to="
LONGEST_HEADER: Final = 256
_RECIPIENT: Final = re.compile(rf"\b{RECIPIENT}(functions\.)?([^\s<]+)")
_THINKS: Final = re.compile(r"<\|channel\|>\s*analysis\b")


class Harmony:
    """Text before a first header is content: the prompt may end inside a message. Missing end markers are forgiven.

    A message to somebody else than a tool of the client is content, or reasoning.
    """

    markers = (START, CHANNEL, MESSAGE, *ENDS)
    bare = RECIPIENT[0]

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        if marker in ENDS:  # a text may quote one
            yield from source.space()
            return (yield from source.peek()) in ("", "<")
        if marker == self.bare and not (yield from source.skip(RECIPIENT)):
            return False
        before = source.text[: source.at]
        header, is_whole = ("", True) if marker == MESSAGE else (yield from _header(source))
        named = _RECIPIENT.search(before + header)
        is_named = is_whole or (source.cut and source.ran_out and named is not None and not header.endswith(named[2]))
        if named is not None and is_named and sink.allows(named[2], bare=not named[1]):
            sink.begin(named[2])
            yield from source.space()
            yield from arguments(source, sink.arguments, stop="<|")
            return True
        if is_whole:
            sink.message(thinks=_THINKS.search(before + header) is not None)
        return is_whole


def _header(source: Source) -> Steps[tuple[str, bool]]:
    """Read a header and what ends it; return it, and whether its end is there: else the text ended, or it is none."""
    most = LONGEST_HEADER + len(MESSAGE)
    while (place := source.text.find(MESSAGE, source.at, source.at + most)) < 0:
        if source.over or len(source.text) - source.at > most:
            source.ran_out = source.over
            header, source.at = source.text[source.at :], len(source.text) if source.cut else source.at
            return header, False
        yield
    header, source.at = source.text[source.at : place], place + len(MESSAGE)
    return header, True
