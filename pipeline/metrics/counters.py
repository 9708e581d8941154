"""The metrics of one process, and their text in its status, for the process that shows metrics.

Counts live as long as the process; Prometheus can deal with a restart. Knows no clock: the caller measures times.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import orjson

from pipeline.metrics.families import FAMILIES, Family, layout

_BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}
_LAYOUT = ""
"""Key in the text, beside the names of families: a number for the buckets."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The content of a histogram."""

    total: float
    """Sum of all values."""
    counts: tuple[int, ...]
    """Number of values in each bucket; the last one is for values above all bounds."""


Reading: TypeAlias = float | Counts
Readings: TypeAlias = dict[Family, dict[tuple[str, ...], Reading]]
"""Family -> values of its own labels -> value."""


class Measures:
    """All metrics of one process. Any thread may write; the lock is held for one addition only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Family, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[Family, dict[tuple[str, ...], list[float]]] = {}
        """The sum, and then the counts."""

    def add(self, family: Family, *labels: str, amount: float = 1) -> None:
        """Add *amount* to a counter or a gauge; to a gauge it may be negative."""
        with self._lock:
            numbers = self._numbers.get(family)
            if numbers is None or labels not in numbers:
                numbers = self._new_number(family, labels)
            numbers[labels] += amount

    def set(self, family: Family, value: float, *labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            numbers = self._numbers.get(family)
            if numbers is None or labels not in numbers:
                numbers = self._new_number(family, labels)
            numbers[labels] = value

    def observe(self, family: Family, value: float, *labels: str, times: int = 1) -> None:
        """Put *value* in its bucket, so many *times*."""
        with self._lock:
            cells = self._histograms.get(family)
            if cells is None or labels not in cells:
                cells = self._new_histogram(family, labels)
            cell = cells[labels]
            cell[0] += value * times
            cell[1 + bisect_left(family.buckets, value)] += times

    def snapshot(self) -> str:
        """Return all that is not zero as JSON: name -> a list for each series, with its labels before its value.

        The value of a histogram is its sum and its counts, up to the last one that is not zero.
        """
        said: dict[str, object] = {_LAYOUT: layout()}
        with self._lock:
            for family, numbers in self._numbers.items():
                said[family.name] = [[*labels, value] for labels, value in numbers.items() if value]
            for family, cells in self._histograms.items():
                said[family.name] = [[*labels, cell[:]] for labels, cell in cells.items()]
        for name, series in said.items():
            if isinstance(series, list) and _BY_NAME[name].kind == "histogram":
                for *_, cell in series:
                    cell[0] = round(cell[0], 6)
                    while cell and not cell[-1]:
                        cell.pop()
        return orjson.dumps({name: series for name, series in said.items() if series}).decode()

    def _new_number(self, family: Family, labels: tuple[str, ...]) -> dict[tuple[str, ...], float]:
        assert family.kind != "histogram" and len(labels) == len(family.labels), family.name
        numbers = self._numbers.setdefault(family, {})
        numbers.setdefault(labels, 0)
        return numbers

    def _new_histogram(self, family: Family, labels: tuple[str, ...]) -> dict[tuple[str, ...], list[float]]:
        assert family.kind == "histogram" and len(labels) == len(family.labels), family.name
        cells = self._histograms.setdefault(family, {})
        cells.setdefault(labels, [0] * (len(family.buckets) + 2))
        return cells


def read_snapshot(text: str) -> Readings:
    """Return the metrics in *text*. Skip unreadable parts: another version may measure something else."""
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(said, dict):
        return {}
    same_buckets = said.get(_LAYOUT) == layout()
    readings: Readings = {}
    for name, series in said.items():
        family = _BY_NAME.get(name)
        if family is None or not isinstance(series, list) or (family.buckets and not same_buckets):
            continue
        for each in series:
            if isinstance(each, list) and len(each) == len(family.labels) + 1:
                *labels, value = each
                reading = _reading(family, value)
                if reading is not None and all(isinstance(label, str) for label in labels):
                    readings.setdefault(family, {})[tuple(labels)] = reading
    return readings


def _reading(family: Family, value: object) -> Reading | None:
    """Return the value of a series; None if *family* has no such values."""
    if family.kind != "histogram":
        return value if _is_number(value) else None
    size = len(family.buckets) + 1
    if not isinstance(value, list) or not 0 < len(value) <= size + 1 or not all(map(_is_number, value)):
        return None
    total, *counts = value
    return Counts(total, (*map(int, counts), *[0] * (size - len(counts))))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
