"""Makes a new request from a recorded one, which computes the same tokens again. Knows no log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.errors import MiniSGLError
from pipeline.events import Finished, Presentation, Replay, SamplingParams, Submitted, Templating, Tokenized
from pipeline.sampling import MOST_LOGPROBS
from pipeline.views.recorded import History

LOWEST: Final = 2**31
"""A priority after all that clients can ask for."""


class NotComputed(MiniSGLError):
    """A recorded request cannot be computed again, or was not."""


def again(history: History, *, cached: bool = False, beyond: int = 0) -> Submitted:
    """Return the request that computes *history* again.

    If the model did not end the recorded tokens, the request ends after them, or *beyond* tokens later. With *cached*
    it may read pages of the prefix cache.

    Raises:
        NotComputed: The history lacks what an engine needs.
    """
    submitted, tokenized = _asked(history)
    sampling, end = submitted.sampling, history.end
    if not isinstance(end, Finished) or end.reason == "length":
        most = len(history.tokens) + beyond
        if not most:
            raise NotComputed(f"{history.uid}: has no tokens to compare with; it ended before its first one")
        sampling = sampling.model_copy(update={"max_tokens": most})
    return _request(history, submitted, tokenized, tokenized.token_ids, sampling, tokenized.grammar, cached=cached)


def scored(history: History, n: int, tokens: Sequence[int] = ()) -> Submitted:
    """Return the request for the log-probabilities in the place of token *n*, after the recorded tokens before it:
    those of *tokens*, or of the most probable ones.
    """
    submitted, tokenized = _asked(history)
    prompt = tokenized.token_ids + history.token_ids[: n - 1]
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=MOST_LOGPROBS, logprob_token_ids=tuple(tokens))
    return _request(history, submitted, tokenized, prompt, sampling)


def _asked(history: History) -> tuple[Submitted, Tokenized]:
    submitted, tokenized = history.submitted, history.tokenized
    if submitted is None:
        raise NotComputed(f"{history.uid}: its history begins with another event than `submitted`")
    if submitted.task != "generate":
        raise NotComputed(f"{history.uid}: the tokenizer alone answered it ({submitted.task}); no engine computed it")
    if tokenized is None:
        raise NotComputed(f"{history.uid}: ended before its prompt was tokenized; there is nothing to compute")
    return submitted, tokenized


def _request(
    history: History,
    submitted: Submitted,
    tokenized: Tokenized,
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    grammar: str = "",
    *,
    cached: bool = False,
) -> Submitted:
    return Submitted(
        endpoint=submitted.endpoint,
        frontend="",
        owner=submitted.owner,
        model=submitted.model,
        prompt_ids=prompt_ids,
        sampling=sampling,
        constraint=submitted.constraint if grammar else None,
        calls=submitted.calls,  # from here on: how clients see the answer
        templating=Templating(tools=submitted.templating.tools),
        presentation=Presentation(reasoning=submitted.presentation.reasoning),
        priority=LOWEST,
        overtakes=True,
        labels=submitted.labels,
        replay=Replay(
            of=history.uid, bad_words=tokenized.bad_words, grammar=grammar, markup=tokenized.markup, cached=cached
        ),
    )
