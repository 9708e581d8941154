"""Reduces a JSON schema to the keywords that bind a value, and finds where it has one that cannot be enforced.

Everything else is left out: descriptions and other remarks, unknown keywords (JSON Schema ignores them), forms such as
`uniqueItems: false`, unknown formats, definitions that nothing refers to, and numbers that a grammar cannot count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.grammars import COUNTS, OF_A_SCHEMA, OF_NAMED_SCHEMAS, OF_SCHEMAS, Path, is_countable, mapped
from stages.tokenize.constraints.exclusive import Unions, segments, unions_of

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of texts that llguidance checks."""
DEFINITIONS: Final = frozenset({"$defs", "definitions"})
BINDING: Final = frozenset(
    {"$anchor", "$dynamicRef", "$id", "$recursiveRef", "$ref", "$schema", "id"}
    | {"const", "enum", "type", "format", "pattern", "multipleOf", "required", "uniqueItems"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minContains", "maxContains", "dependentRequired"}
    | (COUNTS | OF_A_SCHEMA | OF_SCHEMAS | OF_NAMED_SCHEMAS) - {"contentSchema"}
)
"""Keywords that bind a value or define what others mean. JSON Schema ignores all others, or calls them annotations."""


def reduced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that allows the same values and has only keywords that bind values."""
    references = [segments(reference) for reference in references_of(schema)]
    names = None if None in references else frozenset(step for place in references if place for step in place)
    reducer = _Reducer(unions_of(schema), names)
    found: dict[str, Any] = reducer.reduce(dict(schema), ())
    return found


def references_of(value: Any) -> Iterator[str]:
    """Yield the references of a schema."""
    for name, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if name == "$ref" and isinstance(one, str):
            yield one
        else:
            yield from references_of(one)


def place_of(schema: Any, names: Collection[str]) -> str:
    """Return the first place of a schema that has all these keywords; empty: its root."""
    found: list[Path] = []

    def look(one: Any, at: Path) -> None:
        if isinstance(one, dict) and not found:
            if all(name in one for name in names):
                found.append(at)
            for name, value in one.items():
                mapped(name, value, look, (*at, name))

    look(schema, ())
    return ".".join(found[0]) if found else ""


def why_overlapping(schema: Mapping[str, Any]) -> str:
    """Return where a `oneOf` has members that may overlap, and why; empty: there is none."""
    at, why = next(iter(unions_of(schema).overlapping.items()), ((), ""))
    return why and f"`{'.'.join((*at, 'oneOf'))}`: {why}"


@dataclass(frozen=True, slots=True)
class _Reducer:
    unions: Unions
    referred: frozenset[str] | None
    """All steps of all references; None: a reference may lead to any definition."""

    def reduce(self, schema: Any, at: Path) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            if not self._is_kept(name, value):
                continue
            if name in DEFINITIONS and isinstance(value, dict):
                value = {key: one for key, one in value.items() if self._is_referred(key)}
            if name in COUNTS and isinstance(value, float) and value.is_integer():
                value = int(value)
            if name == "components" and isinstance(value, dict):  # OpenAPI's place of definitions
                kept[name] = {key: self._components(one, (*at, name, key)) for key, one in value.items()}
                continue
            kept[name] = mapped(name, value, self.reduce, (*at, name))
        _drop_idle(kept)
        _name_properties(kept)
        if at in self.unions.exclusive:
            kept = _with_any_of(kept)
        if tags := sorted(self.unions.tags.get(at, set())):
            kept["required"] = [*kept.get("required", []), *tags]
        return kept

    def _is_kept(self, name: str, value: Any) -> bool:
        if name == "format":
            return not isinstance(value, str) or value in FORMATS
        if name in BINDING:
            return is_countable(name, value)
        return name in (self.referred or ())

    def _is_referred(self, name: str) -> bool:
        return self.referred is None or name in self.referred

    def _components(self, value: Any, at: Path) -> Any:
        if at[-1] != "schemas" or not isinstance(value, dict):
            return value
        return {key: self.reduce(one, (*at, key)) for key, one in value.items() if self._is_referred(key)}


def _drop_idle(kept: dict[str, Any]) -> None:
    """Drop the keywords that allow everything in the form that they have."""
    for name in ("unevaluatedItems", "unevaluatedProperties", "then", "else"):
        if kept.get(name) in (True, {}):
            del kept[name]
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        if name in kept and isinstance(kept[name], dict) and all(one in (True, {}, []) for one in kept[name].values()):
            del kept[name]
    for name in ("uniqueItems", "not"):
        if kept.get(name) is False:
            del kept[name]
    if "propertyNames" in kept and _allows_each_text(kept["propertyNames"]):
        del kept["propertyNames"]
    if "if" not in kept or not {"then", "else"} & set(kept):
        _drop(kept, "if", "then", "else")
    if "contains" not in kept or (_is(kept.get("minContains"), 0) and "maxContains" not in kept):
        _drop(kept, "contains", "minContains", "maxContains")


def _drop(kept: dict[str, Any], *names: str) -> None:
    for name in names:
        kept.pop(name, None)


def _is(value: Any, number: int) -> bool:
    return value == number and not isinstance(value, bool)


def _allows_each_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    types = schema.get("type", "string")
    idle = all(name in ("type", "$schema") or (name == "minLength" and _is(one, 0)) for name, one in schema.items())
    return idle and (types == "string" or (isinstance(types, list) and "string" in types))


def _name_properties(kept: dict[str, Any]) -> None:
    """Write `propertyNames` (names, a pattern, or lengths) as `properties` or `patternProperties`."""
    names, others = kept.get("propertyNames"), kept.get("additionalProperties", True)
    if not isinstance(names, dict) or others is False or {"properties", "patternProperties"} & set(kept):
        return
    told = {name: value for name, value in names.items() if (name, value) != ("type", "string")}
    match told:
        case {"enum": list(listed), **more} if not more:
            named = {"properties": {name: others for name in listed if isinstance(name, str)}}
        case {"const": str(name), **more} if not more:
            named = {"properties": {name: others}}
        case {"pattern": str(pattern), **more} if not more:
            named = {"patternProperties": {pattern: others}}
        case _ if told.keys() <= {"minLength", "maxLength"} and all(map(_is_length, told.values())):
            lengths = f"{told.get('minLength', 0)},{told.get('maxLength', '')}"
            named = {"patternProperties": {f"^(?s:.){{{lengths}}}$": others}}
        case _:
            return
    del kept["propertyNames"]
    kept.update(named, additionalProperties=False)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _with_any_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with its `oneOf` as an `anyOf`. If it already has an `anyOf`, both must hold."""
    if "anyOf" not in schema:
        return {"anyOf" if name == "oneOf" else name: value for name, value in schema.items()}
    others = {name: value for name, value in schema.items() if name != "oneOf"}
    listed = others.get("allOf", [])
    return others | {"allOf": [*(listed if isinstance(listed, list) else []), {"anyOf": schema["oneOf"]}]}
