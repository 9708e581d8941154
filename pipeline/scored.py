"""Counts the log-probabilities of prompts in the answers to one body, before any of them is computed."""

from __future__ import annotations

from typing import Final

from pipeline.errors import RequestError
from pipeline.events import Submitted

MOST_SCORES: Final = 1_000_000
"""Largest number of pairs of a token and its log-probability."""
TOO_MANY: Final = "too_many_scores"
"""Code of a request that asks for more."""


def pairs_told(submitted: Submitted, num_tokens: int) -> int:
    """Return how many pairs all answers contain about the prompt of *submitted*, which has *num_tokens* tokens.

    Each token counts, and each of its alternatives. Each answer repeats them, and each frame of a stream in SGLang's
    form, too.
    """
    sampling, shown = submitted.sampling, submitted.presentation
    if sampling.prompt_logprobs is None:
        return 0  # or another sibling has them
    times = shown.choices * ((sampling.max_tokens or 1) if shown.stream and shown.whole_text else 1)
    return num_tokens * (1 + sampling.prompt_logprobs) * times


def too_many(pairs: int, submitted: Submitted) -> RequestError | None:
    """Return the error for a body whose answers contain *pairs* pairs; None if they may."""
    if pairs <= MOST_SCORES:
        return None
    shown = submitted.presentation
    asked = "logprob_start_len" if shown.whole_text else "prompt_logprobs" if shown.prompt_scores else "logprobs"
    message = (
        f"{asked}: the answers would tell {pairs} log-probabilities of the tokens of prompts and their alternatives; "
        f"at most {MOST_SCORES}. Ask for fewer alternatives or answers, or send shorter prompts, or fewer at once"
    )
    hint = ", or do not stream: each frame repeats them." if shown.stream and shown.whole_text else "."
    return RequestError(message + hint, code=TOO_MANY, param=asked)
