"""Log-probabilities, as the endpoints send them. A client that asks for none gets null."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from pipeline.events import ToldCandidate, ToldPrompt, ToldScore, ToldToken

_BYTES: Final = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")
MOST_SKIPPED: Final = 4
"""Most characters of a text between two tokens that are in none: a tokenizer may have written them another way."""


def chat_logprobs(scores: Sequence[ToldScore], *, as_ids: bool = False) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion. With *as_ids*, tokens are `token_id:<id>`, as in vLLM."""
    content = [
        _with_bytes(score, as_ids) | {"top_logprobs": [_with_bytes(other, as_ids) for other in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    prompt: ToldPrompt | None, scores: Sequence[ToldScore], text: str, offset: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion: first the prompt, if it is given, then the answer.

    *scores* are those of the tokens of *text*, which begins at *offset*; a prompt before it begins at 0. *as_ids* is
    that of chat_logprobs.
    """
    tokens: list[ToldToken] = []
    offsets: list[int] = []
    if prompt is not None:
        tokens += [*([prompt.first] if prompt.first else ()), *prompt.scores]
        offsets += _offsets(tokens, prompt.text, 0)
    offsets += _offsets(scores, text, offset)
    tokens += scores
    return {
        "tokens": [_name(token, as_ids) for token in tokens],
        "token_logprobs": [token.logprob if isinstance(token, ToldScore) else None for token in tokens],
        "top_logprobs": [_by_name(token, as_ids) if isinstance(token, ToldScore) else None for token in tokens],
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


def _name(token: ToldToken, as_ids: bool) -> str:
    return f"token_id:{token.token}" if as_ids else token.text


def _with_bytes(token: ToldCandidate, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(token, as_ids), "logprob": token.logprob, "bytes": utf8(token.text)}


def _by_name(score: ToldScore, as_ids: bool) -> dict[str, float]:
    """Return the told tokens and the chosen one; of several with the same text, the most probable."""
    others = {_name(other, as_ids): other.logprob for other in sorted(score.top, key=lambda other: other.logprob)}
    return {_name(score, as_ids): score.logprob} | others


def _offsets(tokens: Sequence[ToldToken], text: str, start: int) -> list[int]:
    """Return where each of *tokens* begins in *text*, which begins at *start*.

    Part of a character begins where the character does. A token that is not in the text, such as a special token,
    begins where the next one does.
    """
    offsets: list[int] = []
    place, part = 0, b""
    for token in tokens:
        if _BYTES.fullmatch(token.text):
            offsets.append(start + place)
            part += bytes(utf8(token.text))
            whole = part.decode(errors="ignore")
            if part == whole.encode() and text.startswith(whole, place):
                place, part = place + len(whole), b""
            continue
        part = b""
        found, length = text.find(token.text, place, place + MOST_SKIPPED + len(token.text)), len(token.text)
        if (
            found < 0 and token.text[:1] == " " and text.startswith(token.text[1:], place)
        ):  # a decoder dropped the space
            found, length = place, length - 1
        if found >= 0:
            place = found
        offsets.append(start + place)
        place += length if found >= 0 else 0
    return offsets
