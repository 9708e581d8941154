"""Describes a tokenizer to clients: what they need to render and count prompts, and nothing about this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOLD_AS_IT_IS: Final = ("add_bos_token", "add_eos_token", "add_prefix_space")
"""Fields of tokenizer_config.json that are copied. Others may hold paths or anything else."""
OF_AN_ADDED_TOKEN: Final = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def description(tokenizer: PreTrainedTokenizerFast, config: Mapping[str, Any]) -> str:
    """Return JSON with the field names of a tokenizer_config.json; *config* is the model's own.

    A missing special token is null, and a `model_max_length` that is not set, too.
    """
    longest = tokenizer.model_max_length
    added = sorted(tokenizer.added_tokens_decoder.items())
    told = {
        "tokenizer_class": str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        **{name: tokenizer.special_tokens_map.get(name) for name in SPECIAL_TOKENS},
        "additional_special_tokens": list(tokenizer.extra_special_tokens),
        "chat_template": _template(tokenizer),
        "model_max_length": longest if longest < 2**63 else None,  # transformers writes 10**30 for none
        "padding_side": tokenizer.padding_side,
        "truncation_side": tokenizer.truncation_side,
        "clean_up_tokenization_spaces": bool(tokenizer.clean_up_tokenization_spaces),
        **{name: config[name] for name in TOLD_AS_IT_IS if isinstance(config.get(name), bool)},
        "added_tokens_decoder": {
            str(token): {name: getattr(each, name) for name in OF_AN_ADDED_TOKEN} for token, each in added
        },
    }
    return orjson.dumps(told).decode()


def _template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the chat template for conversations without tools."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:  # there is none, or several with other names
        return None
