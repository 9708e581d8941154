"""What a phase is given and what it may say. It knows no phase, and imports nothing that a bare Python lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Figures: TypeAlias = Mapping[str, object]
"""JSON values by name. A name ends with its unit: `step_ms`, `copy_gb_per_s`."""

MOST_ERROR_CHARS = 300
"""The rest of the text of an error is cut: a CUDA error may be a page long."""


class Report(Protocol):
    """Writes one measured item at once to the parent, so that a phase that is killed keeps what it found."""

    def __call__(self, item: str, *, ok: bool | None = None, **figures: object) -> None:
        """Report *item*. *ok* False: it is wrong, and the exit code is 1; None: a mere figure."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Where to measure, and how much of it."""

    device: str
    """`cuda` or `cpu`."""
    size: str
    """`toy` (tests, on every change), `small` (a CPU) or `full` (a GPU)."""


class Skip(Exception):
    """A phase, or one item of it, cannot run here; the message says why."""


@contextlib.contextmanager
def attempt(report: Report, item: str) -> Iterator[None]:
    """Report an exception of the block as *item* that went wrong, or that was skipped, so that the next item runs."""
    try:
        yield
    except Skip as why:
        report(item, skipped=str(why))
    except Exception as error:
        report(item, ok=False, error=error_text(error))


def error_text(error: BaseException) -> str:
    """Return the type and the first lines of *error*, in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MOST_ERROR_CHARS].rstrip(": ")
