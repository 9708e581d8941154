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

    def tokens(self, kind: str) -> int | None:
        """Return the number of "prompt", "cached" or "output" tokens, if the server said it."""
        details = self.usage.get("prompt_tokens_details")
        value = {
            "prompt": self.usage.get("prompt_tokens"),
            "cached": details.get("cached_tokens") if isinstance(details, Mapping) else None,
            "output": self.usage.get("completion_tokens"),
        }[kind]
        return value if isinstance(value, int) else None

    @property
    def decode(self) -> tuple[int, float] | None:
        """The number of tokens after the first one, and their seconds."""
        num = self.tokens("output") or 0
        if self.first_s is None or num < 2 or self.ended_s <= self.first_s:
            return None
        return num - 1, self.ended_s - self.first_s


def table(answers: Sequence[Figures]) -> list[tuple[str, str, str]]:
    """Return rows of (name, last answer, session)."""
    last = answers[-1:]
    return [
        ("answers", str(len(last)), str(len(answers))),
        ("time to first token", _mean_ttft(last), _mean_ttft(answers)),
        ("tokens per second", _speed(last), _speed(answers)),
        *((f"{kind} tokens", _sum(last, kind), _sum(answers, kind)) for kind in ("prompt", "cached", "output")),
    ]


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


def _sum(answers: Sequence[Figures], kind: str) -> str:
    """Add up the known counts; a stopped answer has none."""
    known = [count for each in answers if (count := each.tokens(kind)) is not None]
    missing = len(answers) - len(known)
    return f"{sum(known):,}{f' (+ {missing} unknown)' if missing else ''}" if known else "-"
