"""Rules in Lark for values of a JSON schema that a model does not write in JSON, but in Python or as plain text.

Only what can be enforced becomes a rule. Any other keyword is refused by name, as llguidance does for JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from stages.tokenize.constraints.grammars import LARGEST_GRAMMAR_BYTES, TOO_LARGE
from stages.tokenize.constraints.schemas import references_of

FOLLOWED: Final = frozenset({"$anchor", "$defs", "$id", "$schema", "components", "definitions", "id"})
"""Keywords of a reduced schema that do not bind a value themselves."""
OF_AN_OBJECT: Final = frozenset({"type", "properties", "required", "additionalProperties"})
OF_A_TEXT: Final = frozenset({"type", "minLength", "maxLength"})
OF_A_LIST: Final = frozenset({"type", "items", "minItems", "maxItems"})
MOST_COUNTED: Final = 1000
"""Largest length of a text between tags that can be counted. For 2,000 characters, a matcher exceeds its limits."""
ANY_PYTHON: Final = """\
any_value: ANY_SCALAR | "[" (any_value (", " any_value)*)? "]" | "{" (any_entry (", " any_entry)*)? "}"
any_entry: ANY_TEXT ": " any_value
ANY_SCALAR: ANY_TEXT | /-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,15})?/ | "True" | "False" | "None"
ANY_TEXT: /"([^"\\\\\\x00-\\x1f]|\\\\["\\\\nt])*"/"""
"""Literals of Python, with texts in double quotes as in JSON."""


def quoted(text: str) -> str:
    """Return *text* as a literal in Lark."""
    return json.dumps(text)


@dataclass(slots=True)
class Rules:
    """Rules of a grammar, numbered as they are added."""

    lines: list[str] = field(default_factory=list)
    num_letters: int = 0
    """Number of letters of all rules."""
    known: dict[tuple[str, str, bool], str] = field(default_factory=dict)
    """Names of rules by their text: tools often have the same properties."""

    def add(self, body: str, *, attributes: str = "", terminal: bool = False) -> str:
        """Add a rule, unless it exists; return its name. A rule with an empty *body* is a new one, to be filled later.

        Raises:
            ValueError: The rules are too large together.
        """
        if body and (known := self.known.get((body, attributes, terminal))):
            return known
        self.num_letters += len(body)
        if self.num_letters > LARGEST_GRAMMAR_BYTES:  # many properties may refer to one large definition
            raise ValueError(TOO_LARGE)
        name = f"{'V' if terminal else 'v'}{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        self.known[body, attributes, terminal] = name
        return name


@dataclass(slots=True)
class SchemaReader:
    """The common part of both spellings: a schema that refers to parts of itself."""

    rules: Rules
    root: Mapping[str, Any]

    def followed(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema that a reference refers to, or *schema* itself."""
        seen: set[str] = set()
        while isinstance(path := schema.get("$ref"), str):
            refuse_others(schema, frozenset({"$ref"}))
            if path in seen or not path.startswith("#/"):
                raise ValueError(f"$ref {path!r} does not lead to a part of the schema")
            seen.add(path)
            found: Any = self.root
            for step in path[2:].split("/"):
                found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
            if not isinstance(found, dict):
                raise ValueError(f"$ref {path!r} does not lead to a part of the schema")
            schema = found
        return schema


def _definition(path: str) -> tuple[str, str] | None:
    """Return the place of a reference's definition, and the definition's name; None: it leads elsewhere."""
    root, place, name, *_ = (*path.split("/"), "", "")
    if root != "#" or place not in ("$defs", "definitions"):
        return None
    return place, unquote(name).replace("~1", "/").replace("~0", "~")


def refuse_others(schema: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ValueError for a keyword that is not *known* and binds values."""
    unknown = sorted(name for name in schema if name not in known and name not in FOLLOWED)
    if unknown:
        raise ValueError(f"this model does not write its calls in JSON, where `{unknown[0]}` cannot be enforced")


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return the name and the schema of each property, and whether it is required."""
    properties, required = schema.get("properties", {}), set(schema.get("required", []))
    unknown = sorted(required - set(properties))
    if unknown:
        raise ValueError(f"`{unknown[0]}` is required and has no schema in `properties`")
    if not all(isinstance(value, dict) for value in properties.values()):
        raise ValueError("a schema in `properties` is no object")
    return [(name, value, name in required) for name, value in properties.items()]


def joined(rules: Rules, items: Sequence[tuple[str, bool]], between: str = ", ") -> str:
    """Return a rule for the *items* in their order, with *between* between two. Each says whether it is required."""
    first, later = '""', '""'
    for item, is_required in reversed(items):
        begun, going_on = f"{item} {later}", f"{quoted(between)} {item} {later}"
        first = rules.add(begun if is_required else f"{begun} | {first}")
        later = rules.add(going_on if is_required else f"{going_on} | {later}")
    return first


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names; empty: any."""
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def times(least: int, most: int | None) -> str:
    """Return a repetition of a regular expression."""
    return f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"


@dataclass(slots=True)
class PythonLiterals(SchemaReader):
    """Values as Python writes them: `True`, `None`, `{"a": [1]}`."""

    named: dict[str, str] = field(default_factory=dict)
    """Rules of the schemas that are referred to; so a schema may contain itself."""

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Return the arguments of a call by name: `a=1, b="x"`."""
        return self._fields(schema, lambda name: f"{name}=")

    def value(self, schema: Mapping[str, Any]) -> str:
        """Return the name of a rule for one value.

        Raises:
            ValueError: A keyword cannot be enforced.
        """
        if "$ref" not in schema:
            return self.rules.add(self._body(schema))
        path = str(schema["$ref"])
        if path not in self.named:
            target, place = self.followed(schema), len(self.rules.lines)
            self.named[path] = self.rules.add("")  # its parts may refer to it
            self.rules.lines[place] += self._body(target)
        return self.named[path]

    def _body(self, schema: Mapping[str, Any]) -> str:
        if "anyOf" in schema:
            refuse_others(schema, frozenset({"anyOf"}))
            return " | ".join(self.value(one) for one in schema["anyOf"])
        if "enum" in schema or "const" in schema:
            refuse_others(schema, frozenset({"enum", "const", "type"}))
            return " | ".join(quoted(python_of(one)) for one in schema.get("enum", [schema.get("const")]))
        types = types_of(schema)
        if not types:
            if "properties" in schema:
                return self._object(schema)
            refuse_others(schema, frozenset())
            return "any_value"
        return " | ".join(self.rules.add(self._of_type(name, schema)) for name in types)

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        several = len(types_of(schema)) > 1  # then other keywords are about one of them
        match name:
            case "string":
                refuse_others(schema, OF_A_TEXT | (OF_A_LIST | OF_AN_OBJECT if several else frozenset()))
                count = times(schema.get("minLength", 0), schema.get("maxLength"))
                return self.rules.add(f'/"([^"\\\\\\x00-\\x1f]|\\\\["\\\\nt]){count}"/', terminal=True)
            case "integer" | "number":
                refuse_others(schema, frozenset({"type"}))
                part = "" if name == "integer" else "(\\.[0-9]{1,15})?"
                return self.rules.add(f"/-?(0|[1-9][0-9]{{0,17}}){part}/", terminal=True)
            case "boolean":
                return '"True" | "False"'
            case "null":
                return '"None"'
            case "array":
                return self._list(schema)
            case "object":
                return self._object(schema)
        raise ValueError(f"`type`: {name!r} is no type of JSON")

    def _list(self, schema: Mapping[str, Any]) -> str:
        refuse_others(schema, OF_A_LIST)
        items = schema.get("items", {})
        item = self.value(items if isinstance(items, dict) else {})
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'(", " {item}){times(max(least - 1, 0), None if most is None else most - 1)}'
        return f'"[" {item} {more} "]"' + ("" if least else ' | "[]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        if "properties" not in schema:
            refuse_others(schema, frozenset({"type", "additionalProperties"}))
            others = schema.get("additionalProperties", True)
            if others is False:
                return '"{}"'
            value = self.value(others) if isinstance(others, dict) else "any_value"
            entry = self.rules.add(f'ANY_TEXT ": " {value}')
            return f'"{{" ({entry} (", " {entry})*)? "}}"'
        return f'"{{" {self._fields(schema, lambda name: f"{python_of(name)}: ")} "}}"'

    def _fields(self, schema: Mapping[str, Any], before: Any) -> str:
        refuse_others(schema, OF_AN_OBJECT)
        items = [
            (self.rules.add(f"{quoted(before(name))} {self.value(value)}"), is_required)
            for name, value, is_required in fields_of(schema)
        ]
        return joined(self.rules, items)


def python_of(value: Any) -> str:
    """Return a value of JSON as a literal of Python."""
    match value:
        case dict():
            return "{" + ", ".join(f"{python_of(name)}: {python_of(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(python_of, value)) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)


@dataclass(slots=True)
class TaggedValues(SchemaReader):
    """Values between two tags, `<parameter=name>` and `</parameter>`: a text is as it is, anything else is JSON."""

    end: str
    """Tag after a value, with the line break before it."""
    json_of: Any
    """Function that returns the item of a rule that is JSON by a schema."""
    token: str = ""
    """Item of a rule for `end`, if that is one token; empty: it is text."""

    def value(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for one value with the tag that ends it.

        Raises:
            ValueError: A keyword cannot be enforced.
        """
        target = self.followed(schema)
        branches = [self.followed(one) for one in self._branches(target)]
        types = {name for branch in branches for name in types_of(branch) or [""]}
        if any("enum" in branch or "const" in branch for branch in branches):
            return self._one_of(target)
        if not types & {"", "string"}:
            return self.rules.add(f"{self.json_of(self.alone(schema))} {self.token or quoted(self.end)}")
        for branch in branches:
            is_text = types_of(branch) == ["string"] and len(branches) == 1
            refuse_others(branch, OF_A_TEXT if is_text else frozenset({"type"}))
        if types - {"", "string", "null", "boolean", "integer", "number"}:
            raise ValueError(
                "this model does not write its calls in JSON, where a text beside objects or lists cannot be enforced"
            )
        return self._text(target if len(branches) == 1 else {})

    def any(self) -> str:
        """Return a rule for any value with the tag that ends it."""
        return self._text({})

    def alone(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a schema with the definitions of the root that it needs.

        Raises:
            ValueError: They are too large.
        """
        found = dict(schema)
        reached: dict[tuple[str, str], Any] = {}
        num_letters, unread = 0, [found]
        while unread:
            one = unread.pop()
            num_letters += len(json.dumps(one))
            if num_letters > LARGEST_GRAMMAR_BYTES:
                raise ValueError(TOO_LARGE)
            for place, name in filter(None, map(_definition, references_of(one))):
                definitions = self.root.get(place)
                if (place, name) not in reached and isinstance(definitions, dict) and name in definitions:
                    reached[place, name] = definitions[name]
                    unread.append(reached[place, name])
        for (place, name), definition in reached.items():
            found[place] = {**found.get(place, {}), name: definition}
        return found

    def _branches(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "anyOf" not in schema:
            yield schema
            return
        refuse_others(schema, frozenset({"anyOf"}))
        yield from schema["anyOf"]

    def _one_of(self, schema: Mapping[str, Any]) -> str:
        refuse_others(schema, frozenset({"enum", "const", "type"}))
        values = schema.get("enum", [schema.get("const")])
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        return self.rules.add(f"({' | '.join(map(quoted, texts))}) {self.token or quoted(self.end)}")

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for a text. It ends where its tag comes first, so it cannot have the tag in it."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if max(least, most or 0) > MOST_COUNTED:
            raise ValueError(
                f"this model writes texts between tags, where a length above {MOST_COUNTED} cannot be counted"
            )
        count = times(least, most)
        tag = re.escape(self.end.strip()).replace("/", "\\/")
        text = f"(/(?s:.{count})/ & ~/(?s:.*){tag}(?s:.*)/)"
        if self.token:
            return self.rules.add(f"{self.rules.add(text, terminal=True)} {self.token}")
        body = f"{text} {quoted(self.end)}"
        return self.rules.add(self.rules.add(body, terminal=True), attributes="[lazy]")
