"""Finds out which two characters a pattern of a pre-tokenizer can take one after the other in a match.

If it cannot take both, it finds in both halves of a text what it finds in the whole: a match ends there at the latest,
and the pattern looks no further before. That is so if a pattern looks only at what it takes, and at what comes next
(`(?!\\S)`). Others are refused: those with `\\b`, `^`, `(?<=..)` or back references.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final

from tokenizers import Regex, pre_tokenizers

GROUPS: Final = {"(?:": False, "(?i:": True, "(?=": None, "(?!": None, "(?": "unknown", "(": False}
"""How a group begins -> whether its letters match in both cases; None: it looks ahead and takes nothing. In order."""
QUANTIFIER: Final = re.compile(r"[*+?]|\{\d*(?:,\d*)?\}")
ESCAPE: Final = re.compile(r"\\(?:[pP]\{\^?\w+\}|x\{[\da-fA-F]+\}|x[\da-fA-F]{2}|u[\da-fA-F]{4}|[sSdDwWrntfv]|[^\w\s])")
AHEAD: Final = -1
"""Stands for a look at the next character, whatever it is."""
CHARACTERS_KNOWN: Final = 8192


class UnknownPattern(ValueError):
    """This module cannot judge the pattern."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a pattern: the atoms with which a match of it can begin and end, and whether it can be empty."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    is_empty: bool = True


class Pattern:
    """A regular expression, as Oniguruma reads it."""

    def __init__(self, source: str) -> None:
        """Raise UnknownPattern if *source* cannot be judged."""
        self._source, self._place = source, 0
        self._atoms: list[pre_tokenizers.Split] = []
        self._next: set[tuple[int, int]] = set()
        """Pairs of atoms that can follow each other in a match."""
        whole = self._alternatives(ignores_case=False)
        if self._place < len(source) or whole.is_empty:
            raise UnknownPattern(source)
        self._whole = _removes(source)
        self._atoms_with = lru_cache(CHARACTERS_KNOWN)(self._find_atoms_with)

    def can_take(self, character: str) -> bool:
        """Return whether any match can have this character."""
        return bool(self._atoms_with(character))

    def takes_alone(self, character: str) -> bool:
        """Return whether the character alone is a match."""
        return not self._whole.pre_tokenize_str(character)

    def can_take_both(self, left: str, right: str) -> bool:
        """Return whether a match can have *left* and then *right*, or depends after *left* on what follows."""
        followers = (*self._atoms_with(right), AHEAD)
        return any(pair in self._next for pair in product(self._atoms_with(left), followers))

    def _find_atoms_with(self, character: str) -> tuple[int, ...]:
        return tuple(i for i, atom in enumerate(self._atoms) if not atom.pre_tokenize_str(character))

    def _alternatives(self, *, ignores_case: bool) -> _Part:
        parts = [self._sequence(ignores_case=ignores_case)]
        while self._source.startswith("|", self._place):
            self._place += 1
            parts.append(self._sequence(ignores_case=ignores_case))
        first = frozenset[int]().union(*(part.first for part in parts))
        last = frozenset[int]().union(*(part.last for part in parts))
        return _Part(first, last, any(part.is_empty for part in parts))

    def _sequence(self, *, ignores_case: bool) -> _Part:
        found = _Part()
        while self._place < len(self._source) and self._source[self._place] not in "|)":
            part = self._quantified(self._term(ignores_case=ignores_case))
            self._next.update(product(found.last, part.first))
            found = _Part(
                found.first | part.first if found.is_empty else found.first,
                found.last | part.last if part.is_empty else part.last,
                found.is_empty and part.is_empty,
            )
        return found

    def _quantified(self, part: _Part) -> _Part:
        while match := QUANTIFIER.match(self._source, self._place):
            self._place = match.end()
            if match[0] != "?":
                self._next.update(product(part.last, part.first))
            if match[0][0] in "*?" or match[0].startswith(("{0", "{,")):
                part = _Part(part.first, part.last, is_empty=True)
        return part

    def _term(self, *, ignores_case: bool) -> _Part:
        source, begin = self._source, self._place
        match source[begin]:
            case "(":
                return self._group(ignores_case=ignores_case)
            case "[":
                self._place = _end_of_class(source, begin)
            case "\\":
                escape = ESCAPE.match(source, begin)
                if escape is None:
                    raise UnknownPattern(source)
                self._place = escape.end()
            case "^" | "$" | "*" | "+" | "?" | "{":
                raise UnknownPattern(source)
            case _:
                self._place += 1
        atom = source[begin : self._place]
        self._atoms.append(_removes(f"(?i:{atom})" if ignores_case else atom))
        one = frozenset({len(self._atoms) - 1})
        return _Part(one, one, is_empty=False)

    def _group(self, *, ignores_case: bool) -> _Part:
        opening = next(each for each in GROUPS if self._source.startswith(each, self._place))
        kind = GROUPS[opening]
        if kind == "unknown":
            raise UnknownPattern(self._source)
        self._place += len(opening)
        inside = self._alternatives(ignores_case=ignores_case or kind is True)
        if not self._source.startswith(")", self._place):
            raise UnknownPattern(self._source)
        self._place += 1
        return inside if kind is not None else _Part(inside.first | {AHEAD})


def _removes(source: str) -> pre_tokenizers.Split:
    """Return a step that removes the matches of a pattern from a text."""
    try:
        return pre_tokenizers.Split(Regex(source), "removed")
    except Exception as error:
        raise UnknownPattern(source) from error


def _end_of_class(source: str, begin: int) -> int:
    """Return where a class of characters ends, which can have others in it."""
    depth, place = 0, begin
    while place < len(source):
        match source[place]:
            case "\\":
                place += 1
            case "[":
                depth += 1
            case "]":
                depth -= 1
        place += 1
        if not depth:
            return place
    raise UnknownPattern(source)


def literal(text: str) -> Pattern:
    """Return the pattern of a text."""
    escaped: Iterable[str] = (f"\\x{{{ord(character):x}}}" for character in text)
    return Pattern("".join(escaped))
