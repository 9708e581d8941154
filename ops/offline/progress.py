"""The progress bar of a call, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

Report: TypeAlias = Callable[[int, int], None]
"""Takes the number of completed requests and of generated tokens."""

REDRAWS_PER_SECOND = 4
"""Few, because the engine shares the interpreter with the drawing thread."""


@contextlib.contextmanager
def progress_bar(num_requests: int, *, wanted: bool) -> Iterator[Report]:
    """Give the function that takes the progress; it draws only if *wanted* and stderr is a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda num_done, num_tokens: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("generating"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    began_s = time.monotonic()
    with progress.Progress(*columns, console=console, refresh_per_second=REDRAWS_PER_SECOND) as bar:
        task = bar.add_task("", total=num_requests, rate="")

        def report(num_done: int, num_tokens: int) -> None:
            rate = num_tokens / max(time.monotonic() - began_s, 1e-9)
            bar.update(task, completed=num_done, rate=f"{rate:,.0f} tokens/s")

        yield report
