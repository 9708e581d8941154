"""How a JSON schema is built, and which of its numbers a grammar can count.

Web processes and tokenizers call the same functions. So a web process can tell its client what the grammar leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

Path = tuple[str, ...]
"""A place in a schema: keywords, names and places in lists."""

OF_A_SCHEMA: Final = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "then"}
    | {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords that have a schema (in older drafts `items` may have a list) .."""
OF_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
""".. a list of schemas .."""
OF_NAMED_SCHEMAS: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
""".. or an object of them."""
LARGEST_NUMBER: Final = 2**53
"""Largest number that llguidance counts exactly: it counts with floats."""
SMALLEST_BOUND: Final = 1e-60
"""Smallest bound above 0. A smaller one has more zeros than llguidance's patterns can be nested."""
LARGEST_COUNT: Final = 2**32 - 1
"""Largest number of characters, items or properties. The coefficient of a `multipleOf` has as many bits."""
BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
COUNTS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


def mapped(name: str, value: Any, change: Callable[[Any, Path], Any], at: Path) -> Any:
    """Return the value of a keyword with *change* applied to each schema in it. *at*: the place of the keyword."""
    if name in OF_A_SCHEMA and isinstance(value, dict):
        return change(value, at)
    if (name in OF_SCHEMAS or name == "items") and isinstance(value, list):
        return [change(one, (*at, str(place))) for place, one in enumerate(value)]
    if name in OF_NAMED_SCHEMAS and isinstance(value, dict):
        return {key: change(one, (*at, key)) for key, one in value.items()}
    return value


def holds_schemas(name: str, value: Any) -> bool:
    """Return whether a keyword has schemas in it."""
    if isinstance(value, dict):
        return name in OF_A_SCHEMA or name in OF_NAMED_SCHEMAS
    return isinstance(value, list) and (name in OF_SCHEMAS or name == "items")


def numbers_in(value: Any) -> Iterator[int | float]:
    """Yield the numbers within a value of JSON; true and false are 1 and 0."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int | float):
            yield one


def is_countable(name: str, value: Any) -> bool:
    """Return whether a grammar can count the numbers of a keyword; True for keywords without numbers."""
    if name in ("const", "enum"):
        return all(abs(one) <= LARGEST_NUMBER for one in numbers_in(value) if isinstance(one, int))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if name == "multipleOf":
        return _has_few_digits(value)
    if name in BOUNDS:
        return abs(value) <= LARGEST_NUMBER and (value == 0 or abs(value) >= SMALLEST_BOUND)
    return name not in COUNTS or value <= LARGEST_COUNT


def _has_few_digits(value: float) -> bool:
    """Return whether a `multipleOf` is a small whole number over a power of ten, as llguidance counts it."""
    scaled = abs(value)
    while scaled <= LARGEST_COUNT and scaled % 1:
        scaled *= 10
    return scaled <= LARGEST_COUNT
