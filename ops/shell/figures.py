"""Times and tokens of the answers of a session: what `/stats` shows. Tokens are those of `usage`, none is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figures:
    """One answer. Times are of `time.monotonic`; None and an empty usage: it never came."""

    sent_s: float
    first_s: float | None
    """When the first text came."""
    ended_s: float
    usage: Mapping[str, Any]

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def prompt_tokens(self) -> int | None:
        return _count(self.usage, "prompt_tokens")

    @property
    def output_tokens(self) -> int | None:
        return _count(self.usage, "completion_tokens")

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details")
        return _count(details, "cached_tokens") if isinstance(details, Mapping) else None

    @property
    def decode(self) -> tuple[int, float] | None:
        """How many tokens came after the first one, and in how many seconds."""
        if self.first_s is None or (self.output_tokens or 0) < 2 or self.ended_s <= self.first_s:
            return None
        return (self.output_tokens or 0) - 1, self.ended_s - self.first_s


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else None


def table(answers: Sequence[Figures]) -> list[tuple[str, str, str]]:
    """Return rows of a name, the last answer's figure and the session's."""
    last = answers[-1:]
    rows = [("answers", str(len(last)), str(len(answers)))]
    rows.append(("time to first token", _mean_ttft(last), _mean_ttft(answers)))
    rows.append(("tokens per second", _speed(last), _speed(answers)))
    for name in ("prompt", "cached", "output"):
        rows.append((f"{name} tokens", _sum(last, f"{name}_tokens"), _sum(answers, f"{name}_tokens")))
    return rows


def _mean_ttft(answers: Sequence[Figures]) -> str:
    times = [each.ttft_s for each in answers if each.ttft_s is not None]
    if not times:
        return "-"
    return f"{1000 * sum(times) / len(times):,.0f} ms{' on average' if len(times) > 1 else ''}"


def _speed(answers: Sequence[Figures]) -> str:
    decodes = [each.decode for each in answers if each.decode is not None]
    if not decodes:
        return "-"
    return f"{sum(num for num, _ in decodes) / sum(seconds for _, seconds in decodes):,.1f}"


def _sum(answers: Sequence[Figures], name: str) -> str:
    """Add up what is known; a cut answer, whose stream was left, has no counts."""
    counts = [getattr(each, name) for each in answers]
    known = [count for count in counts if count is not None]
    if not known:
        return "-"
    missing = len(counts) - len(known)
    return f"{sum(known):,}" + (f" (+ {missing} unknown)" if missing else "")
