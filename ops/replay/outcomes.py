"""What came of a request: its times, its tokens and its end; and where two answers differ. Sends and reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from ops.bench import load, report
from pipeline.events import Cancelled, Failed, Finished, HistoryEvent, Submitted, TokensProduced

CANCELLED: Final = "cancelled"
FAILED: Final = "failed"
SHOWN: Final = 40
"""Characters of an answer that a difference shows, from where it begins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one request. Times are in ms since its submit, or since its sending."""

    end: str
    """`stop`, `length`, `cancelled` or `failed`; empty: it had not ended."""
    text: str = ""
    tokens: tuple[int, ...] | None = None
    """None: only the text is known."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float | None = None
    """To the first token, or to the first text."""
    tpot_ms: float | None = None
    """Per token after the first; None if there are no two tokens."""
    e2e_ms: float | None = None
    error: str = ""
    by_client: bool = False
    """Its client cancelled it."""

    @property
    def is_whole(self) -> bool:
        """Whether the model ended the answer."""
        return self.end not in ("", CANCELLED, FAILED)

    def plain(self) -> dict[str, Any]:
        """Return it for JSON, without the answer itself."""
        names = ("end", "error", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms")
        return {name: getattr(self, name) for name in names}


def outcome_of(events: Iterable[HistoryEvent]) -> Outcome:
    """Fold a history, whose times are of Redis' clock."""
    began_ms, tokens, texts = 0, list[int](), list[str]()
    first, last = None, None
    ended: dict[str, Any] = {"end": ""}
    for event in events:
        match event:
            case Submitted():
                began_ms = event.ms
            case TokensProduced():
                first, last = first or event, event
                tokens += event.tokens
                texts.append(event.text)
            case Finished(usage=usage):
                ended = {"end": event.reason, "e2e_ms": event.ms - began_ms}
                ended |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
            case Failed():
                ended = {"end": FAILED, "error": f"{event.status} {event.code}: {event.message}"}
            case Cancelled():
                ended = {"end": CANCELLED, "e2e_ms": event.ms - began_ms, "by_client": event.by == "client"}
    if first is not None and last is not None:
        ended["ttft_ms"] = first.ms - began_ms
        if len(tokens) > first.count:
            ended["tpot_ms"] = (last.ms - first.ms) / (len(tokens) - first.count)
    return Outcome(text="".join(texts), tokens=tuple(tokens), output_tokens=len(tokens), **ended)


def outcome_seen(answer: load.Answer, *, left: bool) -> Outcome:
    """Return what the client saw of a stream, by its own clock. *left*: it went before the end."""
    ttft_ms, e2e_ms = report.ttft_ms(answer) if answer.content_s else None, report.e2e_ms(answer)
    if left:
        return Outcome(CANCELLED, answer.text, ttft_ms=ttft_ms, e2e_ms=e2e_ms, by_client=True)
    if answer.error:
        return Outcome(FAILED, answer.text, error=answer.error)
    return Outcome(
        answer.reason,
        answer.text,
        output_tokens=answer.output_tokens,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        ttft_ms=ttft_ms,
        tpot_ms=report.tpot_ms(answer),
        e2e_ms=e2e_ms,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer differs from the one before for the first time."""

    token: int | None
    """Its number, the first is 1; None: only the texts are known."""
    character: int
    """How many characters are the same."""
    before: str
    """How the answers go on from there; if only the tokens differ, their ids."""
    after: str

    def __str__(self) -> str:
        place = f"character {self.character + 1}" if self.token is None else f"token {self.token}"
        return f"{place}: {self.before!r}, now {self.after!r}"


def is_comparable(before: Outcome, after: Outcome) -> bool:
    """Return whether both have an answer, of which something can be compared. One that was cancelled may be short."""
    ended = {before.end, after.end}
    if ended & {"", FAILED}:
        return False
    return CANCELLED not in ended or bool(before.output_tokens and (after.tokens or after.text))


def first_difference(before: Outcome, after: Outcome) -> Difference | None:
    """Return where two comparable answers differ, if they do. Of cancelled ones, what both have is compared."""
    cancelled = CANCELLED in (before.end, after.end)
    same_text = _num_same(before.text, after.text)
    if before.tokens is None or after.tokens is None:
        if _is_same(before.text, after.text, same_text, cancelled=cancelled):
            return None
        return Difference(None, same_text, _from(before.text, same_text), _from(after.text, same_text))
    same = _num_same(before.tokens, after.tokens)
    if _is_same(before.tokens, after.tokens, same, cancelled=cancelled):
        return None
    shown = _from(before.text, same_text), _from(after.text, same_text)
    if shown[0] == shown[1]:  # special tokens have no text, and some texts have several spellings
        shown = _ids(before.tokens, same), _ids(after.tokens, same)
    return Difference(same + 1, same_text, *shown)


def _num_same(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _is_same(one: Sequence[object], other: Sequence[object], same: int, *, cancelled: bool) -> bool:
    lengths = len(one), len(other)
    return same == min(lengths) and (cancelled or lengths[0] == lengths[1])


def _from(text: str, start: int) -> str:
    return text[start : start + SHOWN]


def _ids(tokens: Sequence[int], start: int) -> str:
    return f"token id {tokens[start]}" if start < len(tokens) else "the end"
