"""Log-probabilities, as the endpoints send them. A client that asks for none gets null."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from pipeline.events import Logprob, Logprobs, PromptInfo
from pipeline.scores import Pair, Row
from web.wire.pieces import Slices, sliced

_BYTES: Final = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")
MOST_SKIPPED: Final = 4
"""Most characters of a text between two tokens that are in none: a tokenizer may have written them another way."""


def chat_logprobs(scores: Sequence[Logprob], *, as_ids: bool = False) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion. With *as_ids*, tokens are `token_id:<id>`, as in vLLM."""
    content = (
        _with_bytes(token, as_ids) | {"top_logprobs": [_with_bytes(other, as_ids) for other in top]}
        for token, top in rows_of(scores)
    )
    return {"content": _listed(content, scores), "refusal": None}


def completion_logprobs(
    prompt: PromptInfo | None, scores: Sequence[Logprob], text: str, offset: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion: first the prompt, if it is given, then the answer.

    *scores* are those of the tokens of *text*, which begins at *offset*; a prompt before it begins at 0. *as_ids* is
    that of chat_logprobs.
    """
    scored = scores if prompt is None else prompt.scores

    def rows() -> Iterator[Row]:
        yield from () if prompt is None else prompt_rows(prompt)
        yield from rows_of(scores)

    def tokens() -> Iterator[Pair]:
        yield from () if prompt is None else prompt_tokens(prompt)
        yield from tokens_of(scores)

    def offsets() -> Iterator[int]:
        if prompt is not None:
            yield from _offsets(prompt_tokens(prompt), prompt.text, 0)
        yield from _offsets(tokens_of(scores), text, offset)

    return {
        "tokens": _listed((_name(token, as_ids) for token in tokens()), scored),
        "token_logprobs": _listed((token.logprob for token in tokens()), scored),
        "top_logprobs": _listed((_by_name(token, top, as_ids) for token, top in rows()), scored),
        "text_offset": _listed(offsets(), scored),
    }


def prompt_logprobs(prompt: PromptInfo) -> Slices | list[Any]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then token id -> log-probability and text."""
    scored = (
        {str(one.token): {"logprob": one.logprob, "decoded_token": one.text} for one in (token, *top)}
        for token, top in prompt.scores.rows()
    )
    return _listed(itertools.chain((None,), scored), prompt.scores)


def prompt_rows(prompt: PromptInfo, start: int = 0) -> Iterator[Row]:
    """Yield the tokens of a scored prompt from *start* on. The first one has no log-probability."""
    if prompt.first and start == 0:
        yield Pair(prompt.first.token, prompt.first.text, None), []
    yield from prompt.scores.rows(max(start - bool(prompt.first), 0))


def prompt_tokens(prompt: PromptInfo, start: int = 0) -> Iterator[Pair]:
    """As `prompt_rows`, without the most probable tokens."""
    if prompt.first and start == 0:
        yield Pair(prompt.first.token, prompt.first.text, None)
    yield from prompt.scores.tokens(max(start - bool(prompt.first), 0))


def rows_of(scores: Sequence[Logprob]) -> Iterator[Row]:
    """Yield the rows of *scores*."""
    if isinstance(scores, Logprobs):
        yield from scores.rows()
        return
    for score in scores:
        token, *top = (Pair(one.token, one.text, one.logprob) for one in (score, *score.top))
        yield token, top


def tokens_of(scores: Sequence[Logprob]) -> Iterator[Pair]:
    """As `rows_of`, without the most probable tokens."""
    if isinstance(scores, Logprobs):
        yield from scores.tokens()
    else:
        yield from (Pair(score.token, score.text, score.logprob) for score in scores)


def _listed(items: Iterable[Any], scores: Sequence[Logprob]) -> Slices | list[Any]:
    """Return *items*, which are made of *scores*: those of few tokens as they are, and those of many in slices."""
    if not isinstance(scores, Logprobs):
        return list(items)
    return sliced(items, max(scores.num_pairs // max(len(scores), 1), 1))


def utf8(text: str) -> list[int]:
    """Return the bytes of a token from its text, which lists them one by one if they are not UTF-8."""
    if _BYTES.fullmatch(text):
        return list(bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")))
    return list(text.encode())


def _name(token: Pair, as_ids: bool) -> str:
    return f"token_id:{token.token}" if as_ids else token.text


def _with_bytes(token: Pair, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(token, as_ids), "logprob": token.logprob, "bytes": utf8(token.text)}


def _by_name(token: Pair, top: Sequence[Pair], as_ids: bool) -> dict[str, float | None] | None:
    """Return the told tokens and the chosen one; of several with the same text, the most probable."""
    if token.logprob is None:
        return None
    others = {_name(other, as_ids): other.logprob for other in sorted(top, key=lambda other: other.logprob or 0.0)}
    return {_name(token, as_ids): token.logprob} | others


def _offsets(tokens: Iterable[Pair], text: str, start: int) -> Iterator[int]:
    """Yield where each of *tokens* begins in *text*, which begins at *start*.

    Part of a character begins where the character does. A token that is not in the text, such as a special token,
    begins where the next one does.
    """
    place, part = 0, b""
    for token in tokens:
        if _BYTES.fullmatch(token.text):
            yield start + place
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
        yield start + place
        place += length if found >= 0 else 0
