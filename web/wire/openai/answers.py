"""An answer so far, choice by choice: a fold of its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.events import Finished, FinishReason, Presentation, Submitted, TokensProduced, ToldPrompt, ToldScore


class AnswerPart(NamedTuple):
    """What one event adds to an answer, as the client sees it."""

    text: str
    token_ids: tuple[int, ...] = ()
    scores: tuple[ToldScore, ...] = ()


@dataclass(slots=True)
class Choice:
    """One of the answers to a request."""

    index: int
    shown: Presentation
    stop_token_ids: tuple[int, ...] = ()
    """Those that the client named."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[ToldScore] = field(default_factory=list)
    prompt: ToldPrompt | None = None
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reason(self) -> FinishReason:
        """Why it ended, once it has."""
        assert self.finished is not None
        return "length" if self.shown.prompt_only else self.finished.reason

    @property
    def matched(self) -> str | int | None:
        """The stop string or the token that ended it; None: the limit of its length did."""
        assert self.finished is not None
        if self.reason == "length":
            return None
        return self.finished.stop_string or (self.token_ids[-1] if self.token_ids else None)

    def apply(self, event: TokensProduced) -> AnswerPart:
        """Add tokens; return the part that the client sees."""
        self.prompt = self.prompt or event.prompt
        if self.shown.prompt_only:
            return AnswerPart("")
        self.texts.append(event.text)
        self.token_ids += event.tokens
        self.scores += event.scores
        return AnswerPart(event.text, event.tokens, event.scores)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts: while the answer runs those so far, at the end those of the log."""
        if self.finished is None:
            prompt = self.prompt or ToldPrompt(num_tokens=0)
            return _usage(prompt.num_tokens, len(self.token_ids), prompt.cached_tokens)
        return usage_of([self])


def choices_for(events: Sequence[Submitted]) -> list[Choice]:
    """Return the empty choices of siblings, or of a single request."""
    return [Choice(index, event.presentation, event.sampling.stop_token_ids) for index, event in enumerate(events)]


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of answers that have ended; a prompt counts once, whatever the number of its choices."""
    usages = [choice.finished.usage for choice in choices if choice.finished is not None]
    per_prompt = choices[0].shown.choices
    prompts = usages[::per_prompt]
    num_output = 0 if choices[0].shown.prompt_only else sum(usage.completion_tokens for usage in usages)
    return _usage(
        sum(usage.prompt_tokens for usage in prompts), num_output, sum(usage.cached_tokens for usage in prompts)
    )


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
