"""Counts work instead of time, so that a test says the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


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
