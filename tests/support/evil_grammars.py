"""Constraints that are meant to do harm: each is small, and each costs much somewhere on its way to a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

EVILS: Final[Sequence[tuple[Literal["json", "regex", "grammar"], Any]]] = (
    ("regex", "((a{100}){100}){100}"),
    ("regex", "(a?){500}a{500}"),
    ("grammar", "start: " + " | ".join(f'"{number:05d}"' for number in range(5000))),
    ("json", {"anyOf": [{"properties": {f"k{i}": {"type": "string"} for i in range(j)}} for j in range(60)]}),
    ("grammar", "start: T\nT: /.{0,300}/ & /(.*a.{8}b.*)/ & ~/(.*c.{9}d.*)/ & /.*(e.{10}f).*/"),
    ("regex", "(a|b|c){1000,5000}[^d]*e{500}"),
    ("regex", "(.*a){20}.*b"),
    ("regex", r"((.*)(.*)(.*)(.*)[0-9]){30}"),
    ("regex", r"(.*a.{18}){3}"),
    ("regex", r"(\p{L}{1,50}){50}"),
    ("grammar", 'start: a a a a a a a a\na: "x" | a a | ""'),
    ("grammar", 'start: start start | "a" | ""'),
    ("grammar", 'start: "(" start? ")"'),
    ("grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)), 'r30: "a"'])),
    ("grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(20)), 'r20: "a"'])),
    ("grammar", "start: T\nT: /(.|\\n)*/ & ~/(.|\\n)*(a|b).{30}c(.|\\n)*/"),
    ("json", {"type": "string", "pattern": "^(a|aa|aaa|.*b.*c.*d.*e.*f){1,40}$", "minLength": 500, "maxLength": 1000}),
    ("json", {"type": "string", "minLength": 50000, "maxLength": 100000}),
    ("json", {"type": "number", "multipleOf": 0.0001, "minimum": 0.1234567, "maximum": 99999.87654}),
    ("json", {"type": "array", "minItems": 2000, "maxItems": 5000, "items": {"type": "integer", "minimum": -(10**8)}}),
)
REFUSED_AS: Final = ("grammar_too_complex", "unsupported_schema", "invalid_grammar")
"""The codes of errors that one of them may get, with HTTP 400."""
