"""What is printed at the end of a run, for people: first the verdict, then a table. All figures are in the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ops.bench.gpu.document import BAD, Document, Item, Phase

WIDTH: Final = 110
ITEM_WIDTH: Final = 48
MOST_SHOWN: Final = 8
"""Of a list, shown as they are; a longer one is counted."""


def table(document: Document, console: Console | None = None) -> None:
    """Print what was found, its verdict first; without a terminal as plain text of at most WIDTH columns."""
    console = console or Console()
    console = Console(file=console.file, width=min(console.width, WIDTH) if console.is_terminal else WIDTH)
    for line in summary(document):
        console.print(Text(line))
    console.print()
    with console.capture() as plain:
        for phase in document.phases:
            _print_phase(phase, console)
    console.file.write("".join(f"{line.rstrip()}\n" for line in plain.get().splitlines()))


def _print_phase(phase: Phase, console: Console) -> None:
    """Print a line for the phase, and one for each of its items, with its figures beside it."""
    title = Text.assemble((phase.name, "bold red" if phase.status in BAD else "bold"), f": {outcome(phase)}")
    console.print(title)
    rows = Table.grid(padding=(0, 2, 0, 0), expand=True)
    rows.add_column(max_width=ITEM_WIDTH)
    rows.add_column(no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    for item in phase.items:
        mark = {True: "ok", False: "WRONG", None: ""}[item.ok] if not item.skipped else "skipped"
        rows.add_row(Text(item.item), Text(mark, style="red" if item.ok is False else ""), Text(found(item)))
    console.print(Padding(rows, (0, 0, 1, 2)))


def summary(document: Document) -> Iterator[str]:
    """Return the verdict: how much is wrong, and where; what was cut and skipped; how long it took."""
    bad = [phase for phase in document.phases if phase.status in BAD]
    num = len(document.phases)
    yield f"{len(bad)} of {num} phases went wrong" if bad else f"Nothing is wrong, in {num} phases"
    for phase in bad:
        yield f"{phase.name}: {outcome(phase)}"
    if document.cut:
        yield f"Cut off (--budget {document.budget_s:g}): {', '.join(document.cut)}"
    if skipped := [phase.name for phase in document.phases if phase.status == "skipped"]:
        yield f"Skipped: {', '.join(skipped)}"
    installed = "" if document.install_s is None else f" after {document.install_s:.1f} s of installation"
    yield f"{document.device}, size {document.size}: {document.wall_s:.0f} s{installed}"


def outcome(phase: Phase, *, reason: bool = True) -> str:
    """Return in one line what became of *phase*."""
    took = f", {phase.wall_s:.1f} s" if phase.wall_s else ""
    return f"{phase.status}{took}{f': {phase.reason}' if reason and phase.reason else ''}"


def found(item: Item) -> str:
    """Return the figures of *item* in one line, and why it is wrong or skipped; without yes and no if it is right."""
    shown = {
        name: value
        for name, value in _flat(item.figures)
        if not (item.ok and (isinstance(value, bool) or value in ("", None)))
    }
    figures = [f"{name} {_text(value)}" for name, value in shown.items()]
    return "; ".join(filter(None, (item.skipped, item.error, ", ".join(figures))))


def _flat(figures: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, "" if name == "versions" else f"{above}{name}.")
        else:
            yield above + name, value


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        if len(value) > MOST_SHOWN or any(isinstance(one, Mapping) for one in value):
            return f"({len(value)} in the JSON)"
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)
