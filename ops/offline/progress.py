"""How far a call is, on stderr, for people on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

Report: TypeAlias = Callable[[int, int], None]
"""Takes how many requests are done, and how many tokens were made."""

REDRAWS_PER_SECOND = 4
"""Few, because the engine shares the interpreter with whoever draws."""


@contextlib.contextmanager
def progress_bar(num_requests: int, *, wanted: bool) -> Iterator[Report]:
    """Give what is told of the progress; it draws only when that is *wanted* and stderr is a terminal."""
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
