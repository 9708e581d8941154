"""Finds each `oneOf` of a JSON schema whose members exclude each other. It allows what an `anyOf` of them allows.

Two members exclude each other if they have no type in common, if their `const` or `enum` have no value in common, or if
both are objects with a property that excludes them and that one of them requires. The tag of a union counts as required
if it has a default: pydantic writes its unions like that, and reads no object without the tag.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from pipeline.grammars import OF_A_SCHEMA, OF_NAMED_SCHEMAS, OF_SCHEMAS, Path, mapped

TYPES: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})
OBJECT: Final = frozenset({"object"})
PLACES: Final = OF_A_SCHEMA | OF_SCHEMAS | OF_NAMED_SCHEMAS | {"components"}
"""Keywords with schemas that are reduced. Schemas elsewhere stay as they are, so no tag can be required there."""
MOST_CASES: Final = 64
"""Largest number of cases of one schema."""
DEEPEST: Final = 4
"""Largest depth of properties in properties that are compared."""

Part = tuple[Path, Mapping[str, Any]]
"""A schema and its place."""


def segments(reference: str) -> Path | None:
    """Return the place that a reference leads to; None: it is not a pointer into its own schema."""
    root, *steps = reference.split("/")
    if root != "#":
        return None
    return tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in steps if step)


@dataclass(slots=True)
class Unions:
    """Findings about each `oneOf`, by the place of the schema that has it."""

    exclusive: set[Path] = field(default_factory=set)
    overlapping: dict[Path, str] = field(default_factory=dict)
    """Reasons why the members of the others may overlap."""
    tags: dict[Path, set[str]] = field(default_factory=dict)
    """Properties with a default that distinguish members, by the place of the schema whose `properties` have them."""


def unions_of(root: Mapping[str, Any]) -> Unions:
    """Look at each `oneOf` in *root*."""
    reader, found = _Reader(root), Unions()

    def look(schema: Any, at: Path) -> Any:
        if isinstance(schema, dict):
            if isinstance(schema.get("oneOf"), list):
                reader.judge(at, schema, found)
            for name, value in schema.items():
                mapped(name, value, look, (*at, name))
        return schema

    look(root, ())
    return found


@dataclass(frozen=True, eq=False)
class _Case:
    """Schemas that all hold, with no references and unions left to follow."""

    parts: tuple[Part, ...]

    @functools.cached_property
    def types(self) -> frozenset[str]:
        found = TYPES
        for _, schema in self.parts:
            named = schema.get("type")
            if isinstance(named, str | list):
                names = [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]
                found &= {"number" if name == "integer" else name for name in names}
            if (values := _values(schema)) is not None:
                found &= {type_name for type_name, _ in values}
        return found

    @functools.cached_property
    def values(self) -> frozenset[tuple[str, Any]] | None:
        """Largest set of values that it allows; None: not known."""
        of_parts = [values for _, schema in self.parts if (values := _values(schema)) is not None]
        return frozenset.intersection(*of_parts) if of_parts else None

    @functools.cached_property
    def required(self) -> frozenset[str]:
        lists = [schema["required"] for _, schema in self.parts if isinstance(schema.get("required"), list)]
        return frozenset(name for names in lists for name in names if isinstance(name, str))

    def property(self, name: str) -> list[tuple[Path, Any]]:
        """Return the schemas of a property, each with its place."""
        found: list[tuple[Path, Any]] = []
        for at, schema in self.parts:
            properties = schema.get("properties")
            if isinstance(properties, dict) and name in properties:
                found.append(((*at, "properties", name), properties[name]))
            elif "additionalProperties" in schema and "patternProperties" not in schema:
                found.append(((*at, "additionalProperties"), schema["additionalProperties"]))
        return found

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of its properties."""
        return [name for _, schema in self.parts for name in _object_of(schema.get("properties"))]


@dataclass(slots=True)
class _Reader:
    root: Mapping[str, Any]
    _known: dict[Path, list[_Case]] = field(default_factory=dict)
    """Cases of a place. While they are being computed, the place may be anything."""

    def judge(self, at: Path, schema: Mapping[str, Any], found: Unions) -> None:
        """Find out whether the members of the `oneOf` of *schema* exclude each other."""
        beside = {name: value for name, value in schema.items() if name not in ("oneOf", "anyOf")}
        outer = self._followed(at, beside)
        members = [
            _product(outer, self._cases((*at, "oneOf", str(place)), one)) for place, one in enumerate(schema["oneOf"])
        ]
        objects = [
            place for place, cases in enumerate(members) if cases and all(case.types <= OBJECT for case in cases)
        ]
        valued = [place for place, cases in enumerate(members) if all(case.values is not None for case in cases)]
        tag = self._tag([members[place] for place in objects])
        told = {*(objects if tag else ()), *(valued if _have_own_values([members[place] for place in valued]) else ())}
        why = self._overlap(members, told)
        if why:
            found.overlapping[at] = why
            return
        found.exclusive.add(at)
        for case in (case for place in objects if tag for case in members[place]):
            place, *_ = (path for path, part in case.parts if tag in _object_of(part.get("properties")))
            if tag not in case.required:
                found.tags.setdefault(place, set()).add(tag)

    def _overlap(self, members: list[list[_Case]], told: set[int]) -> str:
        """Return why two members may overlap; empty: none do. Members in *told* exclude each other."""
        for first, second in _pairs(len(members), told):
            for one in members[first]:
                for other in members[second]:
                    if not self._excludes(one, other, 0):
                        return f"its members {first} and {second} {self._what_both_allow(one, other)}"
        return ""

    def _what_both_allow(self, one: _Case, other: _Case) -> str:
        types = one.types & other.types
        if types != OBJECT:
            return f"both allow the type {', '.join(f'`{name}`' for name in sorted(types - OBJECT or types))}"
        for name in one.names:
            ours, theirs = self._values_of(one, name), self._values_of(other, name)
            if ours and theirs and ours.isdisjoint(theirs):
                return f"both allow an object without `{name}`, which tells them apart: require it"
        return "both allow the same objects"

    def _tag(self, members: list[list[_Case]]) -> str:
        """Return the property that has different values in each of these objects; empty: there is none."""
        if len(members) < 2 or not all(members):
            return ""
        return next((name for name in members[0][0].names if self._is_tag(name, members)), "")

    def _is_tag(self, name: str, members: list[list[_Case]]) -> bool:
        seen: set[Any] = set()
        for cases in members:
            values: set[Any] = set()
            for case in cases:
                own = self._values_of(case, name)
                is_there = name in case.required or any("default" in _object_of(one) for _, one in case.property(name))
                if not own or not is_there:
                    return False
                values |= own
            if seen & values:
                return False
            seen |= values
        return True

    def _values_of(self, case: _Case, name: str) -> frozenset[Any] | None:
        """Return the largest set of values of a property; None: not known, or it is not one of `properties`."""
        if name not in case.names:
            return None
        cases = self._cases_of_all(case.property(name))
        of_cases = [one.values for one in cases]
        return frozenset[Any]().union(*(values for values in of_cases if values)) if None not in of_cases else None

    def _excludes(self, one: _Case, other: _Case, depth: int) -> bool:
        types = one.types & other.types
        if not types or (one.values is not None and other.values is not None and one.values.isdisjoint(other.values)):
            return True
        if types != OBJECT or depth == DEEPEST:
            return False
        for name in one.required | other.required:
            ours, theirs = self._cases_of_all(one.property(name)), self._cases_of_all(other.property(name))
            if all(self._excludes(mine, its, depth + 1) for mine in ours for its in theirs):
                return True
        return False

    def _cases_of_all(self, schemas: list[tuple[Path, Any]]) -> list[_Case]:
        """Return the cases of a value for which all *schemas* hold."""
        found = [_Case(())]
        for at, schema in schemas:
            found = _product(found, self._cases(at, schema))
        return found

    def _cases(self, at: Path, schema: Any) -> list[_Case]:
        """Return the cases of a schema: for each value that it allows, at least one of them holds."""
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [_Case(())]
        if at not in self._known:
            self._known[at] = [_Case(())]
            self._known[at] = self._followed(at, schema)
        return self._known[at]

    def _followed(self, at: Path, schema: Mapping[str, Any]) -> list[_Case]:
        found = [_Case(((at, schema),))]
        if isinstance(reference := schema.get("$ref"), str):
            found = _product(found, self._target(reference))
        for place, one in enumerate(_list_of(schema.get("allOf"))):
            found = _product(found, self._cases((*at, "allOf", str(place)), one))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                members = enumerate(_list_of(schema[name]))
                cases = [case for place, one in members for case in self._cases((*at, name, str(place)), one)]
                found = _product(found, cases)
        return found

    def _target(self, reference: str) -> list[_Case]:
        at = segments(reference)
        if at and at[0] not in PLACES:
            return [_Case(())]
        found: Any = self.root
        for step in at or ():
            found = found.get(step) if isinstance(found, dict) else None
        return self._cases(at, found) if at is not None and isinstance(found, dict) else [_Case(())]


def _product(some: list[_Case], others: list[_Case]) -> list[_Case]:
    """Return the cases in which one of *some* and one of the *others* hold. If they are too many, return *some*."""
    if len(some) * len(others) > MOST_CASES:
        return some
    return [_Case(one.parts + other.parts) for one in some for other in others]


def _pairs(num: int, told: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of members to compare."""
    for one in (place for place in range(num) if place not in told):
        for other in range(num):
            if one < other or other in told:
                yield min(one, other), max(one, other)


def _have_own_values(members: list[list[_Case]]) -> bool:
    """Return whether no two of these members have a value in common."""
    values = [frozenset[Any]().union(*(case.values or () for case in cases)) for cases in members]
    return sum(map(len, values)) == len(frozenset[Any]().union(*values))


def _values(schema: Mapping[str, Any]) -> frozenset[tuple[str, Any]] | None:
    """Return the values of `const` or `enum`, each with its type; None: there is neither, or one is not a scalar."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    return frozenset((_type_of(value), value) for value in values)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
    return "number"  # Python compares 1 and 1.0 as JSON Schema does


def _object_of(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
