"""Log-probabilities, as the endpoints send them. A client that asks for none gets null."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from pipeline.events import ToldCandidate, ToldPrompt, ToldScore, ToldToken

_BYTES: Final = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")


def chat_logprobs(scores: Sequence[ToldScore]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""
    content = [_with_bytes(score) | {"top_logprobs": [_with_bytes(other) for other in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def completion_logprobs(prompt: ToldPrompt | None, scores: Sequence[ToldScore], offset: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion: first the prompt, if it is given, then the answer.

    *offset* is where in the text the first of *scores* begins; a prompt before it begins at 0.
    """
    tokens: list[ToldToken] = [*([prompt.first] if prompt and prompt.first else ()), *(prompt.scores if prompt else ())]
    offsets = _offsets(tokens, 0) + _offsets(scores, offset)
    tokens += scores
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob if isinstance(token, ToldScore) else None for token in tokens],
        "top_logprobs": [_by_text(token) if isinstance(token, ToldScore) else None for token in tokens],
        "text_offset": offsets,
    }


def prompt_logprobs(prompt: ToldPrompt) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then token id -> log-probability and text."""
    told: list[dict[str, Any] | None] = [None]
    for score in prompt.scores:
        told.append(
            {str(token.token): {"logprob": token.logprob, "decoded_token": token.text} for token in (score, *score.top)}
        )
    return told


def utf8(text: str) -> list[int]:
    """Return the bytes of a token from its text, which lists them one by one if they are not UTF-8."""
    if _BYTES.fullmatch(text):
        return list(bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")))
    return list(text.encode())


def _with_bytes(token: ToldCandidate) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": utf8(token.text)}


def _by_text(score: ToldScore) -> dict[str, float]:
    """Return the most probable tokens and the chosen one; of several with the same text, the most probable."""
    return {score.text: score.logprob} | {other.text: other.logprob for other in reversed(score.top)}


def _offsets(tokens: Sequence[ToldToken], offset: int) -> list[int]:
    """Return where each token begins in the text; part of a character begins where the character does."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += 0 if _BYTES.fullmatch(token.text) else len(token.text)
    return offsets
