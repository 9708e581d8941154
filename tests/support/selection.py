"""Which tests run on every change, which wait for the night, and in which order the processes of a run take them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import pytest

from ops.bench.gpu import has_gpu

AT_NIGHT: Final = os.environ.get("MINISGL_NIGHT", "") == "1"
"""Whether every test runs, with as many examples as a night has time for."""

T = TypeVar("T")


def by_night(on_every_change: T, at_night: T) -> T:
    """Return the one or the other: how much of something this run tests."""
    return at_night if AT_NIGHT else on_every_change


def rest_at_night(values: Iterable[object], *, first: int = 1) -> list[object]:
    """Return *values* as parameters of a test; only the *first* of them run on every change."""
    params = [pytest.param(value) for value in values]
    return [*params[:first], *(pytest.param(*param.values, marks=pytest.mark.night) for param in params[first:])]


GROUP: Final = re.compile(r'xdist_group\("(\w+)"\)')


@functools.cache
def group_of_file(file: Path) -> str:
    """Return the `xdist_group` of all tests in *file*, or "".

    It is read from the text: pytest-xdist 3.8 tells the groups to its scheduler no more since pytest 9.2.
    """
    found = GROUP.search(file.read_text())
    return found[1] if found else ""


def group_of(item: pytest.Item) -> str:
    """Return the `xdist_group` of a test, or ""."""
    return group_of_file(item.path)


def chosen(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of this run and the others, which wait for the night or for a GPU.

    The slow ones come first, with files of each folder in turn: those of one folder are alike, and processes that all
    wait at a time would leave the cores idle. Files of one group come one after the other: they share a server.
    """
    missing = [mark for mark, is_here in (("night", AT_NIGHT), ("gpu", has_gpu())) if not is_here]
    left = [item for item in items if any(map(item.get_closest_marker, missing))]
    run = [item for item in items if not any(map(item.get_closest_marker, missing))]
    places: dict[str, dict[str, int]] = {}

    def place(item: pytest.Item) -> float:
        """Return the place of a slow test's file, or of its group, in its folder."""
        if item.get_closest_marker("slow") is None:
            return float("inf")
        file, _, _ = item.nodeid.partition("::")
        in_folder = places.setdefault(file.split("/")[1], {})
        return in_folder.setdefault(group_of(item) or file, len(in_folder))

    return sorted(run, key=place), left
