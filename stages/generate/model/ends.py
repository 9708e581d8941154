"""Tokens that end an answer of a model: those of its two configs, and the `eos_token` of its tokenizer."""

from __future__ import annotations

from pathlib import Path

import structlog

from pipeline.vocabulary import CONFIG, read_vocabulary
from stages.generate.model.spec import ModelSpec

logger = structlog.get_logger()


def end_tokens(folder: Path, spec: ModelSpec) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the model in *folder*, sorted.

    A chat model may have the config of its base model, which does not know the token that ends a turn.

    Raises:
        ConfigError: The tokenizer is broken.
    """
    vocabulary = read_vocabulary(folder)
    if not vocabulary.end:
        return spec.eos_ids
    token = vocabulary.id_of(vocabulary.end)
    if token is None or token >= spec.vocab_size:
        reason = f"eos_token is {vocabulary.end!r:.50}, which is no token of the model"
        logger.warning("eos_token_ignored", file=str(folder / CONFIG), reason=reason)
        return spec.eos_ids
    return tuple(sorted({*spec.eos_ids, token}))
