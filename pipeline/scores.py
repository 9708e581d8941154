"""How probable tokens are, and what clients are told of that and of their prompt: values that events hold."""

from __future__ import annotations

from pipeline.sampling import Value


class Score(Value):
    """How probable the model finds a token, from its own logits: before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens and their log-probabilities, the most probable one first."""


class ToldToken(Value):
    """A token as clients are told of it."""

    token: int
    text: str
    """If its bytes are not UTF-8: `bytes:` and each byte as `\\x..`, as OpenAI writes it."""


class ToldCandidate(ToldToken):
    """A token and its log-probability in one place."""

    logprob: float


class ToldScore(ToldCandidate):
    """A token of the prompt or the answer, and the most probable tokens in its place."""

    top: tuple[ToldCandidate, ...] = ()


class ToldPrompt(Value):
    """What a client asked to be told about its prompt."""

    num_tokens: int
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """If it asked for them."""
    text: str = ""
    """If it asked for its prompt before the answer (`echo`)."""
    scores: tuple[ToldScore, ...] = ()
    """Of all tokens but the first, if it asked for them."""
    first: ToldToken | None = None
    """The first token, which has no score, if the others have one."""
