"""The text of single tokens of a loaded tokenizer, including tokens that end inside a character."""

from __future__ import annotations

import functools
from collections.abc import Callable

import orjson
from tokenizers import Tokenizer

from pipeline.spelling import Spelling, text_of

TokenText = Callable[[int], str]
"""Token id -> its text, as `pipeline.spelling.text_of` writes it."""


def token_text_of(tokenizer: Tokenizer) -> TokenText:
    """Return the function from token to text of *tokenizer*. An unknown token has an empty text."""
    added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    spelling = Spelling.of(None if tokenizer.decoder is None else orjson.loads(tokenizer.decoder.__getstate__()))

    @functools.lru_cache(maxsize=65_536)
    def piece(token_id: int) -> str:
        written = tokenizer.id_to_token(token_id)
        if written is None or token_id in added:
            return added.get(token_id, "")
        return text_of(spelling.bytes_of(written))

    return piece
