"""Calls as Qwen3-Coder writes them: `<tool_call><function=F><parameter=KEY>VALUE</parameter></function></tool_call>`.

Values are plain text. The tool's schema says which of them become strings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from web.wire.markup.json_text import parsed
from web.wire.markup.pythonic import literal, quoted
from web.wire.markup.source import Sink, Source, Steps, Tool

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
FUNCTION: Final = "<function="
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
MOST_SCHEMAS: Final = 64
"""Most schemas that are looked at for the type of one parameter."""


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
    def _parameters(source: Source, sink: Sink, tool: Tool | None) -> Steps[None]:
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
            member = f"{before}{quoted(key)}: "
            before = ", "
            yield from source.skip("\n")
            types = _types_of(key, tool)
            if types == {"string"}:
                sink.arguments(member + '"')
                yield from _text(source, sink)
            else:
                value = yield from source.until(PARAMETER_END)
                if value is None:
                    source.at = len(source.text)
                    return
                sink.arguments(member + _as_json(value.removesuffix("\n"), types))


def _name(source: Source) -> Steps[str]:
    """Read a name and the bracket behind it; "" if there is none in this line."""
    start = source.at
    while (char := (yield from source.peek())) not in ("", ">", "\n", "<"):
        source.at += 1
    if char != ">":
        return ""
    source.at += 1
    return source.text[start : source.at - 1].strip()


def _text(source: Source, sink: Sink) -> Steps[None]:
    """Read the rest of a value that is a string, and pass it on as it comes."""
    end = "\n" + PARAMETER_END
    while True:
        place = source.text.find(PARAMETER_END, source.at)
        if place >= 0:
            told = source.text[source.at : place].removesuffix("\n")
            source.at = place + len(PARAMETER_END)
            sink.arguments(quoted(told)[1:-1] + '"')
            return
        rest = source.text[source.at :]
        held = next((n for n in range(min(len(end), len(rest)), 0, -1) if _may_end(rest[-n:], end)), 0)
        source.at = len(source.text) - held
        sink.arguments(quoted(rest[: len(rest) - held])[1:-1])
        if source.over:
            source.ran_out = True
            return
        yield


def _may_end(text: str, end: str) -> bool:
    """Say whether *text* may become the end of a value."""
    return end.startswith(text) or end[1:].startswith(text)


def _as_json(value: str, types: set[str]) -> str:
    """Return the JSON of a value that may have one of *types*; none: any."""
    told = value.strip()
    is_json = parsed(told) is not None or told == "null"
    if is_json and ("string" not in types or (told == "null" and "null" in types)):
        return told
    other = literal(told)
    return quoted(value) if "string" in types or other[:1] == '"' else other


def _types_of(key: str, tool: Tool | None) -> set[str]:
    """Return the types that a parameter may have; none: any. One that the tool does not have is a string."""
    if tool is None or key not in tool.properties:
        return {"string"}
    types, waiting, seen = set[str](), [tool.properties[key]], 0
    while waiting and seen < MOST_SCHEMAS:
        schema = waiting.pop()
        seen += 1
        if isinstance(schema, dict):
            types |= _own_types(schema)
            waiting += _alternatives(schema, tool.definitions)
    return types


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema says itself. A client can write anything into it."""
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    is_text = isinstance(values, list) and values and all(isinstance(value, str) for value in values)
    return {"string"} if is_text else set()


def _alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[object]:
    """Yield the schemas that a schema names or holds instead of a type."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield definitions.get(reference.rpartition("/")[2])
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(name)
        yield from alternatives[:MOST_SCHEMAS] if isinstance(alternatives, list) else ()
