"""Calls as Llama 4, LFM2 and others write them: a Python list of calls, `[f(a=1, b="x"), g()]`.

MiniCPM writes each in a line of its own, between the lines "```python" and "```".
"""

from __future__ import annotations

import itertools
import re
from typing import Final

import orjson

from web.wire.markup.json_text import parsed
from web.wire.markup.mistral import word
from web.wire.markup.source import Sink, Source, Steps

_KEYWORD: Final = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)\s*")
_TOKEN: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|[^'"A-Za-z_]""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_WORDS: Final = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}


class Pythonic:
    """Only calls of known tools are calls: behind a marker or, with `bare`, at the start of an answer.

    A value that is no Python literal becomes a string with the text that the model wrote. A missing end is forgiven.
    """

    def __init__(self, begin: str, end: str, bare: str, fence: str = "") -> None:
        self.markers = (begin,)
        self.bare = bare
        self._end = end
        self._fence = fence
        self._close, self._between = (fence, "") if fence else ("]", ",")

    def read(self, source: Source, sink: Sink, marker: str) -> Steps[bool]:
        """As Family.read."""
        yield from source.space()
        if self._fence:
            yield from source.skip(f"{self._fence}python")
        elif not (yield from source.skip("[")):
            return False
        if not (yield from self._call(source, sink)):
            return False
        while True:
            yield from source.space()
            end = source.at
            is_closed = yield from source.skip(self._close)
            yield from source.space()
            if (yield from source.skip(self._end)) or is_closed:
                return True
            if not (yield from source.skip(self._between)) or not (yield from self._call(source, sink)):
                source.at = end
                return True

    @staticmethod
    def _call(source: Source, sink: Sink) -> Steps[bool]:
        yield from source.space()
        name = yield from word(source)
        yield from source.space()
        if not name or not (yield from source.skip("(")) or not sink.allows(name, bare=True):
            return False
        sink.begin(name)
        names = [*sink.tools[name].properties] if name in sink.tools else []
        before = "{"
        for index in itertools.count():
            written, end = yield from _argument(source)
            if not end:  # the answer ended within the call
                return True
            if written.strip():
                sink.arguments(before + _member(written, names, index))
                before = ", "
            if end == ")":
                sink.arguments("{}" if before == "{" else "}")
                return True
        raise AssertionError("a count has no end")


def _argument(source: Source) -> Steps[tuple[str, str]]:
    """Read an argument and the comma or the parenthesis behind it; return both. At the end of the text: no end."""
    start, depth, quote = source.at, 0, ""
    while char := (yield from source.peek()):
        source.at += 1
        if quote:
            if char == "\\" and (yield from source.need(1)):
                source.at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif depth == 0 and char in ",)":
            return source.text[start : source.at - 1], char
        else:
            depth += (char in "([{") - (char in ")]}")
    return source.text[start : source.at], ""


def _member(written: str, names: list[str], index: int) -> str:
    """Return the JSON member of an argument. One without a keyword has the name of the tool's parameter there."""
    keyword = _KEYWORD.match(written)
    name = keyword[1] if keyword else names[index] if index < len(names) else str(index)
    return f"{quoted(name)}: {literal(written[keyword.end() if keyword else 0 :].strip())}"


def literal(written: str) -> str:
    """Return the JSON of a Python literal; of anything else, the JSON of its text."""
    pieces: list[str] = []
    place = 0
    while found := _TOKEN.match(written, place):
        place, token = found.end(), found[0]
        if token[0] in "'\"":
            pieces.append(quoted(_ESCAPE.sub(_unescaped, token[1:-1])))
        else:
            pieces.append(_WORDS.get(token, token))
    joined = "".join(pieces)
    if place < len(written) or (parsed(joined) is None and joined != "null"):
        return quoted(written)
    return joined


def quoted(text: str) -> str:
    """Return *text* as a JSON string."""
    return orjson.dumps(text).decode()


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character that an escape stands for; the escape itself, if it stands for none."""
    body = escape[1]
    if body[0] in "xuU" and len(body) > 1:
        code = int(body[1:], 16)
    elif body[0] in "01234567":
        code = int(body, 8)
    else:
        return _ESCAPES.get(body, body if body in "\\'\"" else escape[0])
    return escape[0] if code > 0x10FFFF or 0xD800 <= code < 0xE000 else chr(code)
