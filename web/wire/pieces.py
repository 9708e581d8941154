"""JSON of long answers, made piece by piece: it is never in memory as a whole, and others have the loop in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import orjson

PIECE_BYTES: Final = 16 << 10
"""A piece is sent when it has this many bytes. Making it takes a few milliseconds."""
PAIRS_AT_ONCE: Final = 256
"""Pairs of token and log-probability that are made at a time, each of up to 100 bytes."""
_HERE: Final = b"\xff"
"""Stands for a list in JSON, which is UTF-8 and never has this byte."""

T = TypeVar("T")


class Slices:
    """A list that is made and encoded slice by slice, once."""

    def __init__(self, slices: Iterable[Sequence[Any]]) -> None:
        self.slices = slices


def sliced(items: Iterable[T], num_pairs: int = 1) -> Slices:
    """Return a list of *items* for `encoded`; each item has so many pairs."""
    return Slices(_batched(iter(items), max(PAIRS_AT_ONCE // num_pairs, 1)))


def _batched(items: Iterator[T], most: int) -> Iterator[list[T]]:
    while batch := list(islice(items, most)):
        yield batch


def encoded(value: object) -> Iterator[bytes]:
    """Yield *value* as JSON, in pieces. The lists in it that are Slices are encoded one slice after the other. What is
    in a slice may have Slices, too."""
    piece: list[bytes] = []
    num_bytes = 0
    for part in _parts(value):
        piece.append(part)
        num_bytes += len(part)
        if num_bytes >= PIECE_BYTES:
            yield b"".join(piece)
            piece, num_bytes = [], 0
    yield b"".join(piece)


def _parts(value: object) -> Iterator[bytes]:
    lists: list[Slices] = []

    def stand_in(one: object) -> orjson.Fragment:
        if not isinstance(one, Slices):
            raise TypeError
        lists.append(one)
        return orjson.Fragment(_HERE)

    begin, *rest = orjson.dumps(value, default=stand_in).split(_HERE)
    yield begin
    for one, after in zip(lists, rest, strict=True):
        opening = b"["
        for items in one.slices:
            yield opening
            yield from _inside(_parts(items))
            opening = b","
        yield (b"[]" if opening == b"[" else b"]") + after


def _inside(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the parts of a list without its brackets."""
    part = next(parts)[1:]
    for after in parts:
        yield part
        part = after
    yield part[:-1]
