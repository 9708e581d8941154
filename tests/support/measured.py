"""What was measured, as tests ask for it: of one process, and of the text that Prometheus reads, by its own parser; and
how much work was done, instead of how long it took, so that a test says the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from pipeline.metrics.counters import Counts, Measures, read_snapshot
from pipeline.metrics.families import PREFIX, Family

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def count_of(measures: Measures, family: Family, *labels: str) -> float:
    """Return how a counter or a gauge stands, or how often a histogram was given something."""
    reading = read_snapshot(measures.snapshot()).get(family, {}).get(labels, 0)
    return sum(reading.counts) if isinstance(reading, Counts) else reading


def total_of(measures: Measures, family: Family, *labels: str) -> float:
    """Return the sum of what a histogram was given."""
    reading = read_snapshot(measures.snapshot()).get(family, {}).get(labels, Counts(0, ()))
    assert isinstance(reading, Counts)
    return reading.total


class Scrape:
    """One text. It has no series twice, and each histogram is one."""

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.kinds, f"{family.name} comes twice"
            assert family.documentation
            self.kinds[family.name] = family.type
            for sample in family.samples:
                series = sample.name, frozenset(sample.labels.items())
                assert series not in self.samples, f"{series} comes twice"
                self.samples[series] = sample.value
        for name, kind in self.kinds.items():
            if kind == "histogram":
                self._check_histogram(name)

    def of(self, name: str, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
        """Return labels -> value of the samples `minisgl:<name>`, or `<name>`, that have *labels*."""
        wanted, names = set(labels.items()), (PREFIX + name, name)
        return {has: value for (found, has), value in self.samples.items() if found in names and wanted <= has}

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of those; there is one at least."""
        found = self.of(name, **labels)
        assert found, f"no {name} with {labels}"
        return sum(found.values())

    def values(self, name: str, label: str) -> set[str]:
        """Return the values of a label."""
        return {dict(has)[label] for has in self.of(name)}

    def _check_histogram(self, name: str) -> None:
        """Buckets are cumulative, the last one is all, and there is a sum."""
        places: dict[frozenset[tuple[str, str]], dict[float, float]] = {}
        for (found, has), value in self.samples.items():
            if found == f"{name}_bucket":
                labels = dict(has)
                bound = float(labels.pop("le"))
                places.setdefault(frozenset(labels.items()), {})[bound] = value
        for place, buckets in places.items():
            counts = [buckets[bound] for bound in sorted(buckets)]
            assert _ascends(counts) and max(buckets) == float("inf")
            assert counts[-1] == self.samples[f"{name}_count", place]
            assert self.samples[f"{name}_sum", place] >= 0


def _ascends(values: Iterable[float]) -> bool:
    values = list(values)
    return values == sorted(values)


def lines_run(do: Callable[[], object], module: ModuleType) -> int:
    """Call *do*; return how many lines of *module* ran, each as often as it did."""
    count = 0

    def each_line(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return each_line

    def each_call(frame: FrameType, _: str, __: object) -> TraceFunction | None:
        return each_line if frame.f_code.co_filename == module.__file__ else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        do()
    finally:
        sys.settrace(before)
    return count
