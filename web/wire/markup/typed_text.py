"""Values that models write as plain text between two tags. The tool's schema says which of them become strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from web.wire.markup.json_text import parsed
from web.wire.markup.pythonic import literal, quoted
from web.wire.markup.source import Sink, Source, Steps, ToolParameters

MOST_SCHEMAS: Final = 64
"""Most schemas that are looked at for the type of one parameter."""


def member(source: Source, sink: Sink, before: str, types: set[str], end: str, *, gap: str = "") -> Steps[bool]:
    """Read a value of *types* and its *end*, and pass it on after *before*. Return whether the end came.

    A *gap* before the end is not part of the value. Strings are passed on as they come.
    """
    if types == {"string"}:
        sink.arguments(before + '"')
        return (yield from _text(source, sink, end, gap))
    value = yield from source.until(end)
    if value is None:
        source.at = len(source.text)
        return False
    sink.arguments(before + as_json(value.removesuffix(gap), types))
    return True


def _text(source: Source, sink: Sink, end: str, gap: str) -> Steps[bool]:
    """Read the rest of a value that is a string, and pass it on as it comes."""
    whole = gap + end
    while True:
        place = source.text.find(end, source.at)
        if place >= 0:
            text = source.text[source.at : place].removesuffix(gap)
            source.at = place + len(end)
            sink.arguments(quoted(text)[1:-1] + '"')
            return True
        rest = source.text[source.at :]
        ends = (rest[-n:] for n in range(min(len(whole), len(rest)), 0, -1))
        held = next((len(one) for one in ends if whole.startswith(one) or end.startswith(one)), 0)
        source.at = len(source.text) - held
        sink.arguments(quoted(rest[: len(rest) - held])[1:-1])
        if source.over:
            source.ran_out = True
            return False
        yield


def as_json(value: str, types: set[str]) -> str:
    """Return the JSON of a value whose type is one of *types*, or any if there are none."""
    stripped = value.strip()
    is_json = parsed(stripped) is not None or stripped == "null"
    if is_json and ("string" not in types or (stripped == "null" and "null" in types)):
        return stripped
    other = literal(stripped)
    return quoted(value) if "string" in types or other[:1] == '"' else other


def types_of(key: str, tool: ToolParameters | None) -> set[str]:
    """Return the types that a parameter may have; none mean any. An unknown parameter is a string."""
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
