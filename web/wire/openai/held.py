"""JSON schemas of a body, as the log holds them: without the numbers that it cannot hold exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipeline.grammars import Path, holds_schemas, is_countable, mapped, numbers_in
from web.wire.openai.strict import INT64_MAX, kept_exactly


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """A JSON schema."""

    value: dict[str, Any]
    ignored: tuple[str, ...]
    """Where it has keywords whose numbers no grammar can count. The grammar is made without them."""


def held(schema: dict[str, Any]) -> HeldSchema:
    """Return a schema without the keywords whose numbers the log cannot hold.

    Raises:
        PydanticCustomError: There is such a number in a place where it is no keyword's.
    """
    ignored: list[str] = []

    def kept(one: Any, at: Path) -> Any:
        if not isinstance(one, dict):
            return kept_exactly(one)
        found: dict[str, Any] = {}
        for name, value in one.items():
            if holds_schemas(name, value):
                found[name] = mapped(name, value, kept, (*at, name))
                continue
            is_held = _is_held(value)
            if is_held:
                found[name] = value
            if not is_held or not is_countable(name, value):
                ignored.append(".".join((*at, name)))
        return found

    return HeldSchema(kept(schema, ()), tuple(ignored))


def _is_held(value: object) -> bool:
    """Return whether the log can hold the numbers within a value; it holds integers of 64 bits and finite floats."""
    for one in numbers_in(value):
        if isinstance(one, int):
            if not -INT64_MAX - 1 <= one <= INT64_MAX:
                return False
        elif not math.isfinite(one):
            if math.isnan(one):  # this is no JSON
                kept_exactly(one)
            return False
    return True
