"""What was heard of an answer, choice by choice; a fold of its events, the same for whoever folds them and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.events import Finished, FinishReason, Presentation, Submitted, TokensProduced, ToldPrompt, ToldScore


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What one event adds to an answer, as far as its client is told of it."""

    text: str
    token_ids: tuple[int, ...] = ()
    scores: tuple[ToldScore, ...] = ()


@dataclass(slots=True)
class Choice:
    """One of the answers to a request."""

    index: int
    shown: Presentation
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

    def apply(self, event: TokensProduced) -> AnswerPart:
        """Take tokens in, and return what of them is shown."""
        self.prompt = self.prompt or event.prompt
        if self.shown.prompt_only:
            return AnswerPart("")
        self.texts.append(event.text)
        self.token_ids += event.tokens
        self.scores += event.scores
        return AnswerPart(event.text, event.tokens, event.scores)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's counts as far as they are known: while it runs by what was heard, at the end by the log."""
        if self.finished is None:
            prompt = self.prompt or ToldPrompt(num_tokens=0)
            return _usage(prompt.num_tokens, len(self.token_ids), prompt.cached_tokens)
        return usage_of([self])


def choices_for(events: Sequence[Submitted]) -> list[Choice]:
    """Return the choices that siblings, or a single request, come to."""
    return [Choice(index, event.presentation) for index, event in enumerate(events)]


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the counts of answers that have ended; a prompt counts once, however many choices it has."""
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
