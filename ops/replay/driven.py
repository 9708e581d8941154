"""What came of traffic that was sent again, beside what was recorded: figures, a table, JSON and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench import report
from ops.bench.report import Spread, spread_of
from ops.replay.outcomes import CANCELLED, FAILED, Difference, Outcome, first_difference, is_comparable
from ops.replay.sender import Sent

DIFFERENCES_SHOWN: Final = 20
"""The JSON has all."""
TIMES: Final = (
    ("time to first token, ms", "ttft_ms"),
    ("time per token after it, ms", "tpot_ms"),
    ("whole request, ms", "e2e_ms"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One side. Times of the whole are of answers that the model ended, the other times of all that have them."""

    num_requests: int
    num_whole: int
    num_cancelled: int
    num_errors: int
    prompt_tokens: int
    """Of the requests that say it, as is the next one."""
    cached_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread

    @property
    def cached_share(self) -> str:
        return f"{self.cached_tokens / self.prompt_tokens:.0%}" if self.prompt_tokens else "-"


@dataclass(frozen=True, slots=True)
class Pair:
    """One recorded request, and what came of it now."""

    uid: str
    new_uid: str
    """Empty if the server does not tell it."""
    sent: Sent
    before: Outcome
    after: Outcome | None
    """None: its history could not be read."""

    @property
    def is_comparable(self) -> bool:
        """Whether both have an answer."""
        return self.after is not None and is_comparable(self.before, self.after)

    @property
    def difference(self) -> Difference | None:
        """Where the answers differ, if they can be compared and do."""
        if self.after is None or not is_comparable(self.before, self.after):
            return None
        return first_difference(self.before, self.after)

    @property
    def changed_end(self) -> str:
        """How its end changed, `stop -> length`; empty if it did not, or if the recorded client had left."""
        if self.after is None or self.before.by_client or self.before.end in ("", self.after.end):
            return ""
        return f"{self.before.end} -> {self.after.end or 'no end'}"

    @property
    def has_failed(self) -> bool:
        """Whether it fails now and did not before."""
        return self.after is not None and bool(self.after.error) and not self.before.error


@dataclass(frozen=True, slots=True)
class Compared:
    """How the answers of a run compare with the recorded ones."""

    num_compared: int
    num_greedy: int
    """Of them, those that were not sampled."""
    differing: tuple[tuple[str, Difference], ...]
    """The uid of the recorded request, and where its answer differs."""
    differing_greedy: int
    changed_ends: Mapping[str, int]

    @property
    def num_same(self) -> int:
        return self.num_compared - len(self.differing)


def pairs_of(sent: Sequence[Sent]) -> list[Pair]:
    """Return every recorded request that was sent again."""
    return list(_pairs(sent))


def _pairs(sent: Sequence[Sent]) -> Iterator[Pair]:
    for one in sent:
        new_uids = one.uids or ("",) * len(one.planned.uids)
        for uid, new_uid, before, after in zip(one.planned.uids, new_uids, one.planned.before, one.after, strict=True):
            yield Pair(uid, new_uid, one, before, after)


def figures_of(outcomes: Sequence[Outcome | None]) -> Figures:
    """Return the figures of one side."""
    known = [outcome for outcome in outcomes if outcome is not None]
    whole = [outcome for outcome in known if outcome.is_whole]

    def spread(name: str, some: Sequence[Outcome]) -> Spread:
        return spread_of([value for outcome in some if (value := getattr(outcome, name)) is not None])

    return Figures(
        num_requests=len(known),
        num_whole=len(whole),
        num_cancelled=sum(outcome.end == CANCELLED for outcome in known),
        num_errors=sum(outcome.end == FAILED or bool(outcome.error) for outcome in known),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in known),
        cached_tokens=sum(outcome.cached_tokens for outcome in known),
        ttft_ms=spread("ttft_ms", known),
        tpot_ms=spread("tpot_ms", known),
        e2e_ms=spread("e2e_ms", whole),
    )


def compared(pairs: Sequence[Pair]) -> Compared:
    """Compare all answers with the recorded ones."""
    comparable = [pair for pair in pairs if pair.is_comparable]
    greedy = [pair for pair in comparable if not pair.sent.planned.is_sampled]
    differing = [(pair.uid, difference) for pair in comparable if (difference := pair.difference) is not None]
    ends = Counter(pair.changed_end for pair in pairs if pair.changed_end)
    return Compared(
        num_compared=len(comparable),
        num_greedy=len(greedy),
        differing=tuple(differing),
        differing_greedy=sum(pair.difference is not None for pair in greedy),
        changed_ends=dict(ends.most_common()),
    )


def late_ms(sent: Sequence[Sent]) -> Spread:
    """Return how late requests were sent."""
    return spread_of([one.late_s * 1000 for one in sent])


def table(pairs: Sequence[Pair], *, same_clock: bool) -> str:
    """Return the figures of both sides as a table."""
    before = figures_of([pair.before for pair in pairs])
    after = figures_of([pair.after for pair in pairs])
    clock = "Redis' clock" if same_clock else "this client's clock, and not Redis' as before"
    rows: list[tuple[str, ...]] = [("", "before", "p50", "p90", "p99", "after", "p50", "p90", "p99")]
    for name, field in TIMES:
        cells = [name]
        for side in (before, after):
            spread: Spread = getattr(side, field)
            figures = (spread.p50, spread.p90, spread.p99)
            cells += ["", *(f"{value:,.1f}" if spread.count else "-" for value in figures)]
        rows.append(tuple(cells))
    for name, field in (("whole answers", "num_whole"), ("cancelled", "num_cancelled"), ("errors", "num_errors")):
        rows.append((name, f"{getattr(before, field):,}", "", "", "", f"{getattr(after, field):,}"))
    rows.append(("prompts from the cache", before.cached_share, "", "", "", after.cached_share))
    return f"{report.aligned(rows)}\nTimes after: by {clock}."


def lateness(sent: Sequence[Sent]) -> str:
    """Return how exactly the recorded times were kept."""
    late = late_ms(sent)
    lines = [f"sent late by: p50 {late.p50:.1f} ms, p99 {late.p99:.1f} ms"]
    if not report.kept_schedule(late):
        lines.append("The times were not kept: the sender had no time. Lower --speed, or send from another machine.")
    return "\n".join(lines)


def other_prompts(pairs: Sequence[Pair]) -> int:
    """Return how many prompts have another number of tokens than before, as far as both sides say it."""
    lengths = ((pair.before.prompt_tokens, pair.after.prompt_tokens) for pair in pairs if pair.after is not None)
    return sum(before != after for before, after in lengths if before and after)


def comparison(found: Compared, *, draws_alike: bool = True) -> str:
    """Return the comparison in lines. *draws_alike*: the same seed gives the same tokens as before."""
    if not found.num_compared:
        return "no answers to compare"
    share = found.num_same / found.num_compared
    lines = [f"identical answers: {found.num_same:,} of {found.num_compared:,} ({share:.1%})"]
    if not draws_alike and found.num_greedy < found.num_compared:
        same = found.num_greedy - found.differing_greedy
        lines.append(f"of those at temperature 0: {same:,} of {found.num_greedy:,}; another engine draws other tokens")
    lines += [f"  {uid} differs at {difference}" for uid, difference in found.differing[:DIFFERENCES_SHOWN]]
    more = len(found.differing) - DIFFERENCES_SHOWN
    lines += [f"  and {more:,} more; --json has all"] if more > 0 else []
    if found.changed_ends:
        ends = ", ".join(f"{count:,}x {change}" for change, count in found.changed_ends.items())
        lines.append(f"changed finish reasons: {ends}")
    return "\n".join(lines)


def document(pairs: Sequence[Pair], sent: Sequence[Sent], *, with_answers: bool) -> dict[str, Any]:
    """Return all figures and every request for JSON; *with_answers*: with what the comparison found."""
    plain = {
        "before": figures_of([pair.before for pair in pairs]),
        "after": figures_of([pair.after for pair in pairs]),
        "late_ms": late_ms(sent),
    }
    if with_answers:
        found = compared(pairs)
        counts = {"compared": found.num_compared, "identical": found.num_same, "changed_ends": found.changed_ends}
        plain |= {"answers": counts}
    return plain | {"requests": [_row(pair, with_answers=with_answers) for pair in pairs]}


def _row(pair: Pair, *, with_answers: bool) -> dict[str, Any]:
    planned = pair.sent.planned
    row: dict[str, Any] = {
        "uid": pair.uid,
        "new_uid": pair.new_uid or None,
        "path": planned.path,
        "sampled": planned.is_sampled,
        "due_ms": round(planned.due_s * 1000, 3),
        "late_ms": round(pair.sent.late_s * 1000, 3),
        "before": pair.before.plain(),
        "after": None if pair.after is None else pair.after.plain(),
    }
    row |= {"unread": pair.sent.unread} if pair.sent.unread else {}
    if with_answers:
        row |= {"identical": pair.difference is None if pair.is_comparable else None, "difference": pair.difference}
    return row


def plot(path: Path, pairs: Sequence[Pair], title: str) -> None:
    """Draw the share of requests below each time, before and after."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for axes, (name, field) in zip(figure.subplots(1, len(TIMES)), TIMES, strict=True):
        sides = (("before", [pair.before for pair in pairs]), ("after", [pair.after for pair in pairs if pair.after]))
        for label, outcomes in sides:
            some = [one for one in outcomes if one.is_whole or field != "e2e_ms"]
            values = [value for one in some if (value := getattr(one, field)) is not None]
            if values:
                axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
        axes.set(xscale="log", xlabel=name, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
    figure.savefig(path, dpi=120)
