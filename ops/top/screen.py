"""A `PipelineView` as lines of text, for a terminal of any size, a pipe or a program. Knows no log and no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, repeat
from typing import Final, TypeAlias

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from ops.connection import one_line
from pipeline.views.pipeline import EngineView, PipelineView, SlotView, StepsView
from pipeline.views.requests import RequestView

WIDE: Final = 110
"""Columns that allow full names."""
WIDEST: Final = 132
"""Columns that also allow the endpoint of each request."""
ROOMY: Final = 32
"""Lines that allow blank lines between tables."""
GAP: Final = "  "
ELLIPSIS: Final = "…"
NARROWEST: Final = 6
"""Least width of a column that shrinks."""

Cell: TypeAlias = tuple[str, str]
"""Text and style."""

_PHASES: Final = {"ready": "green", "held": "green", "away": "bold red"}
_STATES: Final = {
    "running": "green",
    "preempted": "magenta",
    "finished": "",
    "failed": "red",
    "cancelled": "yellow",
    "unreadable": "red",
}
_UNSURE: Final = "yellow"


@dataclass(frozen=True, slots=True)
class Section:
    """A table: its columns (`<` is left-aligned), and its rows."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    """Least widths, so that columns do not move while their numbers change."""
    aligns: str
    yields: tuple[int, ...]
    """Columns that shrink, in this order, if there is not enough room."""
    rows: Sequence[Sequence[Cell]]
    instead: str = ""
    """The text of an empty table."""
    left_out: str = ""
    """The last line of a cut table, instead of the number of missing rows."""
    lesser: frozenset[int] = frozenset()
    """The rows to leave out first."""


@dataclass(frozen=True, slots=True)
class Screenful:
    """A view on a whole screen."""

    view: PipelineView
    silent_s: float = 0.0
    """How long the next view is overdue."""
    paused: bool = False
    interval_s: float = 1.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        for number, line in enumerate(self.lines(options.max_width, height)):
            if number:
                yield Segment.line()
            yield from line.render(console)

    def lines(self, width: int, height: int) -> list[Text]:
        """Return at most *height* lines of at most *width* columns."""
        head, *body = lines_of(self.view, width, height - 1, silent_s=self.silent_s, paused=self.paused)
        if self.silent_s or self.view.error:
            for line in body:
                line.stylize("dim")
        return [head, *body, self._foot(width)][:height]

    def _foot(self, width: int) -> Text:
        keys = f"q quits{GAP}space {'continues' if self.paused else 'pauses'}{GAP}every {self.interval_s:g} s"
        said = one_line(self.view.error)
        line = Text(_cut(f"{keys}{GAP}{said}" if said else keys, width), "dim")
        if said:
            line.stylize("not dim red", len(keys))
        return line


def lines_of(
    view: PipelineView, width: int = 0, height: int = 0, *, silent_s: float = 0.0, paused: bool = False
) -> list[Text]:
    """Return *view* as lines, the head first; width or height 0 means no limit."""
    is_wide = not width or width >= WIDE
    sections = [_slots(view), _streams(view), _engines(view.engines, is_wide)]
    sections += [_steps(view, is_wide)] if view.steps else []
    sections.append(_requests(view.requests, width))
    num_free = len(sections) if not height or height >= ROOMY else 0
    rooms = [len(section.rows) or 1 for section in sections]
    if height:
        rooms = shares(max(height - 1 - len(sections) - num_free, 0), rooms)
    lines = [_head(view, width, silent_s, paused)]
    for section, room in zip(sections, rooms, strict=True):
        lines += [Text()] if num_free else []
        lines += _table(section, width, room)
    return lines[:height] if height else lines


def shares(room: int, wants: Sequence[int]) -> list[int]:
    """Divide *room* fairly: nobody gets more than they want, and the last ones get the rest."""
    given = [0] * len(wants)
    while room and given != list(wants):
        short = [index for index, want in enumerate(wants) if given[index] < want]
        share = max(room // len(short), 1)
        for index in short[::-1][:room]:
            more = min(share, wants[index] - given[index])
            given[index] += more
            room -= more
    return given


def _table(section: Section, width: int, room: int) -> Iterator[Text]:
    """Yield the column names and *room* rows; if there are more, the last line says how many."""
    rows = section.rows
    if len(rows) > room:
        by_worth = sorted(range(len(rows)), key=lambda index: index in section.lesser)
        rows = [rows[index] for index in sorted(by_worth[: max(room - 1, 0)])]
    rows = [[(one_line(text), style) for text, style in row] for row in rows]
    columns = zip(section.names, *([text for text, _ in row] for row in rows), strict=True)
    widths = [max(least, *map(cell_len, column)) for least, column in zip(section.widths, columns, strict=True)]
    stiff = sum(section.widths[index] if index in section.yields else width for index, width in enumerate(widths))
    gap = GAP if not width or stiff + len(GAP) * (len(widths) - 1) <= width else GAP[:1]
    over = sum(widths) + len(gap) * (len(widths) - 1) - width if width else 0
    for index in section.yields:
        cut = max(min(over, widths[index] - NARROWEST), 0)
        widths[index] -= cut
        over -= cut
    names = _row([(name, "") for name in section.names], section.aligns, widths, gap)
    yield _fit(names, width, "reverse")
    if not section.rows and section.instead and room:
        yield _fit(Text(section.instead, "dim"), width)
    for row in rows:
        yield _fit(_row(row, section.aligns, widths, gap), width)
    if len(rows) < len(section.rows) and room:
        left_out = section.left_out or f"and {len(section.rows) - len(rows)} more"
        yield _fit(Text(f"{ELLIPSIS} {left_out}", "dim"), width)


def _row(cells: Sequence[Cell], aligns: str, widths: Sequence[int], gap: str) -> Text:
    line = Text()
    for index, ((text, style), align, width) in enumerate(zip(cells, aligns, widths, strict=True)):
        shown = _cut(text, width)
        free = " " * (width - cell_len(shown))
        line.append(gap if index else "")
        line.append(free if align == ">" else "")
        line.append(shown, style)
        line.append(free if align == "<" and index < len(widths) - 1 else "")
    return line


def _cut(text: str, width: int) -> str:
    """Return *text*, cut to *width* terminal columns."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)).rstrip() + ELLIPSIS[:width]


def _fit(line: Text, width: int, style: str = "") -> Text:
    """Cut *line* to *width*, and apply *style* to all of it."""
    if width:
        line.truncate(width, overflow="ellipsis", pad=bool(style))
    if style:
        line.stylize(style)
    return line


# What each part says


def _head(view: PipelineView, width: int, silent_s: float, paused: bool) -> Text:
    addresses = [slot.address for slot in view.slots if slot.address]
    served = next((engine for engine in view.engines if engine.model), None)
    more = f" +{len(addresses) - 1}" if len(addresses) > 1 else ""
    is_wide = not width or width >= WIDE
    left = [f"{addresses[0]}{more}" if addresses else "no server listens"]
    if not is_wide:
        left = [left[0].removeprefix("http://")]
    if served is not None:
        left += [served.model, f"{'context' if is_wide else 'ctx'} {served.context:,}"]
    redis = view.redis
    limit = f" of {_bytes(redis.max_bytes)}" if redis.max_bytes else ""
    up = f" up {age(redis.up_s * 1000)}" if is_wide else ""
    state = f"{redis.name} {redis.version} {_bytes(redis.used_bytes)}{limit}{up}"
    if silent_s or view.error:
        state = f"Redis has not answered for {silent_s:.0f} s"
    when = f"{datetime.fromtimestamp(view.at_ms / 1000):%H:%M:%S}"
    right = one_line(GAP.join([*(["paused"] if paused else []), state, when]))
    said = one_line(GAP.join(left))
    if width:
        room = max(width - cell_len(right) - len(GAP), 0)
        said = set_cell_size(_cut(said, room), room)
    line = Text(said, "bold")
    line.append(GAP)
    line.append(right, "bold red" if silent_s or view.error else "bold yellow" if paused else "")
    return _fit(line, width)


def _slots(view: PipelineView) -> Section:
    return Section(
        names=("stage", "phase", "host:pid", "epoch", "lease", "pending", ""),
        widths=(12, 11, 8, 5, 8, 7, 0),
        aligns="<<<>>><",
        yields=(6, 2),
        rows=[_slot(slot) for slot in view.slots],
        instead="no workers: none has registered under this --namespace",
        lesser=frozenset(index for index, slot in enumerate(view.slots) if slot.phase == "away" and not slot.pending),
    )


def _slot(slot: SlotView) -> list[Cell]:
    is_away = slot.phase == "away"
    phase = f"{slot.phase} {slot.progress:.0%}" if slot.phase == "loading" and slot.progress else slot.phase
    where = f"{slot.host}:{slot.pid}" if slot.pid else ""
    lease = f"{slot.lease_ms:,} ms" if slot.lease_ms else "nobody"
    detail = f"for {slot.detail}" if slot.phase == "waiting" and slot.detail else slot.detail
    details = [detail, slot.address.removeprefix("http://"), f"{slot.streams_open:,} open" if slot.streams_open else ""]
    return [
        (slot.slot, "dim" if is_away else ""),
        (phase, _PHASES.get(slot.phase, _UNSURE)),
        (where, "dim" if is_away else ""),
        (f"{slot.epoch}", ""),
        (lease, "" if slot.lease_ms else _PHASES["away"] if is_away else _UNSURE),
        (f"{slot.pending:,}", "bold red" if is_away and slot.pending else ""),
        (GAP.join(filter(None, details)), ""),
    ]


def _streams(view: PipelineView) -> Section:
    live = (f"live requests {view.num_live:,}", "")
    dead = (f"dead letters {view.num_dead:,}", "bold red" if view.num_dead else "")
    rows = [
        [(each.stream, ""), (f"{each.length:,}", ""), (f"{each.pending:,}", ""), (f"{each.lag:,}", ""), total]
        for each, total in zip(view.streams, chain((live, dead), repeat(("", ""))), strict=False)
    ]
    return Section(("stream", "length", "pending", "lag", ""), (16, 6, 7, 5, 0), "<>>><", (4, 0), rows)


def _engines(engines: Sequence[EngineView], is_wide: bool) -> Section:
    names = ("engine", "running", "waiting", "preempted", "cache", "hits", "tok/s in", "out", "TTFT p50", "ITL p50")
    short = ("engine", "run", "wait", "preempt", "cache", "hits", "tok/s in", "out", "TTFT p50", "ITL p50")
    rows = [_engine(engine) for engine in engines]
    return Section(names if is_wide else short, (10, 3, 4, 7, 5, 5, 8, 6, 8, 7), "<" + ">" * 9, (0,), rows, "no engine")


def _engine(engine: EngineView) -> list[Cell]:
    texts = [
        _count(engine.running),
        _count(engine.waiting),
        _count(engine.preemptions),
        _share(engine.cache_used),
        _share(engine.prefix_hits),
        _rate(engine.prompt_tokens_per_s),
        _rate(engine.output_tokens_per_s),
        _seconds(engine.first_token_p50_s),
        _seconds(engine.between_tokens_p50_s),
    ]
    return [(engine.engine, ""), *((text, "" if text != "-" else "dim") for text in texts)]


def _steps(view: PipelineView, is_wide: bool) -> Section:
    """What each engine did in its last steps."""
    names = ("last steps", "ago", "steps", "p50", "longest", "decode", "prompt tokens", "preempted", "waiting", "pages")
    short = ("last steps", "ago", "steps", "p50", "longest", "decode", "prompts", "preempt", "wait", "pages")
    rows = [_last(steps, view.at_ms) for steps in view.steps]
    return Section(names if is_wide else short, (10, 6, 5, 7, 7, 6, 7, 7, 4, 5), "<" + ">" * 9, (0,), rows)


def _last(steps: StepsView, now_ms: int) -> list[Cell]:
    return [
        (steps.engine, ""),
        (age(max(now_ms - steps.at_ms, 0)), ""),
        (f"{steps.num_steps:,}", ""),
        (_seconds(steps.median_ms / 1000), ""),
        (_seconds(steps.longest_ms / 1000), ""),
        (f"{steps.decode_rows:,}", ""),
        (f"{steps.prompt_tokens:,} ({steps.num_prompts:,})" if steps.num_prompts else "0", ""),
        (f"{steps.preempted:,}", "magenta" if steps.preempted else ""),
        (f"{steps.waiting:,}", _UNSURE if steps.waiting else ""),
        (f"{steps.free_pages:,}", ""),
    ]


def _requests(requests: Sequence[RequestView], width: int) -> Section:
    said = "no requests", "and older ones"
    names: tuple[str, ...]
    widths: tuple[int, ...]
    if width and width < WIDE:
        names = ("request", "state", "age", "in", "hit", "out", "tok/s", "eng")
        widths = (32, 20, 5, 5, 4, 4, 5, 3)
        rows = [_request(each, took=False, engine=each.engine.rpartition("-")[2]) for each in requests]
        return Section(names, widths, "<<>>>>><", (1,), rows, *said)
    names = ("request", "state", "age", "took", "prompt", "cached", "output", "tok/s", "engine")
    widths = (32, 20, 6, 6, 6, 6, 6, 5, 10)
    rows = [_request(each, took=True, engine=each.engine) for each in requests]
    if width and width < WIDEST:
        return Section(names, widths, "<<>>>>>><", (1,), rows, *said)
    rows = [[*row, (each.endpoint, "")] for row, each in zip(rows, requests, strict=True)]
    return Section((*names, "endpoint"), (*widths, 0), "<<>>>>>><<", (1,), rows, *said)


def _request(request: RequestView, *, took: bool, engine: str) -> list[Cell]:
    state = f"{request.state} {request.reason}".rstrip()
    until_end = age(request.took_ms) if request.took_ms is not None else "-"
    return [
        (request.uid, ""),
        (state, _STATES.get(request.state, _UNSURE)),
        (age(request.age_ms), ""),
        *([(until_end, "")] if took else []),
        (_count(request.prompt_tokens), ""),
        (_count(request.cached_tokens), ""),
        (f"{request.output_tokens:,}", ""),
        (_rate(request.tokens_per_s), ""),
        (engine, ""),
    ]


def age(ms: int) -> str:
    """Return a duration in at most six columns."""
    seconds = ms // 1000
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600}h{seconds // 60 % 60:02}m"
    return f"{seconds // 86400}d{seconds // 3600 % 24:02}h"


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}" if share in (0, 1) else f"{share:.1%}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}" if 0 < rate < 100 else f"{rate:,.0f}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.3f} s"
