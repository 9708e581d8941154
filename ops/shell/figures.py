"""Times and tokens of a session's answers, for `/stats`. Token counts come from `usage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figures:
    """One answer. Times are of `time.monotonic`. Without text `first_s` is None; a stopped answer has no usage."""

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
        """The number of tokens after the first one, and their seconds."""
        if self.first_s is None or (self.output_tokens or 0) < 2 or self.ended_s <= self.first_s:
            return None
        return (self.output_tokens or 0) - 1, self.ended_s - self.first_s


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else None


def table(answers: Sequence[Figures]) -> list[tuple[str, str, str]]:
    """Return rows of (name, last answer, session)."""
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
    """Add up the known counts; a stopped answer has none."""
    counts = [getattr(each, name) for each in answers]
    known = [count for count in counts if count is not None]
    if not known:
        return "-"
    missing = len(counts) - len(known)
    return f"{sum(known):,}" + (f" (+ {missing} unknown)" if missing else "")
